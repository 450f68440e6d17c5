"""Strided regions of memory: which elements of one are elements of another.

A move takes elements from one place to another: a source address, a destination address, and for
each dimension (extent, source stride, destination stride).  All are bytes.  What an engine's
loader does is a list of moves; following data through temporary tensors and turning moves into
boxes of tensors both come down to `cut`: the part of a move whose one side lies on a grid, in the
grid's coordinates.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from wsync.boxes import outside, overlap
from wsync.engine.learn.time_limit import check

Dim = tuple[int, int, int]

# parts that one move may fall into: what needs more is not worth a plan
_PARTS: Final = 4096


class UnexpressedError(Exception):
    """A move that is no small number of boxes."""


@dataclass(frozen=True, slots=True)
class Move:
    """Elements of `item` bytes at `source` that become elements of `into` at `destination`."""

    source: int
    destination: int
    dims: tuple[Dim, ...]
    item: int
    into: int

    @property
    def count(self) -> int:
        return math.prod(extent for extent, _, _ in self.dims)

    @property
    def nbytes(self) -> int:
        """Of the destination."""
        return self.count * self.into

    def reversed(self) -> Move:
        """The same elements the other way round."""
        dims = tuple((n, d, s) for n, s, d in self.dims)
        return Move(self.destination, self.source, dims, self.into, self.item)

    def is_noop(self) -> bool:
        """Whether every element stays where it is."""
        steps = all(n == 1 or s == d for n, s, d in self.dims)
        return self.source == self.destination and self.item == self.into and steps

    def span(self) -> tuple[int, int]:
        """First byte of the destination, and the byte after its last."""
        reach = sum((n - 1) * d for n, _, d in self.dims)
        return self.destination, self.destination + reach + self.into


@dataclass(frozen=True, slots=True)
class Grid:
    """Where elements of `item` bytes lie: extents and strides, outermost first, without one
    element twice."""

    base: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @staticmethod
    def of(base: int, dims: Iterable[tuple[int, int]], item: int) -> Grid:
        """Raises UnexpressedError where elements lie across each other."""
        ordered = sorted((d for d in dims if d[0] != 1), key=lambda d: -d[1])
        reach = item
        for extent, stride in reversed(ordered):
            if stride < reach:
                raise UnexpressedError("elements that lie across each other")
            reach = (extent - 1) * stride + reach
        return Grid(base, tuple(e for e, _ in ordered), tuple(s for _, s in ordered), item)

    @property
    def end(self) -> int:
        """The byte after the last."""
        steps = zip(self.extents, self.strides, strict=True)
        return self.base + sum((e - 1) * s for e, s in steps) + self.item


@dataclass(frozen=True, slots=True)
class Cell:
    """Part of a move whose source lies on a grid: it starts at `digits`, and dimension
    (extent, axis, steps, destination stride) goes `steps` along the grid's axis; axis -1 repeats
    the same elements."""

    destination: int
    digits: tuple[int, ...]
    dims: tuple[tuple[int, int, int, int], ...]


def coalesced(move: Move) -> Move:
    """The same elements in fewer dimensions, outermost source stride first."""
    dims: list[Dim] = []
    for extent, source, destination in sorted(
        (d for d in move.dims if d[0] != 1), key=lambda d: (-d[1], -d[2])
    ):
        if dims and dims[-1][1] == extent * source and dims[-1][2] == extent * destination:
            dims[-1] = (dims[-1][0] * extent, source, destination)
        else:
            dims.append((extent, source, destination))
    return replace(move, dims=tuple(dims))


def united(moves: Iterable[Move]) -> list[Move]:
    """The bytes that moves write to, as moves to themselves: first runs, in order and apart, then
    regions that are more than one run.  Regions may share bytes with one another and with runs."""
    runs: list[Move] = []
    regions: dict[Move, None] = {}
    for move in sorted(map(_footprint, moves), key=Move.span):
        low, high = move.span()
        if move.dims:
            regions[move] = None
        elif runs and low <= runs[-1].span()[1]:
            low, high = runs[-1].destination, max(high, runs[-1].span()[1])
            runs[-1] = Move(low, low, (), high - low, high - low)
        else:
            runs.append(move)
    return runs + [move for move in regions if not in_one_run(runs, *move.span())]


def in_one_run(found: Sequence[Move], low: int, high: int) -> bool:
    """Whether one of the runs of `united` has all bytes from one to before another."""
    place = bisect.bisect_right(found, (0, low), key=lambda m: (len(m.dims), m.destination)) - 1
    return place >= 0 and high <= found[place].span()[1]


def _footprint(move: Move) -> Move:
    """The bytes that a move writes to, in runs that are as long as they can be: also where it
    writes to one byte more than once, as to what is expanded."""
    run, dims = move.into, list[Dim]()
    for n, _, d in sorted((dim for dim in move.dims if dim[0] != 1), key=lambda dim: dim[2]):
        if not dims and d <= run:
            run += (n - 1) * d
        else:
            dims.insert(0, (n, d, d))
    return Move(move.destination, move.destination, tuple(dims), run, run)


def with_item(move: Move, item: int) -> Move:
    """The same bytes as elements of another size at the source."""
    if item == move.item:
        return move
    move = coalesced(move)
    outer, nbytes = move.dims, move.item
    if outer and outer[-1][1:] == (move.item, move.item):
        outer, nbytes = outer[:-1], nbytes * outer[-1][0]
    if move.item == move.into and nbytes % item == 0:
        dims = (*outer, (nbytes // item, item, item))
        return coalesced(replace(move, dims=dims, item=item, into=item))
    raise UnexpressedError(f"elements of {move.item} bytes read as {item}")


def cut(move: Move, grid: Grid) -> tuple[list[Cell], list[Move]]:
    """What of a move's source lies on the grid, and what does not.

    Raises UnexpressedError where that is more than a few thousand parts.
    """
    inside: list[Cell] = []
    outside: list[Move] = []
    todo = [coalesced(move)]
    while todo:
        check()
        if len(inside) + len(outside) + len(todo) > _PARTS:
            raise UnexpressedError(f"over {_PARTS} parts")
        part = todo.pop()
        low, high = part.source, part.reversed().span()[1]
        if high <= grid.base or low >= grid.end:
            outside.append(part)
            continue
        found = _fit(part, grid)
        if isinstance(found, Cell):
            inside.append(found)
        elif found:
            todo.extend(found)
        else:
            outside.append(part)
    return inside, outside


def _fit(part: Move, grid: Grid) -> Cell | list[Move]:
    """The cell that a part is, or smaller parts to look at, or [] where it is off the grid."""
    digits = _digits(part.source, grid)
    if digits is None:
        return _halved(part, grid)
    axes: list[tuple[int, int]] = []
    for dim, (_, stride, _) in enumerate(part.dims):
        axis = next((k for k, s in enumerate(grid.strides) if s <= stride), -1)
        if stride and (axis < 0 or stride % grid.strides[axis]):
            return _peeled(part, dim)
        axes.append((axis, stride // grid.strides[axis]) if stride else (-1, 0))
    for axis, extent in enumerate(grid.extents):
        mine = [j for j, (k, _) in enumerate(axes) if k == axis]
        reach = digits[axis] + sum((part.dims[j][0] - 1) * axes[j][1] for j in mine)
        if reach >= extent:
            largest = max(mine, key=lambda j: axes[j][1])
            inner = reach - digits[axis] - (part.dims[largest][0] - 1) * axes[largest][1]
            return _divided(part, grid, axis, largest, axes[largest][1], digits[axis], inner)
    dims = tuple((n, k, q, d) for (n, _, d), (k, q) in zip(part.dims, axes, strict=True) if n != 1)
    return Cell(part.destination, digits, dims)


def _digits(address: int, grid: Grid) -> tuple[int, ...] | None:
    """Coordinates of the element at an address; None where there is none."""
    left = address - grid.base
    digits = []
    for extent, stride in zip(grid.extents, grid.strides, strict=True):
        digit = left // stride
        if not 0 <= digit < extent:
            return None
        digits.append(digit)
        left -= digit * stride
    return None if left else tuple(digits)


def _divided(
    part: Move, grid: Grid, axis: int, dim: int, steps: int, digit: int, inner: int
) -> list[Move]:
    """A part cut where dimension `dim` leaves the grid's axis."""
    extent = grid.extents[axis]
    count, stride, destination = part.dims[dim]
    room = (extent - 1 - digit - inner) // steps + 1
    if room < 1:
        return _peeled(part, dim)
    carries = axis > 0 and grid.strides[axis - 1] == extent * grid.strides[axis]
    if carries and extent % steps == 0 and digit + inner < steps:
        row = extent // steps
        if count % row == 0:
            outer = (count // row, stride * row, destination * row)
            return [_with_dims(part, dim, outer, (row, stride, destination))]
        if count > row:
            return _split(part, dim, count - count % row)
    return _split(part, dim, min(room, count - 1))


def _halved(part: Move, grid: Grid) -> list[Move]:
    """A part whose first element is off the grid, cut where that may change."""
    if not part.dims:
        return []
    count, stride, _ = part.dims[0]
    if stride == 0:
        return []
    inner = part.reversed().span()[1] - part.source - (count - 1) * stride
    below = (grid.base - part.source - inner) // stride + 1
    if 0 < below < count:
        return _split(part, 0, below)
    return _peeled(part, 0)


def _peeled(part: Move, dim: int) -> list[Move]:
    return _split(part, dim, 1) if part.dims[dim][0] > 1 else []


def _split(part: Move, dim: int, at: int) -> list[Move]:
    """The first `at` steps of a dimension, and the others."""
    count, source, destination = part.dims[dim]

    rest = replace(part, source=part.source + at * source)
    rest = replace(rest, destination=part.destination + at * destination)
    return [
        coalesced(_with_dims(rest, dim, (count - at, source, destination))),
        coalesced(_with_dims(part, dim, (at, source, destination))),
    ]


def _with_dims(part: Move, dim: int, *dims: Dim) -> Move:
    """A part with others in the place of one dimension."""
    return replace(part, dims=(*part.dims[:dim], *dims, *part.dims[dim + 1 :]))


def compose(read: Move, write: Move) -> tuple[list[Move], list[Move]]:
    """What a read finds of an earlier write: moves from the write's source to the read's
    destination, and the parts of the read that the write has not touched."""
    if read.item < write.into:
        write = with_item(write.reversed(), read.item).reversed()
    ordered = sorted((d for d in write.dims if d[0] != 1), key=lambda d: -d[2])
    grid = Grid.of(write.destination, [(n, d) for n, _, d in ordered], write.into)
    read = with_item(read, write.into)
    cells, rest = cut(read, grid)
    sources = [s for _, s, _ in ordered]
    moves = []
    for cell in cells:
        source = write.source + sum(d * s for d, s in zip(cell.digits, sources, strict=True))
        dims = tuple((n, q * sources[k] if k >= 0 else 0, d) for n, k, q, d in cell.dims)
        moves.append(Move(source, cell.destination, dims, write.item, read.into))
    return moves, rest


def all_apart(moves: Sequence[Move]) -> bool:
    """Whether moves surely write to different memory, each two of them, though their spans meet:
    all go in steps of one size, and their runs lie side by side in it.  False says nothing."""
    steps = {d for move in moves[:2] for n, _, d in move.dims if n > 1 and d}
    return len(moves) < 2 or any(_in_turn(moves, step) for step in steps)


def _in_turn(moves: Sequence[Move], step: int) -> bool:
    runs: list[tuple[int, int]] = []  # where in a step, and up to where
    for move in moves:
        reach = move.into + sum((n - 1) * d for n, _, d in move.dims if d % step)
        if reach > step:  # it does not repeat with the step
            return False
        runs.append((move.destination % step, move.destination % step + reach))
    runs.sort()
    runs.append((runs[0][0] + step, 0))
    return all(one[1] <= two[0] for one, two in pairwise(runs))


def without(earlier: Move, later: Move) -> list[Move]:
    """What is left of a move when another has written over its destination."""
    low, high = earlier.span()
    start, end = later.span()
    if high <= start or end <= low or all_apart((earlier, later)):
        return [earlier]
    back = earlier.reversed()
    target = later.reversed()
    item = min(back.item, target.item)
    target = with_item(target, item)
    grid = Grid.of(target.source, [(n, s) for n, s, _ in target.dims], item)
    _, rest = cut(with_item(back, item), grid)
    return [part.reversed() for part in rest]


def common_nbytes(one: Move, other: Move) -> int:
    """How many bytes two moves both write to."""
    return one.nbytes - sum(part.nbytes for part in without(one, other))


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, and the address and strides of its elements elsewhere."""

    start: tuple[int, ...]
    extent: tuple[int, ...]
    address: int
    strides: tuple[int, ...]

    def part(self, start: tuple[int, ...], extent: tuple[int, ...]) -> Box:
        steps = zip(start, self.start, self.strides, strict=True)
        address = self.address + sum((a - b) * s for a, b, s in steps)
        return Box(start, extent, address, self.strides)


def boxes(move: Move, base: int, shape: Sequence[int], item: int) -> list[Box]:
    """The boxes of a contiguous tensor at `base` that a move reads.

    Raises UnexpressedError where they are too many, or reach beyond the tensor.
    """
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]
    strides = tuple(item * math.prod(shape[axis + 1 :]) for axis in axes)
    grid = Grid(base, tuple(shape[a] for a in axes), strides, item)
    cells, rest = cut(with_item(move, item), grid)
    if rest:
        raise UnexpressedError("it reaches beyond the tensor")
    found: list[Box] = []
    for cell in cells:
        found += _cell_boxes(cell, axes, len(shape))
        if len(found) > _PARTS:
            raise UnexpressedError(f"over {_PARTS} boxes")
    return found


def common(one: Box, two: Box) -> Box | None:
    """The part of `one` that `two` has as well."""
    found = overlap((one.start, one.extent), (two.start, two.extent))
    return None if found is None else one.part(*found)


def minus(box: Box, hole: Box) -> list[Box]:
    """A box without what another one has as well."""
    left = outside((box.start, box.extent), (hole.start, hole.extent))
    return [box.part(*part) for part in left]


def apart(found: Sequence[Box]) -> bool:
    """Whether boxes surely share nothing, because they follow each other along some axis."""
    for axis in range(len(found[0].start) if found else 0):
        spans = sorted((b.start[axis], b.start[axis] + b.extent[axis]) for b in found)
        if all(one[1] <= two[0] for one, two in pairwise(spans)):
            return True
    return len(found) < 2


def _cell_boxes(cell: Cell, axes: Sequence[int], ndim: int) -> Iterator[Box]:
    start, extent, strides = [0] * ndim, [1] * ndim, [0] * ndim
    for digit, axis in zip(cell.digits, axes, strict=True):
        start[axis] = digit
    repeated: list[tuple[int, int, int, int]] = []
    for count, k, steps, stride in sorted(cell.dims, key=lambda d: d[2]):
        axis = axes[k] if k >= 0 else -1
        if axis >= 0 and steps == extent[axis] == 1:
            extent[axis], strides[axis] = count, stride
        elif axis >= 0 and steps == extent[axis] and stride == strides[axis] * steps > 0:
            extent[axis] *= count
        else:
            repeated.append((count, axis, steps, stride))
    yield from _repeat(Box(tuple(start), tuple(extent), cell.destination, tuple(strides)), repeated)


def _repeat(box: Box, dims: list[tuple[int, int, int, int]]) -> Iterator[Box]:
    if not dims:
        yield box
        return
    count, axis, steps, stride = dims[0]
    if count > _PARTS:
        raise UnexpressedError(f"{count} boxes along one axis")
    for i in range(count):
        start = list(box.start)
        if axis >= 0:
            start[axis] += i * steps
        yield from _repeat(
            replace(box, start=tuple(start), address=box.address + i * stride), dims[1:]
        )
