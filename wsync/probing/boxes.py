"""Turns numbers of elements into boxes: which box of a source lies in which box of a tensor.

An element's number has bits for each axis of its source, enough to count to twice the extent: the
step from the end of one row to the start of the next is no step along any axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Numbers of some rows of the slice of a tensor at leading places: read(places, low, high).  Each
# row has the numbers of some of its elements, the first one first.
Read = Callable[[tuple[int, ...], int, int], "Tensor"]

LONGEST = 8  # step in which boxes go through a tensor
_BLOCK = 1 << 22  # elements whose rows are read at a time


class NumberedBox(NamedTuple):
    """A box of a tensor that is numbered evenly.

    axes: along which axis of the source each of its axes goes, -1: along none; steps: in the
    tensor, from each element to the next; number: of the first element.
    """

    start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...]
    number: int


class _Run(NamedTuple):
    """Slices that are one step of one source axis apart; axis -1: a slice that is alone."""

    start: int
    length: int
    axis: int
    step: int


def units_of(extents: Sequence[int]) -> list[int]:
    """How much larger the number is of the next element along each axis, and, last, a number that
    is larger than all of these elements'."""
    units = [1]
    for extent in reversed(extents):
        bits = (2 * extent - 1).bit_length() if extent > 1 else 0
        units.insert(0, units[0] << bits)
    return [*units[1:], units[0]]


def boxes(
    read: Read,
    shape: Sequence[int],
    units: Mapping[int, int],
    longest: int,
    like: Callable[[tuple[int, ...]], Hashable] | None = None,
) -> Iterator[NumberedBox]:
    """Boxes that make up a tensor.  units: source axes by their units; longest: the largest step.
    like: of leading places, the same where the steps from slice to slice are the same.

    Along the first axis, the longest runs of slices of which each is one step of one source axis
    away from the one before; then the same within the first slice of each run.
    """
    return _Boxes(read, longest, like or (lambda places: places)).of((), tuple(shape), dict(units))


class _Boxes:
    def __init__(
        self, read: Read, longest: int, like: Callable[[tuple[int, ...]], Hashable]
    ) -> None:
        self._read, self._longest, self._like = read, longest, like
        self._known: dict[Hashable, list[_Run]] = {}

    def of(
        self, places: tuple[int, ...], shape: tuple[int, ...], units: dict[int, int]
    ) -> Iterator[NumberedBox]:
        for start, count, axis, step in self._runs(places, shape, units):
            if len(shape) == 1:
                number = int(self._read(places, start, start + 1).flatten()[0])
                yield NumberedBox((start,), (count,), (axis,), (step,), number)
                continue
            left = {unit: other for unit, other in units.items() if other != axis}
            for box in self.of((*places, start), shape[1:], left):
                yield NumberedBox(
                    (start, *box.start),
                    (count, *box.extent),
                    (axis, *box.axes),
                    (step, *box.steps),
                    box.number,
                )

    def _runs(
        self, places: tuple[int, ...], shape: tuple[int, ...], units: Mapping[int, int]
    ) -> list[_Run]:
        key = tuple(units), self._like(places)
        if key not in self._known:
            steps = list(_steps(self._read, places, shape))
            self._known[key] = list(_split(steps, shape[0], units, self._longest))
        return self._known[key]


def _steps(read: Read, places: tuple[int, ...], shape: Sequence[int]) -> Iterator[int]:
    """From each slice to the next; 0: none that is the same for all of its elements."""
    import torch

    block = max(1, _BLOCK // math.prod(shape[1:]))
    for low in range(0, shape[0] - 1, block):
        rows = read(places, low, min(shape[0], low + block + 1))
        between = rows[1:] - rows[:-1]
        even = between.eq(between[:, :1]).all(1)
        yield from torch.where(even, between[:, 0], 0).tolist()


def _split(
    steps: Sequence[int], extent: int, units: Mapping[int, int], longest: int
) -> Iterator[_Run]:
    start = 0
    while start < extent:
        each = (_run(steps, start, step, units) for step in range(1, longest + 1))
        found = next((run for run in each if run.length > 1), _Run(start, 1, -1, 1))
        for offset in range(found.step):
            yield found._replace(start=start + offset)
        start += found.length * found.step


def _run(steps: Sequence[int], start: int, step: int, units: Mapping[int, int]) -> _Run:
    """As many runs as `step` says, which alternate from `start` on."""
    between = steps[start : start + step]
    axis = units.get(sum(between), -1) if len(between) == step and 0 not in between else -1
    if axis < 0:
        return _Run(start, 1, -1, 1)
    same = (steps[at] == steps[at - step] for at in range(start + step, len(steps)))
    more = sum(1 for _ in itertools.takewhile(bool, same))
    return _Run(start, (step + more + 1) // step, axis, step)
