"""`scaling`: the time of an update against trainer ranks, engines, and tensors."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

import wsync
from benchmarks import peers
from benchmarks.bucket import bucket_class
from benchmarks.consumer import Consumer, digest
from benchmarks.ranks import on_ranks
from benchmarks.rows import Shape, described, nbytes_of, shapes_of, trainer_layout, values

NBYTES = 256 << 20
TENSOR_NBYTES = 2 << 30
REPEATS = 7
RANKS = (1, 2, 4, 8)
ENGINES = (1, 2, 4)
TENSORS = (200, 2000, 20000)
GOAL = 1.3

Shapes = dict[str, Shape]


def run() -> Iterator[dict[str, Any]]:
    yield from over_ranks()
    yield from over_engines()
    yield from over_tensors()


def over_ranks() -> Iterator[dict[str, Any]]:
    """Ranks of one host that each hold a part, one engine; against one rank."""
    shapes, alone = shapes_of(300, NBYTES), 0.0
    for ranks in RANKS:
        seconds, verified = on_ranks(ranks, spread, ranks, 1, shapes)
        alone = alone or seconds
        title = f"{ranks} trainer ranks, shared exchange" if ranks > 1 else "1 trainer rank"
        yield row(title, shapes, seconds, verified, "none; one rank's time", alone)


def over_engines() -> Iterator[dict[str, Any]]:
    """Engines that one rank feeds at once; against as many updates of one engine."""
    shapes, alone = shapes_of(300, NBYTES), 0.0
    for engines in ENGINES:
        seconds, verified = on_ranks(1, spread, 1, engines, shapes)
        alone = alone or seconds
        peer = "none; one engine's time for each"
        yield row(f"{engines} engines", shapes, seconds, verified, peer, alone * engines)


def over_tensors() -> Iterator[dict[str, Any]]:
    """The same bytes in ten times the tensors; against a tenth of them, and the peers' way."""
    before = 0.0
    name, kind = bucket_class()
    for count in TENSORS:
        shapes = shapes_of(count, TENSOR_NBYTES)
        seconds, theirs, verified = on_ranks(1, beside_slime, shapes, kind)
        title = f"{count} tensors"
        yield row(title, shapes, seconds, verified, f"slime's loop, {name}", theirs)
        if before:
            peer = f"a tenth of the tensors, {GOAL} times"
            yield row(title, shapes, seconds, verified, peer, GOAL * before)
        before = seconds


def row(
    title: str, shapes: Shapes, seconds: float, verified: bool, peer: str, peer_seconds: float
) -> dict[str, Any]:
    return {
        "benchmark": "scaling",
        "case": title,
        "bytes": nbytes_of(shapes),
        "seconds": seconds,
        "peer": peer,
        "peer_seconds": peer_seconds,
        "ratio": peer_seconds / seconds,
        "verified": verified,
    }


def spread(rank: int, ranks: int, engines: int, shapes: Shapes) -> tuple[float, bool]:
    """Median seconds of an update from these ranks to these engines, and whether it was right."""
    whole = values(shapes)
    layout = trainer_layout(whole, rank, ranks)
    expected = digest(whole) if rank == 0 else ""
    del whole
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(Consumer(described(shapes)))
            for _ in range(engines if rank == 0 else 0)
        ]
        options = wsync.Options(progress=False)
        sync = stack.enter_context(wsync.connect(layout, consumers, options=options))
        for consumer in consumers:
            consumer.clear()
        sync.update()
        verified = all(consumer.digest() == expected for consumer in consumers)
        seconds = _median([sync.update])[0]
        return seconds, verified and all(c.digest() == expected for c in consumers)


def beside_slime(rank: int, shapes: Shapes, kind: Any) -> tuple[float, float, bool]:
    """Median seconds of wsync and of the peers' way in turns, and whether both were right."""
    weights = values(shapes)
    expected, verified = digest(weights), True
    options = wsync.Options(progress=False)
    with (
        Consumer(described(shapes), kind) as consumer,
        wsync.connect(weights, [consumer], options=options) as sync,
    ):
        ways: list[Callable[[], object]] = [
            sync.update,
            lambda: peers.send(weights.items(), kind, consumer.take),
        ]
        for way in ways:
            consumer.clear()
            way()
            verified = verified and consumer.digest() == expected
        ours, theirs = _median(ways)
    return ours, theirs, verified


def _median(ways: list[Callable[[], object]]) -> list[float]:
    """Median seconds of each way, in turns; all ranks start and end together."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(REPEATS):
        for way, seconds in zip(ways, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]
