"""Plans against an oracle that plays them byte by byte, and what is refused."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_reference import ITEM_NBYTES, Box, Destination, Shard, Tensor, World, pad, play, whole

from wsync import _core

# --- random worlds ------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, extent: int) -> list[tuple[int, int]]:
    """(start, extent) of the uneven parts of an axis."""
    points = sorted(draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=2)) - {extent})
    edges = [0, *points, extent]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover a tensor."""
    boxes = [Box((), ())]
    for extent in shape:
        parts = draw(cuts(extent))
        boxes = [Box((*b.start, s), (*b.extent, e)) for b in boxes for s, e in parts]
    return boxes


@st.composite
def tensors(draw: st.DrawFn, index: int) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    if draw(st.integers(0, 9)) == 0:
        shape = (*shape, 0)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8", "int64"]))
    group = draw(st.sampled_from([0, 0, 1, 2]))
    return Tensor(f"model.layers.{index}.weight", dtype, shape, group)


@st.composite
def source_shards(draw: st.DrawFn, index: int, tensor: Tensor, ranks: int) -> list[Shard]:
    """Each cell of a grid on one or more ranks, each replica with strides of its own."""
    shards = []
    if 0 in tensor.shape:
        return []
    axes = range(len(tensor.shape))
    holders = st.sets(st.integers(0, ranks - 1), min_size=1, max_size=3)
    cells = draw(grids(tensor.shape))
    if draw(st.integers(0, 3)) == 0:
        cells.append(whole(tensor))  # one more copy, cut differently
    for box in cells:
        for rank in sorted(draw(holders)):
            order = tuple(draw(st.permutations(axes)))
            gap = draw(st.sampled_from([0, 0, 1, 3]))
            shards.append(Shard(index, rank, box, f"parameter.{index}", order, gap))
    return shards


@st.composite
def wanted(draw: st.DrawFn, all_tensors: list[Tensor]) -> Destination:
    is_whole = draw(st.booleans())
    destination = Destination(is_whole, {})
    for index, tensor in enumerate(all_tensors):
        if not draw(st.integers(0, 4)):
            continue
        if is_whole:
            listed = draw(st.booleans()) and 0 not in tensor.shape
            destination.boxes[index] = [whole(tensor)] if listed else []
            destination.groups[index] = draw(st.sampled_from([0, 0, 7]))
        elif 0 not in tensor.shape:
            cells = draw(grids(tensor.shape))
            keep = draw(st.lists(st.booleans(), min_size=len(cells), max_size=len(cells)))
            destination.boxes[index] = [c for c, k in zip(cells, keep, strict=True) if k]
        if tensor.dtype == "float32":
            destination.dtypes[index] = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
        elif tensor.dtype == "bfloat16":
            destination.dtypes[index] = draw(st.sampled_from(["float32", "bfloat16"]))
    return destination


@st.composite
def worlds(draw: st.DrawFn) -> World:
    ranks = draw(st.integers(1, 5))
    hosts = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    made = [draw(tensors(i)) for i in range(draw(st.integers(1, 5)))]
    shards = [s for i, t in enumerate(made) for s in draw(source_shards(i, t, ranks))]
    destinations = [draw(wanted(made)) for _ in range(draw(st.integers(1, 3)))]
    worker = st.tuples(st.integers(0, len(destinations) - 1), st.integers(0, ranks - 1))
    workers = draw(st.lists(worker, min_size=1, max_size=5))
    world = World(made, shards, destinations, workers, hosts)
    least = ALIGNED
    if any(destinations[d].whole for d, _ in workers):
        # Room for all tensors at once, whatever is kept together and however it is padded.
        least = sum(pad(math.prod(t.shape) * ITEM_NBYTES[t.dtype]) for t in made)
        least += ALIGNED * len(shards) * len(shards)
    for name in ("round_nbytes", "ring_nbytes", "send_nbytes", "recv_nbytes"):
        factor = draw(st.sampled_from([0, 0, 1, 2, 3]))
        world.budgets[name] = factor * least * (len(destinations) if name == "recv_nbytes" else 1)
    return world


ALIGNED = 64


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_every_byte_arrives_once_in_time_and_in_budget(world: World) -> None:
    play(world)
