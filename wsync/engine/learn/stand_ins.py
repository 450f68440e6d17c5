"""Stand-ins for the tensors of a model, in a range of addresses with hardly any memory behind it.

A model of any size is played by a few megabytes of random bytes, mapped over and over.  Loading
such tensors is a rehearsal: every value is finite in every floating-point format, neighbours
differ, and a loader that writes into what it was given harms nobody: nobody else reads that.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wsync._core import Layout, LayoutBuilder, NoMemoryError
from wsync.dtypes import dtype_of

_ALIGNMENT: Final = 256
_PATTERN: Final = 16 << 20
# the kernel allows 65530 mappings
_MAPPINGS: Final = 8192
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_DONTNEED: Final = 4


class Rehearsal:
    """The tensors of a model, with made-up values.

    model: names, dtypes and shapes; `layout` is where they lie from `address`, in one buffer.
    seed: other values.
    """

    def __init__(self, model: Layout, seed: int = 0) -> None:
        builder = LayoutBuilder()
        self.tensors: list[tuple[str, str, tuple[int, ...], int, int]] = []
        offset = 0
        for index in range(model.tensor_count):
            name, dtype, shape, _ = model.tensor(index)
            item = dtype_of(dtype).itemsize
            strides = [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            builder.add_tensor(name, dtype, shape)
            builder.add_shard(name, dtype, shape, [0] * len(shape), shape, 0, offset, strides)
            nbytes = item * math.prod(shape)
            self.tensors.append((name, dtype, shape, offset, nbytes))
            offset += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self.layout = builder.build()
        self.nbytes = max(offset, 1)
        self._memory = _reserved(self.nbytes, seed)
        self.address: int = self._memory.wsync_mapping.address
        self._given: list[tuple[str, StorageWeakRef]] = []

    def pairs(self, names: frozenset[str] | None = None) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of all tensors, or of these, each with a storage of its own."""
        self.restore()
        found = []
        for name, dtype, shape, offset, nbytes in self.tensors:
            if names is not None and name not in names:
                continue
            if nbytes == 0:
                found.append((name, torch.empty(shape, dtype=dtype_of(dtype))))
                continue
            data = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
            found.append((name, data.view(dtype_of(dtype)).view(shape)))
        self._given = [(name, weak(tensor)) for name, tensor in found]
        return found

    def kept(self) -> frozenset[str]:
        """Tensors of the last `pairs` that somebody still refers to."""
        return frozenset(name for name, storage in self._given if there(storage))

    def restore(self) -> None:
        """Undoes what a loader has written into the tensors."""
        self._memory.wsync_mapping.restore()


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that does not keep it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def there(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


class _Mapping:
    """Reserved addresses, given back with the last reference."""

    def __init__(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._map, self._unmap, self._advise = libc.mmap, libc.munmap, libc.madvise
        self._map.restype = ctypes.c_void_p
        integers = [ctypes.c_int] * 3
        self._map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *integers, ctypes.c_long]
        self._unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.nbytes = nbytes
        self.address = self._mapped(None, nbytes, mmap.MAP_ANONYMOUS, -1)

    def fill(self, start: int, nbytes: int, fd: int) -> None:
        """Maps the start of a file into the range; what is written there stays private."""
        self._mapped(self.address + start, nbytes, _MAP_FIXED, fd)

    def restore(self) -> None:
        """Private pages that are not needed are those of the file again."""
        if self._advise(self.address, self.nbytes, _MADV_DONTNEED):
            text = os.strerror(ctypes.get_errno())
            raise NoMemoryError(f"restoring {self.nbytes} bytes of made-up tensors: {text}")

    def _mapped(self, address: int | None, nbytes: int, flags: int, fd: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags |= mmap.MAP_PRIVATE | _MAP_NORESERVE
        found = self._map(address, nbytes, access, flags, fd, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            text = os.strerror(ctypes.get_errno())
            raise NoMemoryError(f"reserving {nbytes} bytes of addresses: {text}")
        return int(found)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._unmap(self.address, self.nbytes)


def _reserved(nbytes: int, seed: int) -> Any:
    """An array of bytes that repeat; wsync_mapping: its memory, which lives as long."""
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    # a page more than a round number: no multiple of a tensor's rows
    period = max(min(size, _PATTERN), -(-size // _MAPPINGS)) // page * page + page
    mapping = _Mapping(size)
    fd = os.memfd_create("wsync-rehearsal", os.MFD_CLOEXEC)
    try:
        generator = torch.Generator().manual_seed(seed)
        data = torch.empty(period, dtype=torch.uint8).random_(generator=generator)
        # of the two highest bits of an exponent one is zero: large and small, but never infinite
        data &= ~((data & 0x20) << 1)
        os.truncate(fd, period)
        with mmap.mmap(fd, period) as pattern:
            pattern[:] = data.numpy().tobytes()
        for start in range(0, size, period):
            mapping.fill(start, min(period, size - start), fd)
    finally:
        os.close(fd)
    array: Any = (ctypes.c_uint8 * size).from_address(mapping.address)
    array.wsync_mapping = mapping
    return array
