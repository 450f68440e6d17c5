"""Turns the numbers of a tensor's elements into boxes that are numbered evenly.

The number of an element tells which element of a source was loaded there.  It has bits for each
axis of the source, enough to count to twice the axis's extent.  For this reason, the step from the
end of one row to the start of the next is never mistaken for a step along an axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# read(places, low, high) returns a row of numbers for each of the slices `low` to `high` - 1 of
# tensor[places].  A row begins with the number of the slice's first element, and also has the
# numbers of some other elements.
Read = Callable[[tuple[int, ...], int, int], "Tensor"]

LONGEST = 8  # the usual value of `longest`
_BLOCK = 1 << 22  # slices are read together up to this number of elements


class NumberedBox(NamedTuple):
    """A box of a tensor whose elements are numbered evenly.

    axes: for each axis, the source axis that the box follows; -1 if it follows none.  steps: for
    each axis, the distance in the tensor between neighbours in the box.  number: the number of the
    first element.
    """

    start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...]
    number: int


class _Run(NamedTuple):
    """Slices of a tensor.  From each one to the next, the index along one source axis grows by 1.

    step: the distance in the tensor between two slices of the run.  axis: the source axis, or -1 if
    the run has only one slice.
    """

    start: int
    length: int
    axis: int
    step: int


def units_of(extents: Sequence[int]) -> list[int]:
    """Returns how much the number grows from one element to the next along each axis.  The last
    item is larger than the numbers of all elements."""
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
    """Yields boxes that make up a tensor.

    The slices along the first axis are divided into runs that are as long as possible.  The first
    slice of each run is then divided in the same way.

    units: maps the difference between the numbers of neighbours along a source axis to that axis.
    longest: the largest distance between two slices of one run.  like: returns a key for leading
    indices; if two keys are equal, the steps are equal, and the runs are found only once.
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
    """Yields the step from each slice to the next: the difference between the numbers of their
    elements, or 0 if it is not the same for all elements."""
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
    """Returns a run that begins at `start` and has every `step`-th slice.  The slices between them
    make equal runs.  If there is no such run, returns a run of one slice."""
    between = steps[start : start + step]
    axis = units.get(sum(between), -1) if len(between) == step and 0 not in between else -1
    if axis < 0:
        return _Run(start, 1, -1, 1)
    same = (steps[at] == steps[at - step] for at in range(start + step, len(steps)))
    more = sum(1 for _ in itertools.takewhile(bool, same))
    return _Run(start, (step + more + 1) // step, axis, step)
