"""What a rank process of test_exchange.py does (the module must be importable)."""

import os
import signal
from multiprocessing.connection import Connection

from wsync import _core
from wsync.exchange.group_exchange import Exchange

PATIENCE = 60.0
RANKS = 3
TENSORS = 9
ROWS, COLUMNS = 4, 256
PART = ROWS * COLUMNS * 4
ROUND = 2  # in which something happens


def make_plan(rank: int) -> _core.Plan:
    """Each rank holds a third of the rows of every tensor; each serves a worker that wants all."""
    shape = (ROWS * RANKS, COLUMNS)
    strides = (COLUMNS * 4, 4)
    parts = []
    for owner in range(RANKS):
        builder = _core.LayoutBuilder(owner)
        for t in range(TENSORS):
            builder.add_shard(
                f"t{t}",
                "float32",
                shape,
                (ROWS * owner, 0),
                (ROWS, COLUMNS),
                0,
                t * PART,
                strides,
            )
        parts.append(builder.build())
    wanted = _core.LayoutBuilder()
    for t in range(TENSORS):
        wanted.add_shard(f"t{t}", "float32", shape, (0, 0), shape, t, 0, strides)
    return _core.Plan(
        _core.Layout.merge(parts),
        [(wanted.build(), True)],
        [(0, owner) for owner in range(RANKS)],
        [0] * RANKS,
        rank,
        round_nbytes=PART * RANKS,
        ring_nbytes=1 << 20,
    )


def part(update: int, tensor: int, owner: int) -> bytes:
    return bytes((update * 101 + tensor * 11 + owner * 3 + i) % 251 for i in range(64)) * (
        PART // 64
    )


def update_rank(
    rank: int,
    pipe: Connection,
    exchange: Exchange,
    behaviour: str,
) -> None:
    plan = make_plan(rank)
    parameters = _core.Memory(PART * TENSORS)
    ring = _core.Memory(max(plan.ring_nbytes(rank), 1))
    buffers = _core.BufferTable([(parameters.address, parameters.nbytes)], parameters)
    rings = _core.BufferTable(
        [(ring.address, ring.nbytes) if w == rank else (0, 0) for w in range(RANKS)], ring
    )
    manifest = plan.manifest(rank)
    stream = _core.Stream()
    for update in range(3):
        memoryview(parameters)[:] = b"".join(part(update, t, rank) for t in range(TENSORS))
        exchange.begin(plan)
        for k in range(plan.round_count):
            if k == ROUND and behaviour == "stop":
                stream.synchronize(PATIENCE)  # the others wait for what it still has to do
                pipe.send("stopping")
                os.kill(os.getpid(), signal.SIGSTOP)
            exchange.acquire(k, PATIENCE)
            messages = exchange.spans(k)
            stream.copy(plan, k, _core.PACK, buffers, messages)
            exchange.post(k, stream)
            stream.copy(plan, k, _core.LOCAL, buffers, rings)
            exchange.wait(k, stream, 0.5 if k == ROUND and behaviour == "hurry" else PATIENCE)
            stream.copy(plan, k, _core.UNPACK, messages, rings)
            exchange.release(k, stream)
        stream.synchronize(PATIENCE)
        for t in range(TENSORS):
            index = manifest.find(f"t{t}")
            (shard,) = manifest.shards(index)
            got = bytes(memoryview(ring)[shard[2] : shard[2] + PART * RANKS])
            assert got == b"".join(part(update, t, owner) for owner in range(RANKS)), (update, t)


def run(rank: int, pipe: Connection, behaviour: str) -> None:
    exchange = _core.Exchange.shared(rank, RANKS, make_plan(rank).send_nbytes)
    pipe.send(exchange.address)
    exchange.connect(pipe.recv(), PATIENCE)
    try:
        update_rank(rank, pipe, exchange, behaviour)
        pipe.send("3 updates")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    exchange.close()
