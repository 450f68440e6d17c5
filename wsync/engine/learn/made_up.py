"""Made-up tensors for a model: every value is finite in every floating-point format.

All are parts of one pattern of random bytes, so that a model's take hardly any memory.  A tensor
that is larger than the pattern repeats it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from wsync.module_tensors.names import is_note
from wsync.probing.codes import kind_of
from wsync.probing.numbering import Source

_ALIGNMENT: Final = 256
_IN_WORD: Final = 8  # columns of INT4 in an int32
_PERIOD: Final = (16 << 20) + 4096  # no multiple of a tensor's rows


class MadeUpTensors:
    """Random values for tensors.  given: values of some of them.  seed: 0 or 1; the values of seed
    1 are near 1, so that they can be computed with."""

    def __init__(self, given: Mapping[str, torch.Tensor], seed: int) -> None:
        self._given, self._seed = given, seed
        data = torch.empty(_PERIOD, dtype=torch.uint8, device="cpu")
        data.random_(generator=torch.Generator().manual_seed(seed))
        # one of the two highest bits of an exponent is zero: large and small, but never infinite
        data &= ~((data & 0x20) << 1)
        if seed:
            # the byte of the exponent in formats of two bytes and more: from 2**-14 to 2
            data[1::2] = data[1::2] & 0x83 | 0x3C
        self._period, self._pattern = data, data.repeat(2)

    def restore(self) -> None:
        """Undoes what a loader has written into the tensors."""
        self._pattern.view(2, _PERIOD).copy_(self._period)

    def of(self, source: Source) -> torch.Tensor:
        if source.name in self._given:
            return self._given[source.name]
        start = zlib.crc32(source.name.encode(), self._seed) * _ALIGNMENT % _PERIOD
        end = start + source.nbytes
        data = self._pattern
        if end > len(data):
            data = self._period.repeat(-(-end // _PERIOD))
        return data[start:end].view(source.dtype).view(source.shape)


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
