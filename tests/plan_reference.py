"""A world small enough to play a plan by hand, byte by byte, in plain Python.

`World` describes tensors, who holds them and who wants them.  `play` makes the plans of all
ranks, runs their copies on byte arrays, delivers the messages, and checks what a user of a plan
relies on: it raises AssertionError where a byte is missing, wrong, early or written twice.
"""

import itertools
import math
import struct
from dataclasses import dataclass, field

from wsync import _core

ALIGN = 64
ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8}
DELIVERED = {
    ("float32", "bfloat16"): "bfloat16",
    ("float32", "float16"): "float16",
    ("bfloat16", "float32"): "bfloat16",
}
DEFAULT_ROUND = 32 << 20


def delivered(source: str, destination: str) -> str:
    """The dtype that travels: the narrower of both."""
    return source if source == destination else DELIVERED[source, destination]


def encode(dtype: str, tensor: int, index: tuple[int, ...]) -> bytes:
    """An element that is exact in every float dtype here, so that casts cannot round."""
    mixed = tensor * 2654435761
    for i in index:
        mixed = (mixed * 1000003 ^ i) & 0xFFFFFFFFFFFF
    mixed ^= mixed >> 13
    if dtype == "uint8":
        return bytes([mixed % 256])
    if dtype == "int64":
        return struct.pack("<q", mixed)
    value = float(mixed % 251 - 125)
    if dtype == "float16":
        return struct.pack("<e", value)
    data = struct.pack("<f", value)
    return data if dtype == "float32" else data[2:]


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True)
class Box:
    start: tuple[int, ...]
    extent: tuple[int, ...]

    def indices(self) -> itertools.product:
        ranges = (range(s, s + e) for s, e in zip(self.start, self.extent, strict=True))
        return itertools.product(*ranges)

    @property
    def count(self) -> int:
        return math.prod(self.extent)


def whole(tensor: Tensor) -> Box:
    return Box((0,) * len(tensor.shape), tensor.shape)


def row_major(dtype: str, extent: tuple[int, ...]) -> tuple[int, ...]:
    strides = [ITEM_NBYTES[dtype]] * len(extent)
    for i in reversed(range(len(extent) - 1)):
        strides[i] = strides[i + 1] * extent[i + 1]
    return tuple(strides)


@dataclass(frozen=True)
class Shard:
    tensor: int
    rank: int
    box: Box
    origin: str = ""
    order: tuple[int, ...] = ()
    """Axes from the slowest to the fastest in memory; empty means row-major."""
    gap: int = 0
    """Unused bytes before the box and at the end of its fastest axis, in elements."""

    def strides(self, dtype: str) -> tuple[int, ...]:
        step = ITEM_NBYTES[dtype]
        strides = [0] * len(self.box.extent)
        for n, axis in enumerate(reversed(self.order or tuple(range(len(strides))))):
            strides[axis] = step
            step *= self.box.extent[axis] + (self.gap if n == 0 else 0)
        return tuple(strides)


@dataclass
class Destination:
    whole: bool
    boxes: dict[int, list[Box]]
    dtypes: dict[int, str] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)


