"""Made-up tensors for a model: every value is finite in every floating-point format.

They take a range of addresses with hardly any memory behind it: a few megabytes of random bytes,
mapped over and over.  Neighbours differ.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from wsync._core import NoMemoryError
from wsync.module_tensors.names import is_note
from wsync.probing.codes import kind_of
from wsync.probing.numbering import Source

_ALIGNMENT: Final = 256
_IN_WORD: Final = 8  # columns of INT4 in an int32
_PATTERN: Final = 16 << 20
# the kernel allows 65530 mappings
_MAPPINGS: Final = 8192
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000


class MadeUpTensors:
    """Tensors of these dtypes and shapes.  given: those that are no made-up ones.  seed: other
    values."""

    def __init__(
        self, sources: Iterable[Source], given: Mapping[str, torch.Tensor], seed: int
    ) -> None:
        self._given = given
        self._places: dict[str, int] = {}
        offset = 0
        for source in sources:
            self._places[source.name] = offset
            nbytes = max(source.nbytes, 1)
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = _repeating(max(offset, 1), seed)

    def of(self, source: Source) -> torch.Tensor:
        if source.name in self._given:
            return self._given[source.name]
        count = math.prod(source.shape)
        if not count:
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        offset = self._places[source.name]
        data = torch.frombuffer(self._memory, dtype=source.dtype, count=count, offset=offset)
        return data.view(source.shape)

    def restore(self) -> None:
        """Undoes what a loader has written into the tensors."""
        # private pages that are dropped are those of the file again
        self._memory.madvise(mmap.MADV_DONTNEED)


def given_values(sources: Sequence[Source]) -> dict[str, torch.Tensor]:
    """Tensors that have to have values of a kind: the shapes of packed tensors, by which loaders
    cut what they unpack; and bools."""
    shapes = {source.name: source.shape for source in sources}
    found = {}
    for name, dtype, shape in sources:
        if is_note(name):
            codes = shapes.get(f"{name.removesuffix('_shape')}_packed", ())
            # those that a fused parameter keeps one of are equal in a checkpoint
            plain = len(codes) == 2 and shape == (2,)
            sizes = [codes[0], codes[1] * _IN_WORD] if plain else [1]
            found[name] = torch.tensor(sizes, dtype=dtype, device="cpu").expand(shape).clone()
        elif not kind_of(dtype):
            found[name] = torch.zeros(shape, dtype=dtype, device="cpu")
    return found


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
