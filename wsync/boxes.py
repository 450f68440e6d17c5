"""Boxes of a tensor: the overlap of two boxes, and the parts of one outside the other."""

from __future__ import annotations

from collections.abc import Iterator

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, extent), both with one number for each dimension of the tensor."""


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share, or None."""
    start = tuple(map(max, one[0], other[0]))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    extent = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return (start, extent) if min(extent, default=1) > 0 else None


def outside(box: Box, hole: Box) -> Iterator[Box]:
    """The parts of `box` outside `hole`, as boxes."""
    inside = overlap(box, hole)
    if inside is None:
        yield box
        return
    start, extent = list(box[0]), list(box[1])
    for axis, (low, count) in enumerate(zip(*inside, strict=True)):
        for begin, end in ((start[axis], low), (low + count, start[axis] + extent[axis])):
            if begin < end:
                yield (
                    (*start[:axis], begin, *start[axis + 1 :]),
                    (*extent[:axis], end - begin, *extent[axis + 1 :]),
                )
        start[axis], extent[axis] = low, count
