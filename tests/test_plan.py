"""Plans against an oracle that plays them byte by byte, and what is refused."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_reference import (
    ALIGN,
    DEFAULT_ROUND,
    Box,
    Destination,
    Shard,
    Tensor,
    World,
    play,
    whole,
)

from wsync import _core


@st.composite
def cuts(draw: st.DrawFn, extent: int) -> list[tuple[int, int]]:
    """(start, extent) of the uneven parts of an axis."""
    points = sorted(draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=2)) - {extent})
    edges = [0, *points, extent]
    return [(a, b - a) for a, b in itertools.pairwise(edges) if b > a]


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
            forms = [[]] if 0 in tensor.shape else [[], [whole(tensor)], draw(grids(tensor.shape))]
            destination.boxes[index] = draw(st.sampled_from(forms))
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
    for name in ("round_nbytes", "ring_nbytes", "send_nbytes", "recv_nbytes"):
        world.budgets[name] = ALIGN * draw(st.sampled_from([0, 0, 0, 1, 2, 3, 8]))
    world.grow = draw(st.booleans())
    return world


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds())
def test_every_byte_arrives_once_in_time_and_in_budget(world: World) -> None:
    """Where a budget is refused because of what cannot be cut, the next larger one is tried."""
    while True:
        try:
            play(world)
        except _core.InvalidArgumentError as error:
            assert any(d.whole for d in world.destinations)
            name = str(error).split()[0]
            world.budgets[name] += ALIGN
        else:
            break


def rows(first: int, count: int, columns: int = 32) -> Box:
    return Box((first, 0), (count, columns))


def matrix(name: str, count: int = 4, group: int = 0, columns: int = 32) -> Tensor:
    return Tensor(name, "bfloat16", (count, columns), group)


def everything(made: list[Tensor]) -> Destination:
    return Destination(True, {i: [] for i in range(len(made))})


def messages(plans: list[_core.Plan]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(round, source, peers) of all messages."""
    return [
        (k, m[0], m[1])
        for k in range(plans[0].round_count)
        for rank, plan in enumerate(plans)
        for m in plan.messages(k)
        if m[0] == rank
    ]


def count(plan: _core.Plan, phase: int) -> int:
    return sum(len(plan.copies(k, phase)) for k in range(plan.round_count))


def test_a_home_that_holds_a_replica_copies_from_itself() -> None:
    made = [matrix("w")]
    shards = [Shard(0, rank, whole(made[0])) for rank in range(3)]
    plans = play(World(made, shards, [everything(made)], [(0, 2), (0, 1)], [0, 0, 0]))
    assert messages(plans) == []
    assert [count(plan, _core.LOCAL) for plan in plans] == [0, 1, 1]


def test_a_replica_on_the_same_host_serves_before_a_remote_one() -> None:
    made = [matrix(f"w{i}") for i in range(4)]
    shards = [Shard(i, rank, whole(made[i])) for i in range(4) for rank in (0, 2)]
    plans = play(World(made, shards, [everything(made)], [(0, 3)], [0, 0, 1, 1]))
    assert {(source, peers) for _, source, peers in messages(plans)} == {(2, (3,))}


def test_replicas_share_the_load() -> None:
    made = [matrix(f"w{i}") for i in range(6)]
    shards = [Shard(i, rank, whole(made[i])) for i in range(6) for rank in (0, 1, 2)]
    plans = play(World(made, shards, [everything(made)], [(0, 3)], [0, 0, 0, 0]))
    assert [count(plan, _core.PACK) for plan in plans] == [2, 2, 2, 0]


def test_homes_served_by_one_source_share_a_message() -> None:
    made = [matrix("w")]
    shards = [Shard(0, 0, whole(made[0]))]
    workers = [(0, 1), (0, 2), (0, 2), (0, 0)]
    plans = play(World(made, shards, [everything(made)], workers, [0, 0, 1]))
    assert messages(plans) == [(0, 0, (1, 2))]
    assert count(plans[0], _core.PACK) == 1
    assert [count(plan, _core.LOCAL) for plan in plans] == [1, 0, 0]
    assert [count(plan, _core.UNPACK) for plan in plans] == [0, 1, 2]
    assert plans[0].stats["sent_nbytes"] == 2 * 256