@dataclass
class World:
    tensors: list[Tensor]
    shards: list[Shard]
    destinations: list[Destination]
    workers: list[tuple[int, int]]
    hosts: list[int]
    budgets: dict[str, int] = field(default_factory=dict)
    grow: bool = False

    def source(self) -> _core.Layout:
        """The merged layout of all ranks; every shard has a buffer of its own."""
        builders = [_core.LayoutBuilder(rank) for rank in range(len(self.hosts))]
        counts = [0] * len(self.hosts)
        for tensor in self.tensors:
            builders[0].add_tensor(tensor.name, tensor.dtype, tensor.shape, tensor.group)
        for shard in self.shards:
            tensor = self.tensors[shard.tensor]
            builders[shard.rank].add_shard(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                shard.box.start,
                shard.box.extent,
                counts[shard.rank],
                shard.gap * ITEM_NBYTES[tensor.dtype],
                shard.strides(tensor.dtype),
                shard.origin,
                tensor.group,
            )
            counts[shard.rank] += 1
        return _core.Layout.merge([builder.build() for builder in builders])

    def destination(self, destination: Destination) -> tuple[_core.Layout, bool]:
        builder = _core.LayoutBuilder()
        for index, boxes in destination.boxes.items():
            tensor = self.tensors[index]
            dtype = destination.dtypes.get(index, tensor.dtype)
            group = destination.groups.get(index, 0)
            builder.add_tensor(tensor.name, dtype, tensor.shape, group)
            for box in boxes:
                strides = row_major(dtype, box.extent)
                builder.add_shard(
                    tensor.name,
                    dtype,
                    tensor.shape,
                    box.start,
                    box.extent,
                    0,
                    0,
                    strides,
                    "",
                    group,
                )
        return builder.build(), destination.whole

    def plans(self) -> list[_core.Plan]:
        source = self.source()
        destinations = [self.destination(d) for d in self.destinations]
        return [
            _core.Plan(
                *(source, destinations, self.workers, self.hosts, rank),
                **self.budgets,
                rounds_grow=self.grow,
            )
            for rank in range(len(self.hosts))
        ]

    def memory(self, rank: int) -> list[tuple[bytearray, str]]:
        """The parameter buffers of a rank, with their dtypes."""
        buffers = []
        for shard in self.shards:
            if shard.rank != rank:
                continue
            dtype = self.tensors[shard.tensor].dtype
            strides = shard.strides(dtype)
            offset = shard.gap * ITEM_NBYTES[dtype]
            end = sum((e - 1) * s for e, s in zip(shard.box.extent, strides, strict=True))
            data = bytearray(b"\xee" * (offset + end + ITEM_NBYTES[dtype]))
            for index in shard.box.indices():
                steps = zip(index, shard.box.start, strides, strict=True)
                at = offset + sum((i - s) * stride for i, s, stride in steps)
                data[at : at + ITEM_NBYTES[dtype]] = encode(dtype, shard.tensor, index)
            buffers.append((data, dtype))
        return buffers

    def wanted(self, worker: int) -> dict[int, list[Box]]:
        destination = self.destinations[self.workers[worker][0]]
        if not destination.whole:
            return {index: boxes for index, boxes in destination.boxes.items() if boxes}
        return {i: boxes or [whole(self.tensors[i])] for i, boxes in destination.boxes.items()}

    def dtype(self, worker: int, tensor: int) -> str:
        destination = self.destinations[self.workers[worker][0]]
        source = self.tensors[tensor].dtype
        return delivered(source, destination.dtypes.get(tensor, source))


def convert(transform: int, data: bytes) -> bytes:
    if transform == 0:
        return data
    if transform == 1:
        return data[2:]
    assert transform == 2
    return struct.pack("<e", struct.unpack("<f", data)[0])


def element_moves(copy: tuple, source_nbytes: int, destination_nbytes: int) -> itertools.chain:
    """(source offset, destination offset) of every element of a copy."""
    _, _, source, destination, row, _, extent, source_strides, destination_strides = copy
    for index in itertools.product(*(range(e) for e in extent)):
        a = source + sum(i * s for i, s in zip(index, source_strides, strict=True))
        b = destination + sum(i * s for i, s in zip(index, destination_strides, strict=True))
        for i in range(row):
            yield a + i * source_nbytes, b + i * destination_nbytes


