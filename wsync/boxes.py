"""Boxes of a tensor: what two boxes share, and what is left of one box without the other."""

from __future__ import annotations

from collections.abc import Iterator

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, extent).  Each of them has one number for each axis of the tensor."""


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the box that two boxes share, or None if they share no element."""
    start = tuple(map(max, one[0], other[0]))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    extent = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return (start, extent) if min(extent, default=1) > 0 else None


def outside(box: Box, hole: Box) -> Iterator[Box]:
    """Yields boxes that together are the part of `box` outside `hole`."""
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
