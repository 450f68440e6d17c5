"""Makes up tensors for a model.  Every value is finite in every floating-point format.

All tensors are views of one pattern of random bytes, so those of a whole model take hardly any
memory.  If the pattern is too short for a tensor, the tensor repeats the pattern.
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
_IN_WORD: Final = 8  # an int32 holds this number of INT4 columns
_PERIOD: Final = (16 << 20) + 4096  # in bytes; not a multiple of the size of a tensor's rows


class MadeUpTensors:
    """Makes random values for sources.

    given: values for some sources, by name, which are returned unchanged.  seed: 0 or 1.  With seed
    1, the values are near 1, so that a load can compute with them.
    """

    def __init__(self, given: Mapping[str, torch.Tensor], seed: int) -> None:
        self._given, self._seed = given, seed
        data = torch.empty(_PERIOD, dtype=torch.uint8, device="cpu")
        data.random_(generator=torch.Generator().manual_seed(seed))
        # clears one of the two highest bits of an exponent, so that no value is infinite
        data &= ~((data & 0x20) << 1)
        if seed:
            # this byte has the exponent in formats of two bytes or more: values from 2**-14 to 2
            data[1::2] = data[1::2] & 0x83 | 0x3C
        self._period, self._pattern = data, data.repeat(2)

    def restore(self) -> None:
        """Undoes what a load has written into the tensors."""
        self._pattern.view(2, _PERIOD).copy_(self._period)

    def of(self, source: Source) -> torch.Tensor:
        if source.name in self._given:
            return self._given[source.name]
        start = zlib.crc32(source.name.encode(), self._seed) * _ALIGNMENT % _PERIOD
        end = start + source.nbytes
        data = self._pattern if end <= 2 * _PERIOD else self._period.repeat(-(-end // _PERIOD))
        return data[start:end].view(source.dtype).view(source.shape)


def given_values(sources: Sequence[Source]) -> dict[str, torch.Tensor]:
    """Returns values for the sources that cannot be random.  These are bools, and the shapes of
    packed tensors, because a load cuts unpacked tensors to these shapes."""
    shapes = {source.name: source.shape for source in sources}
    found = {}
    for name, dtype, shape in sources:
        if is_note(name):
            codes = shapes.get(f"{name.removesuffix('_shape')}_packed", ())
            # in a checkpoint, the shapes that are loaded to one fused parameter are equal
            plain = len(codes) == 2 and shape == (2,)
            sizes = [codes[0], codes[1] * _IN_WORD] if plain else [1]
            found[name] = torch.tensor(sizes, dtype=dtype, device="cpu").expand(shape).clone()
        elif not kind_of(dtype):
            found[name] = torch.zeros(shape, dtype=dtype, device="cpu")
    return found