class Slots:
    """One worker's ring and what must be in it."""

    def __init__(self, world: World, plan: _core.Plan, worker: int) -> None:
        self.ring = bytearray(plan.ring_nbytes(worker))
        self.slots = [plan.slot(worker, k) for k in range(plan.round_count)]
        self.expected: list[dict[int, bytes]] = [{} for _ in self.slots]
        self.item_nbytes: list[dict[int, int]] = [{} for _ in self.slots]
        self.tensor_rounds: dict[int, set[int]] = {}
        self.boxes: dict[int, int] = {}  # of each tensor: how many pieces it came in
        self.written: set[int] = set()
        self.check_manifest(world, plan, worker)
        self.check_ring(world)

    def check_manifest(self, world: World, plan: _core.Plan, worker: int) -> None:
        """Every wanted element exactly once, at aligned starts, inside the slots."""
        manifest = plan.manifest(worker)
        numbers = {tensor.name: i for i, tensor in enumerate(world.tensors)}
        left = {
            (tensor, index)
            for tensor, boxes in world.wanted(worker).items()
            for box in boxes
            for index in box.indices()
        }
        assert set(manifest.names()) == {world.tensors[i].name for i in world.wanted(worker)}
        for at in range(manifest.tensor_count):
            name, dtype, shape, _ = manifest.tensor(at)
            tensor = numbers[name]
            assert (dtype, shape) == (world.dtype(worker, tensor), world.tensors[tensor].shape)
            for rank, buffer, offset, start, extent, strides, _ in manifest.shards(at):
                assert rank == 0 and offset % ALIGN == 0
                assert strides == row_major(dtype, extent)
                slot_offset, slot_nbytes, _ = self.slots[buffer]
                assert slot_offset <= offset
                nbytes = math.prod(extent) * ITEM_NBYTES[dtype]
                assert offset + nbytes <= slot_offset + slot_nbytes
                for n, index in enumerate(Box(start, extent).indices()):
                    left.remove((tensor, index))
                    byte = offset + n * ITEM_NBYTES[dtype]
                    assert byte not in self.expected[buffer]
                    self.expected[buffer][byte] = encode(dtype, tensor, index)
                self.tensor_rounds.setdefault(tensor, set()).add(buffer)
                self.boxes[tensor] = self.boxes.get(tensor, 0) + 1
        assert not left

    def check_ring(self, world: World) -> None:
        """No slot may be written while an earlier one that it overlaps is still read."""
        before = -1
        for k, (offset, nbytes, wait_round) in enumerate(self.slots):
            assert offset % ALIGN == 0 and offset + nbytes <= len(self.ring)
            assert before <= wait_round < k
            before = wait_round
            for earlier in self.slots[wait_round + 1 : k]:
                assert offset >= earlier[0] + earlier[1] or earlier[0] >= offset + nbytes

    def begin(self) -> None:
        self.written = set()

    def write(self, k: int, at: int, data: bytes) -> None:
        offset, nbytes, _ = self.slots[k]
        assert offset <= at and at + len(data) <= offset + nbytes
        span = set(range(at, at + len(data)))
        assert not span & self.written
        self.written |= span
        self.ring[at : at + len(data)] = data

    def check(self, k: int) -> None:
        """The round is complete, and rounds that may still be read are intact."""
        assert len(self.written) == sum(len(data) for data in self.expected[k].values())
        for j in range(self.slots[k][2] + 1, k + 1):
            for at, data in self.expected[j].items():
                assert self.ring[at : at + len(data)] == data


def check_messages(plans: list[_core.Plan], k: int) -> dict[int, list]:
    """Both ends agree on every message, and none overlap in staging."""
    lists = {rank: plan.messages(k) for rank, plan in enumerate(plans)}
    sent = {rank: [m for m in messages if m[0] == rank] for rank, messages in lists.items()}
    for rank, messages in lists.items():
        ends = {True: 0, False: 0}
        for source, peers, send_offset, recv_offset, nbytes in messages:
            assert nbytes > 0 and source not in peers and list(peers) == sorted(set(peers))
            assert rank == source or rank in peers
            offset = send_offset if rank == source else recv_offset
            assert offset % ALIGN == 0 and offset >= ends[rank == source]
            ends[rank == source] = offset + nbytes
            same = [m for m in sent[source] if (m[1], m[2], m[4]) == (peers, send_offset, nbytes)]
            assert len(same) == 1
        assert ends[True] <= plans[rank].send_nbytes
        assert ends[False] <= plans[rank].recv_nbytes
        assert len({(m[0], m[1]) for m in messages}) == len(messages)
    for rank, messages in sent.items():
        for message in messages:
            for peer in message[1]:
                assert sum(m[:3] == message[:3] for m in lists[peer]) == 1
        order = [m[:2] for m in lists[rank]]
        assert [m for m in order if m[0] == rank] == [m[:2] for m in messages]
    return lists


