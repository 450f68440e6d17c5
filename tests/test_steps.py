"""Boxes that take every so many-th index of a tensor, from layouts to bytes in memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync import _core

SHAPE = (3, 4, 12)
VALUE = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
ORDERS = st.permutations(range(3))
STEPS = st.sampled_from([(1, 1, 2), (1, 2, 3), (3, 1, 4), (1, 4, 12), (3, 2, 2)])


class Side:
    """Pieces of tensors, each in a buffer of its own."""

    def __init__(self, rank=0):
        self.builder = _core.LayoutBuilder(rank)
        self.pieces = []

    def add(self, piece, order, value=None, name="t", shape=SHAPE):
        start, extent, steps = piece
        strides, item = [0] * len(shape), 4
        for axis in reversed(order):
            strides[axis], item = item, item * extent[axis]
        memory = np.full(np.prod(extent), -1, np.int32)
        view = np.ndarray(extent, np.int32, memory, 0, strides)
        part = tuple(slice(a, a + n * s, s) for a, n, s in zip(*piece, strict=True))
        if value is not None:
            view[...] = value[part]
        place = (len(self.pieces), 0, strides, f"{name} {len(self.pieces)}")
        self.builder.add_shard(name, "int32", shape, start, extent, *place, 0, steps)
        self.pieces.append((memory, view, part))

    def spans(self):
        return _core.BufferTable(
            [(memory.ctypes.data, memory.nbytes) for memory, *_ in self.pieces]
        )


def alternating(steps):
    """Pieces that make up a tensor: for all offsets, every so many-th index along each axis."""
    extent = tuple(n // s for n, s in zip(SHAPE, steps, strict=True))
    return [(start, extent, steps) for start in itertools.product(*map(range, steps))]


def pieces(data, steps):
    """Pieces that make up a tensor: in steps, or dense boxes that are cut anywhere."""
    if data.draw(st.booleans()):
        return alternating(steps)
    inner = [data.draw(st.sets(st.integers(1, n - 1), max_size=2)) for n in SHAPE]
    edges = [sorted({0, n, *each}) for n, each in zip(SHAPE, inner, strict=True)]
    return [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box), (1, 1, 1))
        for box in itertools.product(*map(itertools.pairwise, edges))
    ]


def run(source, destination, **budgets):
    """Updates a worker from one rank, through a ring; returns the manifest."""
    wanted = destination.builder.build()
    plan = _core.Plan(source.builder.build(), [(wanted, False)], [(0, 0)], [0], 0, **budgets)
    manifest = _core.Layout.from_bytes(plan.manifest(0).to_bytes())
    route = _core.Route(manifest, wanted)
    ring = np.full(max(1, plan.ring_nbytes(0)) // 4, -2, np.int32)
    spans = [(ring.ctypes.data, ring.nbytes)]
    stream = _core.Stream()
    for number in range(plan.round_count):
        stream.copy(plan, number, _core.LOCAL, source.spans(), _core.BufferTable(spans))
        rounds = _core.BufferTable(spans * route.buffer_count)
        stream.copy(route, number, _core.LOCAL, rounds, destination.spans())
        stream.synchronize(60.0)
    stream.close()
    return manifest


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_element_arrives_whichever_side_goes_in_steps(data):
    steps = data.draw(STEPS)
    source, destination = Side(), Side()
    for piece in pieces(data, steps):
        source.add(piece, data.draw(ORDERS), VALUE)
    for piece in pieces(data, steps):
        destination.add(piece, data.draw(ORDERS))
    run(source, destination, round_nbytes=data.draw(st.sampled_from([0, 64, 192])))
    for _, view, part in destination.pieces:
        assert (view == VALUE[part]).all()


def test_what_alternates_is_delivered_as_it_lies():
    """Rows of two parameters that alternate in a transposed tensor, as gpt-oss has them."""
    shape = (16, 200)
    value = np.arange(16 * 200, dtype=np.int32).reshape(shape)
    source, destination = Side(), Side()
    for first in (0, 1):
        source.add(((0, first), (16, 100), (1, 2)), (1, 0), value, shape=shape)
    destination.add(((0, 40), (16, 60), (1, 1)), (1, 0), shape=shape)
    manifest = run(source, destination)
    assert (destination.pieces[0][1] == value[:, 40:100]).all()
    # delivered as it lies there, so that rows stay whole on both sides
    assert [shard[3:6] for shard in manifest.shards(0)] == [((0, 40), (16, 60), (4, 64))]


@pytest.mark.parametrize(
    ("start", "extent", "steps", "text"),
    [
        ((0, 1), (4, 3), (1, 3), "dim 1: start 1 with extent 3 in steps of 3 is not inside"),
        ((0, 0), (3, 1), (2, 1), "dim 0: start 0 with extent 3 in steps of 2 is not inside"),
        ((4, 0), (1, 1), (2, 1), "dim 0: start 4 with extent 1 in steps of 2 is not inside"),
    ],
)
def test_steps_that_leave_the_tensor(start, extent, steps, text):
    with pytest.raises(_core.InvalidArgumentError, match=text):
        _core.LayoutBuilder().add_shard(
            "a", "int8", (4, 6), start, extent, 0, 0, (6, 1), steps=steps
        )
