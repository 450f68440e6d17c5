"""What the tests of layouts and routes draw and build."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from wsync import _core

# Machines under load take their time: no test here is about it.
patient = settings(deadline=None, max_examples=80)

Box = tuple[tuple[int, ...], tuple[int, ...]]


def strides_of(draw: st.DrawFn, extent: Sequence[int], item: int) -> tuple[tuple[int, ...], int]:
    """Strides of storage in any axis order, with gaps; and the size it spans."""
    strides = [0] * len(extent)
    step = item
    for axis in draw(st.permutations(range(len(extent)))):
        strides[axis] = step
        step *= max(extent[axis], 1)
        step += item * draw(st.integers(0, 1))
    return tuple(strides), step


def box_in(draw: st.DrawFn, shape: Sequence[int], least: int = 0) -> Box:
    start, extent = [], []
    for size in shape:
        first = draw(st.integers(0, size - least))
        start.append(first)
        extent.append(draw(st.integers(least, size - first)))
    return tuple(start), tuple(extent)


def one(
    rank: int,
    name: str = "up.weight",
    dtype: str = "bfloat16",
    shape: Sequence[int] = (4, 2),
    group: int = 0,
    buffer: int = 0,
) -> _core.Layout:
    builder = _core.LayoutBuilder(rank)
    builder.add_shard(
        name,
        dtype,
        shape,
        [0] * len(shape),
        shape,
        buffer,
        0,
        [0] * len(shape),
        f"rank {rank}",
        group,
    )
    return builder.build()