def test_all_pieces_from_one_rank_to_another_are_one_message_a_round() -> None:
    made = [matrix(f"w{i}") for i in range(8)]
    shards = [Shard(i, i % 2, whole(made[i])) for i in range(8)]
    plans = play(World(made, shards, [everything(made)], [(0, 2)], [0, 0, 0]))
    assert plans[0].round_count == 1
    assert messages(plans) == [(0, 0, (2,)), (0, 1, (2,))]


def test_all_owners_send_in_every_round() -> None:
    made = [matrix(f"layers.{i}") for i in range(16)]
    shards = [Shard(i, i // 4, whole(made[i])) for i in range(16)]  # four pipeline stages
    world = World(made, shards, [everything(made)], [(0, 4)], [0] * 5)
    world.budgets["round_nbytes"] = 4 * 256
    plans = play(world)
    assert plans[0].round_count == 4
    for k in range(4):
        assert [source for n, source, _ in messages(plans) if n == k] == [0, 1, 2, 3]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=60),
    st.booleans(),
)
def test_no_two_rounds_would_fit_into_one(sizes: list[tuple[int, int]], uncut: bool) -> None:
    """So rounds are more than half full on average, whatever the tensors are."""
    made = [Tensor(f"w{i}", "uint8", (n, ALIGN)) for i, (_, n) in enumerate(sizes)]
    shards = [Shard(i, owner, whole(made[i])) for i, (owner, _) in enumerate(sizes)]
    wanted = Destination(uncut, {i: [whole(tensor)] for i, tensor in enumerate(made)})
    budget = ALIGN * (40 if uncut else 16)
    world = World(made, shards, [wanted], [(0, 4)], [0] * 5, {"round_nbytes": budget})
    plan = world.plans()[0]
    slots = [plan.slot(0, k)[1] for k in range(plan.round_count)]
    assert sum(slots) == ALIGN * sum(n for _, n in sizes)
    assert max(slots) <= budget
    assert all(a + b > budget for a, b in itertools.combinations(slots, 2))


