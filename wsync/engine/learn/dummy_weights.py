"""Made-up tensors for a model: every value is finite in every floating-point format.

They take a range of addresses with hardly any memory behind it: a few megabytes of random bytes,
mapped over and over.  Neighbours differ, and a loader may write into what it was given, because
nobody else reads it.

Seed 0 gives values of all sizes, others give such as weights have: who goes by the size of values
that it reads where nobody can see it does not do the same with both.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wsync._core import Layout, LayoutBuilder, NoMemoryError
from wsync.engine.learn.time_limit import taken
from wsync.module_tensors import dtype_of
from wsync.module_tensors.quantised_names import is_note

_ALIGNMENT: Final = 256
_IN_WORD: Final = 8  # columns of INT4 in an int32
_PATTERN: Final = 16 << 20
# the kernel allows 65530 mappings
_MAPPINGS: Final = 8192
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000


class MadeUpModel:
    """The tensors of a model, with made-up values.

    model: names, dtypes and shapes; `layout` is where they lie from `address`, in one buffer.
    seed: other values.  together: indices of the tensors that no rounds bring apart.
    """

    def __init__(self, model: Layout, seed: int = 0) -> None:
        builder = LayoutBuilder()
        self.tensors: list[tuple[str, str, tuple[int, ...], int, int]] = []
        groups: dict[int, list[int]] = {}
        offset = 0
        for index, fact in enumerate(map(model.tensor, range(model.tensor_count))):
            name, dtype, shape, group = fact
            groups.setdefault(group or -1 - index, []).append(index)
            item = dtype_of(dtype).itemsize
            strides = [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            builder.add_tensor(name, dtype, shape)
            builder.add_shard(name, dtype, shape, [0] * len(shape), shape, 0, offset, strides)
            nbytes = item * math.prod(shape)
            self.tensors.append((name, dtype, shape, offset, nbytes))
            offset += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._shapes = {name: shape for name, _, shape, _, _ in self.tensors}
        self.together = list(groups.values())
        self.layout = builder.build()
        self.nbytes = max(offset, 1)
        self._memory = _repeating(self.nbytes, seed)
        self.address = _address(self._memory)
        self._given: list[tuple[str, StorageWeakRef]] = []
        self.restore()

    def pairs(self, names: frozenset[str] | None = None) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of all tensors, or of these, each with a storage of its own."""
        self.restore()
        found = []
        for name, dtype, shape, offset, nbytes in self.tensors:
            if names is not None and name not in names:
                continue
            if nbytes == 0:
                found.append((name, torch.empty(shape, dtype=dtype_of(dtype), device="cpu")))
                continue
            data = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
            found.append((name, data.view(dtype_of(dtype)).view(shape)))
        self._given = [(name, weak(tensor)) for name, tensor in found]
        return _Counted(found)

    def referenced(self) -> frozenset[str]:
        """Tensors of the last `pairs` that are still referred to."""
        return frozenset(name for name, storage in self._given if there(storage))

    def restore(self) -> None:
        """Undoes what a loader has written into the tensors."""
        # private pages that are dropped are those of the file again
        self._memory.madvise(mmap.MADV_DONTNEED)
        for name, dtype, shape, offset, nbytes in self.tensors:
            if dtype == "bool" and nbytes:  # of other bytes torch's copies make these
                data = torch.frombuffer(
                    self._memory, dtype=torch.uint8, count=nbytes, offset=offset
                )
                data &= 1
            if is_note(name):
                codes = self._shapes.get(f"{name.removesuffix('_shape')}_packed", ())
                if len(codes) == 2 and shape == (2,):  # loaders cut what they unpack by it
                    sizes = [codes[0], codes[1] * _IN_WORD]
                    numbers = torch.tensor(sizes, dtype=dtype_of(dtype), device="cpu")
                    self._memory[offset : offset + nbytes] = numbers.numpy().tobytes()
                else:
                    # those that a fused parameter keeps one of are equal in a checkpoint, and
                    # engines' threads load them in any order
                    self._memory[offset : offset + nbytes] = self._memory[:nbytes]


class _Counted(list[tuple[str, torch.Tensor]]):
    """Says how many of it have been taken."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(len(self)):
            taken()
            yield self[index]  # of which nothing is kept here


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that does not keep it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def there(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _repeating(nbytes: int, seed: int) -> mmap.mmap:
    """At least so many bytes, which repeat, at the cost of one period; NoMemoryError without room
    for their addresses."""
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    # a page more than a round number: no multiple of a tensor's rows
    period = max(min(size, _PATTERN), -(-size // _MAPPINGS)) // page * page + page
    generator = torch.Generator().manual_seed(seed)
    data = torch.empty(period, dtype=torch.uint8, device="cpu").random_(generator=generator)
    # of the two highest bits of an exponent one is zero: large and small, but never infinite
    data &= ~((data & 0x20) << 1)
    if seed:
        # the byte of the exponent in formats of two bytes and more: from 2**-14 to 2
        data[1::2] = data[1::2] & 0x83 | 0x3C
    remap = ctypes.CDLL(None, use_errno=True).mmap
    remap.restype = ctypes.c_void_p
    remap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags | mmap.MAP_ANONYMOUS, access)
        start = _address(memory)
        with open(os.memfd_create("wsync-made-up", os.MFD_CLOEXEC), "wb") as file:
            file.write(data.numpy().data)
            file.flush()
            for offset in range(0, size, period):
                # what is written there stays private
                place, count = start + offset, min(period, size - offset)
                if remap(place, count, access, flags | _MAP_FIXED, file.fileno(), 0) != place:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise NoMemoryError(f"mapping {nbytes} bytes of made-up tensors: {error}") from None
    return memory
