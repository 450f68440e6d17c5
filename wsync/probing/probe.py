"""Finds where a load puts the elements of its sources.

The load is called a few times.  At each call, the values of a source are one digit: a digit of the
source's number, or of the elements' indices along one axis.  A source is one value or one vector
that is expanded to its shape, so a large source takes hardly any memory.  From the values that an
element of a target holds after each call, one can tell which element of which source it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from wsync._core import WsyncError
from wsync.machine.error_text import error_text
from wsync.probing.boxes import LONGEST, NumberedBox, boxes, units_of
from wsync.probing.codes import decode
from wsync.probing.lines import Field, Lines, raw
from wsync.probing.numbering import Made, Numbering, Source
from wsync.probing.pieces import COMPUTED, CONSTANT, UNWRITTEN, PlacedBox

# a function like load_weights, which takes pairs of a name and a tensor
Load = Callable[[Any], Any]
_OTHERS: Final = (UNWRITTEN, CONSTANT, COMPUTED)


class RaisedError(Exception):
    """A load has failed.

    name: the name of the tensor that the load took last.  error: what it raised.
    """

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error
        super().__init__(f"it raised {error_text(error)}")


class Overwriting:
    """Inverts all bytes of the targets and then calls a load.  A place that the load does not write
    to stays inverted; to restore it, its bytes are inverted again.

    At first the load is given views that have few elements in memory.  If the load fails, it is
    given tensors with memory for all elements from then on, because it may write to them, or read
    their strides.
    """

    def __init__(self, load: Load, targets: Sequence[torch.Tensor]) -> None:
        self.targets = targets
        self._load = load
        self._inverted = self._whole = False

    def invert(self) -> None:
        self._inverted = not self._inverted
        for target in self.targets:
            raw(target).bitwise_not_()

    def load(self, sources: Sequence[Source], make: Callable[[Source], torch.Tensor]) -> None:
        """Calls the load.

        Raises:
            RaisedError: the load fails even if tensors have memory for all elements.
        """
        pairs = Made(sources, make, whole=self._whole)
        try:
            with torch.no_grad():
                self._load(pairs)
        except WsyncError:
            raise
        except Exception as error:
            if self._whole:
                raise RaisedError(pairs.last, error) from error
            self._whole = True
            self.load(sources, make)

    def put_back(self, places: Iterable[torch.Tensor] | None = None) -> None:
        """Restores places that no load has written to.  If `places` is None, restores all targets,
        and the values that a load has written are lost."""
        for place in self.targets if places is None else places:
            if self._inverted:
                raw(place).bitwise_not_()
        self._inverted = False


def probe(
    loads: Overwriting,
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    longest: int = LONGEST,
) -> list[PlacedBox]:
    """Returns what a load puts into its targets, as pieces that make up all targets.

    loads: the load and its targets, which share no elements.  given: sources whose values matter;
    every call gives them unchanged.  longest: the largest distance in a target between neighbours
    in a piece.
    """
    device = loads.targets[0].device if loads.targets else "cpu"
    numbering = Numbering(sources, given, device)
    lines = [Lines(target) for target in loads.targets]
    for call in range(numbering.calls):
        loads.invert()
        loads.load(sources, functools.partial(numbering.tensor, call=call))
        for each in lines:
            each.after()
            if call == numbering.naming - 1:
                each.choose(numbering.forms(each.corners))
    return [
        piece
        for number, each in enumerate(lines)
        for piece in _Reading(number, each, numbering).pieces(longest)
    ]


class _Reading:
    """Makes pieces from the values that were read in one target."""

    def __init__(self, target: int, lines: Lines, numbering: Numbering) -> None:
        self._target, self._lines, self._numbering = target, lines, numbering
        self._sources = numbering.of(lines.tensor.dtype)
        self._known = numbering.known

    def pieces(self, longest: int) -> Iterator[PlacedBox]:
        lines = self._lines
        names, rows = self._rows()
        shapes = [lines.shape, *(self._known[name].shape for name in names[3:])]
        dims = max(map(len, shapes))
        padded = ([1] * (dims - len(shape)) + [*shape] for shape in shapes)
        extents = [max(each) for each in zip(*padded, strict=True)]
        *units, unit = units_of(extents)
        field = self._field(rows, names, units, unit)
        by_unit = {units[axis]: axis for axis in range(dims) if extents[axis] > 1}
        for box in boxes(field.read, lines.shape, by_unit, longest, field.like):
            yield self._piece(box, names, units, unit)

    def _rows(self) -> tuple[list[str], torch.Tensor]:
        """Returns (names, rows).  names: the three names in _OTHERS, for parts that no source is
        copied to, and then the names of sources.  rows: for each part, the index of its name."""
        corners = self._lines.corners
        values = torch.stack([raw(each) for each in corners])
        others = torch.where((values == values[0]).all(0), 1, 2)
        others = torch.where((values[1:] == ~values[:-1]).all(0), 0, others)
        number = self._numbering.numbers(corners).where(others > 0, -1)
        keys, rows = torch.unique(number, return_inverse=True)
        found = [self._sources[key].name for key in keys.tolist() if key >= 0]
        first = len(_OTHERS) - (len(keys) - len(found))
        return [*_OTHERS, *found], (rows + first).where(number >= 0, others)

    def _field(
        self, rows: torch.Tensor, names: Sequence[str], units: Sequence[int], unit: int
    ) -> Field:
        """Returns the numbers of the target's elements.  If no source is loaded to an element, its
        number tells its indices in the target."""
        lines = self._lines
        weights = self._weights(names, units)
        own = units[len(units) - len(lines.shape) :]
        corners = rows * unit
        digits = [decode(each) for each in lines.corners[self._numbering.naming :]]
        corners += sum(weights[rows, call] * each for call, each in enumerate(digits))
        found = []
        for axis, (each, starts) in enumerate(zip(own, lines.starts, strict=True)):
            places = (torch.tensor(starts, device="cpu") * each).view(
                -1, *[1] * (rows.dim() - 1 - axis)
            )
            corners += places.where(rows < 3, 0)
            others = rows.movedim(axis, -1).reshape(-1, len(starts))
            row = others[lines.first[axis]][:, lines.part[axis]]
            line = (torch.arange(lines.shape[axis], device="cpu") * each).where(row < 3, 0)
            for call, values in enumerate(lines.lines):
                line += weights[row, call] * decode(values[axis])
            found.append(line)
        return Field(lines, corners, found)

    def _weights(self, names: Sequence[str], units: Sequence[int]) -> torch.Tensor:
        """Returns the factors by which digits are multiplied in an element's number.  Each name has
        one factor for each call after the first `naming` calls."""
        calls = self._numbering.calls - self._numbering.naming
        found = torch.zeros(len(names), calls, dtype=torch.int64, device="cpu")
        for row, name in enumerate(names[3:], 3):
            shift = len(units) - len(self._known[name].shape)
            for call, digit in enumerate(self._numbering.digits[name]):
                found[row, call] = digit.weight * units[digit.axis + shift]
        return found

    def _piece(
        self, box: NumberedBox, names: Sequence[str], units: Sequence[int], unit: int
    ) -> PlacedBox:
        target = self._lines.tensor
        strides = [step * stride for step, stride in zip(box.steps, target.stride(), strict=True)]
        offset = sum(at * n for at, n in zip(box.start, target.stride(), strict=True))
        row, number = divmod(box.number, unit)
        name, start = names[row], list[int]()
        if row >= 3:
            for each in units:
                place, number = divmod(number, each)
                start.append(place)
            shape = self._known[name].shape
            shift = len(units) - len(shape)
            extent, steps = [1] * len(shape), [0] * len(shape)
            for axis, count, stride in zip(box.axes, box.extent, strides, strict=True):
                if axis >= shift:
                    extent[axis - shift], steps[axis - shift] = count, stride
            ends = zip(start[shift:], extent, shape, strict=True)
            inside = all(at + count <= size for at, count, size in ends)
            if inside and not any(start[:shift]) and math.prod(extent) == math.prod(box.extent):
                found = tuple(start[shift:]), tuple(extent), offset, tuple(steps)
                return PlacedBox(self._target, name, *found)
        why = name if row < 3 else COMPUTED
        return PlacedBox(self._target, "", box.start, box.extent, offset, tuple(strides), why=why)