def test_a_group_stays_together_across_owners() -> None:
    made = [matrix(f"w{i}", group=9 if i in (0, 7) else 0) for i in range(8)]
    shards = [Shard(i, i // 4, whole(made[i])) for i in range(8)]
    world = World(made, shards, [everything(made)], [(0, 0)], [0, 0])
    world.budgets["round_nbytes"] = 512
    manifest = play(world)[0].manifest(0)
    assert (
        manifest.shards(manifest.names().index("w0"))[0][1]
        == manifest.shards(manifest.names().index("w7"))[0][1]
    )


def test_what_need_not_be_whole_is_cut_along_its_outermost_axis() -> None:
    made = [Tensor("w", "bfloat16", (2, 6, 32))]
    half = Box((1, 0, 0), (1, 6, 32))
    world = World(made, [Shard(0, 0, whole(made[0]))], [Destination(False, {0: [half]})], [], [0])
    world.workers = [(0, 0)]
    world.budgets["round_nbytes"] = 128
    manifest = play(world)[0].manifest(0)
    boxes = sorted(shard[3:5] for shard in manifest.shards(0))
    assert boxes == [((1, at, 0), (1, 2, 32)) for at in (0, 2, 4)]


def test_a_tensor_that_one_destination_wants_whole_is_not_cut() -> None:
    made = [matrix("w", 8)]
    part = Destination(False, {0: [rows(0, 8)]})
    world = World(made, [Shard(0, 0, whole(made[0]))], [everything(made), part], [], [0, 0])
    world.workers = [(0, 0), (1, 1)]
    assert play(world)[0].round_count == 1
    world.workers = [(1, 1)]
    world.budgets["round_nbytes"] = 256
    assert play(world)[0].round_count == 2


def big(nbytes: list[int], **budgets: int) -> _core.Plan:
    """A plan of tensors that no test has memory for."""
    source = _core.LayoutBuilder()
    wanted = _core.LayoutBuilder()
    for i, size in enumerate(nbytes):
        source.add_shard(f"w{i}", "uint8", (size,), (0,), (size,), i, 0, (1,))
        wanted.add_tensor(f"w{i}", "uint8", (size,))
    return _core.Plan(source.build(), [(wanted.build(), True)], [(0, 0)], [0], 0, **budgets)


def test_default_rounds_are_32_mib_but_for_tensors_that_are_larger() -> None:
    mib = 1 << 20
    plan = big([100 * mib] + [8 * mib] * 40)
    slots = [plan.slot(0, k) for k in range(plan.round_count)]
    assert [nbytes // mib for _, nbytes, _ in slots] == [100] + [32] * 10
    # Four rounds, or the two largest neighbours.
    assert plan.ring_nbytes(0) == 132 * mib
    assert [offset // mib for offset, _, _ in slots[:5]] == [0, 100, 0, 32, 64]
    assert [wait for _, _, wait in slots[:5]] == [-1, -1, 0, 0, 0]
    assert big([8 * mib] * 40).ring_nbytes(0) == 4 * DEFAULT_ROUND
    assert big([8 * mib] * 3).ring_nbytes(0) == 24 * mib  # never more than the model


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(0, 20))
def test_a_slot_waits_for_the_last_round_that_it_overlaps(sizes: list[int], more: int) -> None:
    largest = max(sizes) * ALIGN
    ring_nbytes = largest + more * ALIGN
    plan = big([n * ALIGN for n in sizes], round_nbytes=largest, ring_nbytes=ring_nbytes)
    assert plan.ring_nbytes(0) == min(ring_nbytes, sum(sizes) * ALIGN)
    slots = [plan.slot(0, k) for k in range(plan.round_count)]
    wait = -1
    for k, (offset, nbytes, wait_round) in enumerate(slots):
        assert offset + nbytes <= plan.ring_nbytes(0)
        for j, (at, size, _) in enumerate(slots[:k]):
            if at < offset + nbytes and offset < at + size:
                wait = max(wait, j)
        assert wait_round == wait


def test_a_narrowing_cast_is_done_at_the_source_and_a_widening_one_is_not() -> None:
    made = [Tensor("narrow", "float32", (4,)), Tensor("widen", "bfloat16", (4,))]
    shards = [Shard(i, 0, whole(made[i])) for i in range(2)]
    wanted = everything(made)
    wanted.dtypes = {0: "bfloat16", 1: "float32"}
    plans = play(World(made, shards, [wanted], [(0, 1)], [0, 0]))
    manifest = plans[1].manifest(0)
    assert [manifest.tensor(i)[1] for i in range(2)] == ["bfloat16", "bfloat16"]
    assert plans[0].stats["sent_nbytes"] == 64 + 8


def test_equal_specifications_have_equal_fingerprints_and_others_do_not() -> None:
    def world(columns: int, hosts: list[int], home: int) -> World:
        made = [matrix("w", columns=columns)]
        shards = [Shard(0, rank, whole(made[0])) for rank in (0, 2)]
        return World(made, shards, [everything(made)], [(0, home)], hosts)

    first = world(32, [0, 0, 1], 1).plans()
    again = world(32, [0, 0, 1], 1).plans()
    assert {plan.fingerprint for plan in first + again} == {first[0].fingerprint}
    others = [world(33, [0, 0, 1], 1), world(32, [1, 0, 0], 1), world(32, [0, 0, 1], 2)]
    prints = {other.plans()[0].fingerprint for other in others}
    assert len(prints | {first[0].fingerprint}) == 4


def refused(world: World, error: type[_core.WsyncError], *parts: str) -> None:
    """The same text on every rank, with all the parts in it."""
    source = world.source()
    destinations = [world.destination(d) for d in world.destinations]
    texts = set()
    for rank in range(len(world.hosts)):
        with pytest.raises(error) as caught:
            _core.Plan(source, destinations, world.workers, world.hosts, rank, **world.budgets)
        texts.add(str(caught.value))
    (text,) = texts
    for part in parts:
        assert part in text


def two_ranks(made: list[Tensor], shards: list[Shard], wanted: Destination) -> World:
    return World(made, shards, [wanted], [(0, 1)], [0, 0])


def test_a_box_that_nobody_holds_is_named() -> None:
    made = [matrix("model.up_proj", 8)]
    shards = [Shard(0, 0, rows(0, 2)), Shard(0, 1, rows(5, 3))]
    world = two_ranks(made, shards, everything(made))
    refused(world, _core.LayoutError, "model.up_proj", "[2, 0]", "[3, 32]")
    play(two_ranks(made, shards, Destination(False, {0: [rows(6, 2)]})))


def test_overlapping_boxes_of_two_parameters_are_named() -> None:
    made = [matrix("model.up_proj", 8)]
    shards = [Shard(0, 0, rows(0, 5), "fc1.weight"), Shard(0, 1, rows(4, 4), "fc2.weight")]
    world = two_ranks(made, shards, everything(made))
    refused(world, _core.LayoutError, "model.up_proj", "fc1.weight", "fc2.weight", "[4, 0]")
    equal = [Shard(0, 0, rows(0, 8), "fc1.weight"), Shard(0, 1, rows(0, 8), "fc2.weight")]
    world = two_ranks(made, equal, everything(made))
    refused(world, _core.LayoutError, "model.up_proj", "fc1.weight", "fc2.weight", "rank 1")


def test_overlapping_boxes_of_one_parameter_are_replicas() -> None:
    made = [matrix("w", 8)]
    shards = [Shard(0, 0, rows(0, 5), "fc1.weight"), Shard(0, 1, rows(4, 4), "fc1.weight")]
    play(two_ranks(made, shards, everything(made)))


@pytest.mark.parametrize("boxes", [[rows(0, 3), rows(2, 2)], [rows(0, 3), rows(0, 3)]])
def test_a_destination_that_wants_an_element_twice_is_named(boxes: list[Box]) -> None:
    made = [matrix("w")]
    world = two_ranks(made, [Shard(0, 0, whole(made[0]))], Destination(False, {0: boxes}))
    refused(world, _core.LayoutError, "w: worker 0 asks twice", f"[{boxes[1].start[0]}, 0]")


def test_a_tensor_that_the_source_lacks_is_named() -> None:
    source = _core.LayoutBuilder()
    source.add_tensor("known", "bfloat16", (4,))
    wanted = _core.LayoutBuilder()
    wanted.add_tensor("model.unknown", "bfloat16", (4,))
    with pytest.raises(_core.LayoutError, match=r"model\.unknown: worker 0"):
        _core.Plan(source.build(), [(wanted.build(), True)], [(0, 0)], [0], 0)


@pytest.mark.parametrize(
    ("dtype", "shape", "error", "text"),
    [
        ("bfloat16", (4, 3), _core.LayoutError, r"w: source shape \[4, 2\] != .* \[4, 3\]"),
        ("bfloat16", (4, 2, 1), _core.LayoutError, r"w: source shape \[4, 2\] != .*\[4, 2, 1\]"),
        ("float16", (4, 2), _core.UnsupportedError, "w: no conversion from bfloat16 to float16"),
    ],
)
def test_a_tensor_that_both_sides_describe_differently_is_named(
    dtype: str, shape: tuple[int, ...], error: type[_core.WsyncError], text: str
) -> None:
    source = _core.LayoutBuilder()
    source.add_shard("w", "bfloat16", (4, 2), (0, 0), (4, 2), 0, 0, (4, 2))
    wanted = _core.LayoutBuilder()
    wanted.add_tensor("w", dtype, shape)
    with pytest.raises(error, match=text):
        _core.Plan(source.build(), [(wanted.build(), True)], [(0, 0)], [0], 0)


def test_rounds_grow_for_what_cannot_be_cut_alone() -> None:
    made = [matrix("a", 1), matrix("large", 8), matrix("b", 2), matrix("c", 2)]
    shards = [Shard(i, 0, whole(tensor)) for i, tensor in enumerate(made)]
    world = two_ranks(made, shards, everything(made))
    world.budgets, world.grow = {"round_nbytes": 256}, True
    (plan, *_) = play(world)
    sizes = sorted(plan.slot(0, k).nbytes for k in range(plan.round_count))
    assert sizes == [64, 256, 512] or sizes == [128, 192, 512]
    assert plan.ring_nbytes(0) == sum(sizes)


@pytest.mark.parametrize(
    ("budgets", "sends", "receives"),
    [
        ({}, [0, 128], [0, 128]),
        ({"send_nbytes": 192, "recv_nbytes": 192}, [0, 128], [0, 128]),
        ({"send_nbytes": 191}, [0, 64], [0, 128]),
        ({"recv_nbytes": 191}, [0, 128], [0, 64]),
    ],
)
def test_messages_begin_at_whole_lines_where_budgets_have_room(
    budgets: dict[str, int], sends: list[int], receives: list[int]
) -> None:
    """Rank 0 sends 64 bytes each to ranks 2 and 3, and rank 3 receives as many from rank 1."""
    made = [matrix(name, 1) for name in "abc"]
    shards = [Shard(0, 0, whole(made[0])), Shard(1, 0, whole(made[1])), Shard(2, 1, whole(made[2]))]
    wanted = [Destination(False, {0: [whole(made[0])]})]
    wanted.append(Destination(False, {i: [whole(made[i])] for i in (1, 2)}))
    world = World(made, shards, wanted, [(0, 2), (1, 3)], [0] * 4)
    world.budgets = budgets
    plans = play(world)
    assert plans[0].round_count == 1
    assert [message.send_offset for message in plans[0].messages(0)] == sends
    assert [message.recv_offset for message in plans[3].messages(0)] == receives


@pytest.mark.parametrize("name", ["round_nbytes", "ring_nbytes", "send_nbytes", "recv_nbytes"])
def test_a_budget_that_cannot_hold_a_whole_tensor_is_named(name: str) -> None:
    made = [matrix("small"), matrix("large", 8)]
    world = two_ranks(made, [Shard(i, 0, whole(made[i])) for i in range(2)], everything(made))
    world.budgets = {name: 448}
    refused(world, _core.InvalidArgumentError, f"{name} is 448", "large", "512")
    world.budgets = {name: 512}
    play(world)


def computing(rank: int, rows: tuple[int, int], scale: float, offset: float) -> _core.Layout:
    """Some rows of the tensor "w" of 8 rows, as `rank` holds and computes them."""
    builder = _core.LayoutBuilder(rank)
    start, extent = (rows[0], 0), (rows[1] - rows[0], 3)
    builder.add_parameter(
        *("p", 0, "bfloat16", (3, 1), [(start, extent, (0, 0))]),
        [("w", "", (8, 3), (0, 0), (0, 0), (8, 3), (0, 1), 0, scale, offset)],
    )
    return builder.build()


def test_elements_are_computed_where_they_are_held_and_once() -> None:
    source = _core.Layout.merge([computing(0, (0, 4), 1.0, 1.0), computing(1, (4, 8), 1.0, 1.0)])
    assert [shard.affine for shard in source.shards(0)] == [(1.0, 1.0)] * 2
    assert _core.Layout.from_bytes(source.to_bytes()).shards(0)[1].affine == (1.0, 1.0)
    wanted = _core.LayoutBuilder()
    wanted.add_tensor("w", "bfloat16", (8, 3))
    destination = (wanted.build(), True)
    found: dict[int, list[int]] = {}
    for rank in range(2):
        plan = _core.Plan(source, [destination], [(0, 0)], [0, 0], rank)
        for phase in (_core.PACK, _core.LOCAL, _core.UNPACK):
            found.setdefault(phase, []).extend(copy[5] for copy in plan.copies(0, phase))
    bf16 = 5  # WSYNC_TRANSFORM_BF16
    assert found == {_core.PACK: [bf16], _core.LOCAL: [bf16], _core.UNPACK: [0]}


def test_replicas_that_are_computed_differently_are_refused() -> None:
    wanted = _core.LayoutBuilder()
    wanted.add_tensor("w", "bfloat16", (8, 3))
    destination = (wanted.build(), True)
    for other in ((1.0, 2.0), (0.0, 0.0)):
        source = _core.Layout.merge([computing(0, (0, 8), 1.0, 1.0), computing(1, (0, 8), *other)])
        with pytest.raises(_core.LayoutError, match="w: ranks 0 and 1 compute it differently"):
            _core.Plan(source, [destination], [(0, 0)], [0, 0], 0)
