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


def test_what_layouts_say_of_steps():
    builder = _core.LayoutBuilder()
    shape = (4, 6)
    builder.add_shard("a", "int8", shape, (0, 1), (4, 3), 0, 0, (3, 1), steps=(1, 2))
    builder.add_shard("a", "int8", shape, (0, 0), (1, 1), 0, 9, (3, 1), steps=(7, 9))
    layout = builder.build()
    assert [shard.steps for shard in layout.shards(0)] == [(1, 2), (1, 1)]
    data = layout.to_bytes()
    assert data[4] == 3
    assert _core.Layout.from_bytes(data).to_bytes() == data
    merged = _core.Layout.merge([layout])
    assert merged.to_bytes() == data
    assert merged.nbytes == 24
    assert merged.shard_nbytes == 13


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


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            [(1, 2, 1), (1, 3, 1)],
            "dim 1: steps of 3 are taken, and do not go with steps of 2 along",
        ),
        ([(1, 4, 1)], "dim 1: steps of 4 are taken, and do not go with steps of 1 along"),
        ([(2, 2, 2)] * 2, None),
    ],
)
def test_steps_that_no_plan_is_made_of(steps, text):
    shape = (4, 6, 4)
    builder = _core.LayoutBuilder()
    for number, each in enumerate(steps):
        builder.add_shard(
            "t", "int8", shape, (0, 0, number), (2, 2, 1), number, 0, (2, 1, 1), steps=each
        )
    layout = builder.build()
    if text is None:
        _core.Route(layout, layout)
        return
    for make in (lambda: _core.Route(layout, layout), lambda: _core.Plan(layout, [], [], [0], 0)):
        with pytest.raises(_core.UnsupportedError, match=text):
            make()


def test_more_dimensions_than_there_may_be():
    builder = _core.LayoutBuilder()
    shape, ones = (4, 4, 1, 1, 1), (1, 1, 1)
    strides = (2, 1, 1, 1, 1)
    builder.add_shard(
        "t", "int8", shape, (0,) * 5, (2, 2, *ones), 0, 0, strides, steps=(2, 2, *ones)
    )
    layout = builder.build()
    with pytest.raises(_core.UnsupportedError, match="t: steps in so many of its 5 dimensions"):
        _core.Route(layout, layout)


def test_a_map_in_steps():
    """A share of a parameter whose rows are every third row of a tensor, from the second on."""
    builder = _core.LayoutBuilder()
    place = ("t", "", (9, 2), (1, 0), (0, 0), (3, 2), (0, 1), 0, 0.0, 0.0, (3, 1))
    assert builder.add_parameter("p", 0, "int8", (2, 1), [((1, 0), (2, 2), (0, 0))], [place]) == 4
    (shard,) = builder.build().shards(0)
    assert shard == (0, 0, 0, (4, 0), (2, 2), (2, 1), "p")
    assert shard.steps == (3, 1)
    for steps, error in (((3,), ValueError), ((-1, 1), ValueError), (3, TypeError)):
        with pytest.raises(error, match="step"):
            builder.add_parameter("p", 0, "int8", (2, 1), [], [(*place[:10], steps)])
