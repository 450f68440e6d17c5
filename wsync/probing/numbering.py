"""Makes the tensors that a load is given.  At each call, the value of an element is one digit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from wsync.probing.codes import base_of, common_base, decode, encode, kind_of


class Source(NamedTuple):
    """The name, dtype and shape of a tensor that a load is given."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Digit(NamedTuple):
    """A digit of an index along an axis.  weight: its factor in the index, a power of the base."""

    axis: int
    weight: int


class Numbering:
    """Numbers sources and their elements, and makes the tensors of each call.

    Each of the first `naming` calls gives one digit of the sources' numbers.  Each later call gives
    one digit of the elements' indices along an axis.

    given: the sources that every call gives unchanged, by name.  device: the device on which the
    other sources are made.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        given: Mapping[str, torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = device
        self._forms = functools.cache(self._make_forms)
        self._values = functools.cache(self._make_values)
        self._vector = functools.cache(self._make_vector)
        self.given = given
        self.known = {source.name: source for source in sources}
        self.kinds: dict[str, list[Source]] = {}
        self.digits: dict[str, list[_Digit]] = {}
        for source in sources:
            if source.name not in given:
                self.kinds.setdefault(kind_of(source.dtype), []).append(source)
                self.digits[source.name] = list(_digits(source))
        self._number = {s.name: n for each in self.kinds.values() for n, s in enumerate(each)}
        counts = [(len(each), common_base(kind)) for kind, each in self.kinds.items()]
        self.naming = max((_count(*each) for each in counts), default=1)
        # at least one call follows, because two are needed to tell constant from unwritten places
        self.calls = self.naming + max([1, *map(len, self.digits.values())])

    def of(self, dtype: torch.dtype) -> list[Source]:
        """Returns the sources that can be copied to a target of a dtype, ordered by number."""
        return self.kinds.get(kind_of(dtype), [])

    def numbers(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns, for each element, the number of the source that is loaded to it; -1 if none is.

        values: the values of the elements after each call.
        """
        base = common_base(kind_of(values[0].dtype))
        names = torch.stack(
            [decode(each) * base**n for n, each in enumerate(values[: self.naming])]
        )
        found = names.sum(0)
        known = names.ge(0).all(0) & (found < len(self.of(values[0].dtype)))
        return found.where(known, -1)

    def forms(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Like `numbers`, but with one number for all sources of the same dtype and shape."""
        return self._forms(kind_of(values[0].dtype))[self.numbers(values)]

    def _make_forms(self, kind: str) -> torch.Tensor:
        forms: dict[object, int] = {}
        each = [forms.setdefault(source[1:], len(forms)) for source in self.kinds.get(kind, [])]
        return torch.tensor([*each, -1], device="cpu")

    def tensor(self, source: Source, call: int) -> torch.Tensor:
        if source.name in self.given:
            return self.given[source.name]
        kind = kind_of(source.dtype)
        base, digits = common_base(kind), self.digits[source.name]
        if call < self.naming:
            made = self._values(source.dtype)[self._number[source.name] // base**call % base]
        elif call - self.naming < len(digits):
            axis, weight = digits[call - self.naming]
            made = self._vector(source.dtype, source.shape[axis], weight)
            made = made.view(-1, *(1 for _ in source.shape[axis + 1 :]))
        else:
            made = self._values(source.dtype)[0]
        return made.clone().expand(source.shape)  # a load may write to it

    def _make_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values of all digits of a dtype, in order."""
        return encode(torch.arange(base_of(dtype), device="cpu"), dtype).to(self._device)

    def _make_vector(self, dtype: torch.dtype, extent: int, weight: int) -> torch.Tensor:
        digits = torch.arange(extent, device="cpu") // weight % base_of(dtype)
        return encode(digits, dtype).to(self._device)


class Made:
    """Yields (name, tensor) for each source.  Each tensor is made when the load takes it.

    whole: gives every tensor memory of its own for all elements.  last: the name of the source
    taken last.  ended: whether all sources have been taken.
    """

    ended = False

    def __init__(
        self, sources: Iterable[Source], make: Callable[[Source], torch.Tensor], *, whole: bool
    ) -> None:
        self._sources, self._make, self._whole = sources, make, whole
        self.last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for source in self._sources:
            tensor = self._make(source)
            if self._whole:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            self.last = source.name
            yield source.name, tensor
        self.ended = True


def _digits(source: Source) -> Iterator[_Digit]:
    base = base_of(source.dtype)
    for axis in reversed(range(len(source.shape))):
        for place in range(_count(source.shape[axis], base) if source.shape[axis] > 1 else 0):
            yield _Digit(axis, base**place)


def _count(numbers: int, base: int) -> int:
    """Returns how many digits of a base are enough for `numbers` different numbers."""
    return next(count for count in range(1, 64) if base**count >= numbers)
