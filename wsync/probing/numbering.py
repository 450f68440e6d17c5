"""Tensors whose values number their elements, a digit at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from wsync.probing.codes import base_of, common_base, decode, encode, kind_of
from wsync.probing.time_limit import taken


class Source(NamedTuple):
    """A tensor that is loaded."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Digit(NamedTuple):
    """One of the digits of a place along an axis."""

    axis: int
    weight: int


class Numbering:
    """Which digit each call brings of each source.

    given: tensors that are brought as they are.  device: where the others lie.  whole: makes all
    elements of a tensor.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        given: Mapping[str, torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        self.sources = sources
        self._device = device
        self.given = given
        self.known = {source.name: source for source in sources}
        self.whole = False
        self.kinds: dict[str, list[Source]] = {}
        self.digits: dict[str, list[_Digit]] = {}
        for source in sources:
            if source.name not in given:
                self.kinds.setdefault(kind_of(source.dtype), []).append(source)
                self.digits[source.name] = list(_digits(source))
        self._number = {s.name: n for each in self.kinds.values() for n, s in enumerate(each)}
        counts = [(len(each), common_base(kind)) for kind, each in self.kinds.items()]
        self.naming = max((_count(*each) for each in counts), default=1)
        self.calls = self.naming + max(map(len, self.digits.values()), default=0) + 1

    def pairs(self, call: int) -> Made:
        last = call == self.calls - 1
        sources = backwards(self.sources, self.given) if last else self.sources
        return Made(sources, lambda source: self._tensor(source, call))

    def of(self, dtype: torch.dtype) -> list[Source]:
        """The sources that copies may bring to a tensor of a dtype."""
        return self.kinds.get(kind_of(dtype), [])

    def base(self, dtype: torch.dtype) -> int:
        return common_base(kind_of(dtype))

    def numbers(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Which of these sources calls have brought the name of; -1: none."""
        names = [decode(each) for each in values[: self.naming]]
        found = torch.zeros_like(names[0])
        for call, digit in enumerate(names):
            found += digit * self.base(values[0].dtype) ** call
        known = torch.stack(names).ge(0).all(0) & (found < len(self.of(values[0].dtype)))
        return found.where(known, -1)

    def forms(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same number for sources of one dtype and shape."""
        return self._forms(kind_of(values[0].dtype))[self.numbers(values)]

    @functools.cache  # noqa: B019
    def _forms(self, kind: str) -> torch.Tensor:
        forms: dict[object, int] = {}
        each = [forms.setdefault(source[1:], len(forms)) for source in self.kinds.get(kind, [])]
        return torch.tensor([*each, -1], device="cpu")

    def _tensor(self, source: Source, call: int) -> torch.Tensor:
        if source.name in self.given:
            return self.given[source.name]
        kind = kind_of(source.dtype)
        base, digits = common_base(kind), self.digits[source.name]
        number, count = self._number[source.name], len(self.kinds[kind])
        if call < self.naming:
            made = self._values(source.dtype)[number // base**call % base]
        elif call == self.calls - 1:
            made = self._values(source.dtype)[(count - 1 - number) % base]
        elif call - self.naming < len(digits):
            axis, weight = digits[call - self.naming]
            made = self._vector(source.dtype, source.shape[axis], weight)
            made = made.view(-1, *(1 for _ in source.shape[axis + 1 :]))
        else:
            made = self._values(source.dtype)[0]
        found = made.clone().expand(source.shape)  # a loader may write to it
        return found.contiguous() if self.whole else found

    @functools.cache  # noqa: B019
    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        """Those of all digits."""
        return encode(torch.arange(base_of(dtype), device="cpu"), dtype).to(self._device)

    @functools.cache  # noqa: B019
    def _vector(self, dtype: torch.dtype, extent: int, weight: int) -> torch.Tensor:
        digits = torch.arange(extent, device="cpu") // weight % base_of(dtype)
        return encode(digits, dtype).to(self._device)


def backwards(sources: Sequence[Source], given: Mapping[str, torch.Tensor]) -> list[Source]:
    """In the reverse order, but for what is given as it is: its last one stays where it lies."""
    numbered = [source for source in sources if source.name not in given]
    return [*reversed(numbered), *(source for source in sources if source.name in given)]


class Made(list[tuple[str, torch.Tensor]]):
    """A list whose tensors are made when they are taken."""

    def __init__(self, sources: Sequence[Source], make: Callable[[Source], torch.Tensor]) -> None:
        super().__init__([("", torch.empty(0, device="cpu"))] * len(sources))
        self._sources, self._make = sources, make
        self.last = ""  # the name of what was taken last
        self.names: dict[int, str] = {}  # by the storages' addresses

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Made(self._sources[index], self._make)
        source = self._sources[index]
        taken()
        tensor = self._make(source)
        self.last = self.names[tensor.untyped_storage().data_ptr()] = source.name
        return source.name, tensor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (self[number] for number in range(len(self)))

    def __reversed__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self[::-1])


def _digits(source: Source) -> Iterator[_Digit]:
    base = base_of(source.dtype)
    for axis in reversed(range(len(source.shape))):
        for place in range(_count(source.shape[axis], base) if source.shape[axis] > 1 else 0):
            yield _Digit(axis, base**place)


def _count(numbers: int, base: int) -> int:
    """How many digits of a base tell so many numbers apart."""
    return next(count for count in range(1, 64) if base**count >= numbers)
