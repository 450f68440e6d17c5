"""Boxes of a tensor: what two share, what is left of one without another, and strides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