def play_round(world: World, plans: list, memory: list, rings: list[Slots], k: int) -> int:
    """Returns the bytes that went into rings."""
    lists = check_messages(plans, k)
    packed: dict[tuple, bytearray] = {}
    total = 0
    for rank, plan in enumerate(plans):
        buffers = {i: bytearray(m[4]) for i, m in enumerate(lists[rank]) if m[0] == rank}
        seen: set[tuple[int, int]] = set()
        for copy in plan.copies(k, _core.PACK):
            data, dtype = memory[rank][copy[0]]
            size = ITEM_NBYTES[dtype]
            out = size if copy[5] == 0 else 2
            for a, b in element_moves(copy, size, out):
                assert a >= 0 and a + size <= len(data) and b + out <= len(buffers[copy[1]])
                assert (copy[1], b) not in seen
                seen.add((copy[1], b))
                buffers[copy[1]][b : b + out] = convert(copy[5], data[a : a + size])
        for i, message in enumerate(lists[rank]):
            if message[0] == rank:
                packed[rank, message[2]] = buffers[i]
    for ring in rings:
        ring.begin()
    for rank, plan in enumerate(plans):
        for phase in (_core.LOCAL, _core.UNPACK):
            for copy in plan.copies(k, phase):
                assert world.workers[copy[1]][1] == rank
                ring = rings[copy[1]]
                # Every element's size is known from where it goes.
                out = len(ring.expected[k][copy[3]])
                if phase == _core.LOCAL:
                    data, dtype = memory[rank][copy[0]]
                    size = ITEM_NBYTES[dtype]
                else:
                    message = lists[rank][copy[0]]
                    assert message[0] != rank and copy[5] == 0
                    data, size = packed[message[0], message[2]], out
                for a, b in element_moves(copy, size, out):
                    assert a >= 0 and a + size <= len(data)
                    ring.write(k, b, convert(copy[5], bytes(data[a : a + size])))
                    total += out
    for ring in rings:
        ring.check(k)
    return total


def check_budgets(world: World, plans: list, rings: list[Slots]) -> None:
    """Budgets that were asked for hold, whatever they are."""
    for name, limit in world.budgets.items():
        if limit == 0:
            continue
        if name in ("send_nbytes", "recv_nbytes"):
            assert max(getattr(plan, name) for plan in plans) <= limit
        for ring in rings:
            if name == "ring_nbytes":
                assert len(ring.ring) <= limit
            if name == "round_nbytes" and not world.grow:
                assert all(nbytes <= limit for _, nbytes, _ in ring.slots)


def check_whole(world: World, rings: list[Slots]) -> None:
    """Boxes of a whole destination are not cut; its tensors, and keep-together groups, are in one
    round."""
    for worker, ring in enumerate(rings):
        destination = world.destinations[world.workers[worker][0]]
        if not destination.whole:
            continue
        groups: dict[tuple[str, int], set[int]] = {}
        for tensor, rounds in ring.tensor_rounds.items():
            assert ring.boxes[tensor] == max(len(destination.boxes[tensor]), 1)
            if ring.boxes[tensor] > 1:
                continue  # in no group
            assert len(rounds) == 1
            for kind, group in (
                ("source", world.tensors[tensor].group),
                ("destination", destination.groups.get(tensor, 0)),
            ):
                if group:
                    groups.setdefault((kind, group), set()).update(rounds)
        assert all(len(rounds) == 1 for rounds in groups.values())


def play(world: World) -> list[_core.Plan]:
    """Runs one update and checks everything about it; returns the plans of all ranks."""
    plans = world.plans()
    assert len({plan.fingerprint for plan in plans}) == 1
    assert len({plan.round_count for plan in plans}) == 1
    assert all(plan.stats == plans[0].stats for plan in plans)
    memory = [world.memory(rank) for rank in range(len(plans))]
    rings = [Slots(world, plans[0], worker) for worker in range(len(world.workers))]
    total = 0
    for k in range(plans[0].round_count):
        total += play_round(world, plans, memory, rings, k)
    check_budgets(world, plans, rings)
    check_whole(world, rings)
    needed = sum(
        box.count * ITEM_NBYTES[world.dtype(worker, tensor)]
        for worker in range(len(world.workers))
        for tensor, boxes in world.wanted(worker).items()
        for box in boxes
    )
    stats = plans[0].stats
    assert stats["delivered_nbytes"] == stats["needed_nbytes"] == needed == total
    messages = [
        (k, m)
        for k in range(plans[0].round_count)
        for rank, plan in enumerate(plans)
        for m in plan.messages(k)
        if m[0] == rank
    ]
    assert stats["message_count"] == len(messages)
    assert stats["sent_nbytes"] == sum(m[4] * len(m[1]) for _, m in messages)
    return plans
