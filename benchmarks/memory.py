"""`memory`: what an update needs beside the weights, process by process.

Every process's proportional set size (Pss: a page that n processes map counts 1/n in each) is
read from /proc/PID/smaps_rollup all through a first and a second update, without files on disk:
who else runs a library is no matter of updates.  What counts is by how much more it rises at its
highest than over updates that move nothing, in processes of the same kind.

The limits are what a process is said to hold.  In the second update a ring counts half in the
trainer and half in the engine; staging that all ranks of a host map counts in equal parts.  In the
first they count whole in their owner until the others have mapped them.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
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

NBYTES = 384 << 20
TENSORS = 300
REPEATS = 3
GOAL = 1.05
SLACK_NBYTES = 8 << 20  # per process: stacks, and what allocators keep
_SAMPLE_SECONDS = 0.01

Shapes = dict[str, Shape]


def run() -> Iterator[dict[str, Any]]:
    shapes, nothing = shapes_of(TENSORS, NBYTES), shapes_of(1, 1)
    name, kind = bucket_class()
    peer, base = on_ranks(1, slime, shapes, kind), on_ranks(1, slime, nothing, kind)
    peer["rises"] = [max(pair) for pair in zip(*above(peer["rises"], base["rises"]), strict=True)]
    for ranks, exchange in ((1, "auto"), (4, "shared"), (4, "gloo")):
        facts = on_ranks(ranks, update, ranks, exchange, shapes)
        base = on_ranks(ranks, update, ranks, exchange, nothing)
        facts["rises"] = above(facts["rises"], base["rises"])
        title = f"{ranks} trainer ranks, {exchange} exchange" if ranks > 1 else "one process"
        yield row(title, shapes, facts, peer, f"slime's loop of one process, {name}")


def row(
    title: str, shapes: Shapes, facts: dict[str, Any], peer: dict[str, Any], whose: str
) -> dict[str, Any]:
    first, second = facts["rises"]
    rings, staging = facts["ring_nbytes"], facts["staging_nbytes"]
    allowed = limits(rings, staging, facts["exchange"])
    met = all(
        rise <= GOAL * limit + SLACK_NBYTES
        for rises, most in zip(facts["rises"], allowed, strict=True)
        for rise, limit in zip(rises, most, strict=True)
    )
    return {
        "benchmark": "memory",
        "case": title,
        "bytes": nbytes_of(shapes),
        "seconds": facts["seconds"],
        "peer": whose,
        "peer_seconds": peer["seconds"],
        "ratio": peer["seconds"] / facts["seconds"],
        "verified": facts["verified"] and peer["verified"],
        "figure": (
            f"MB, trainer ranks and engine: first update {_mb(*first)} (holds {_mb(*allowed[0])}), "
            f"second {_mb(*second)} (holds {_mb(*allowed[1])}); ring {_mb(sum(rings))}, staging "
            f"{_mb(*staging)}; peer: trainer and engine {_mb(*peer['rises'])}; "
            f"goal {'met' if met else 'MISSED'}"
        ),
        "first_nbytes": first,
        "second_nbytes": second,
        "ring_nbytes": rings,
        "staging_nbytes": staging,
        "peer_nbytes": peer["rises"],
        "goal_met": met,
    }


def limits(rings: list[int], staging: list[int], exchange: str) -> list[list[float]]:
    """Bytes that trainer ranks, and the engine that maps their rings, hold in the first update at
    most, and in the second."""
    engine = sum(rings) / 2
    everyones = sum(staging) if exchange == "shared" else 0
    first, second = [], []
    for ring, own in zip(rings, staging, strict=True):
        # what another rank owns counts half here when these two alone have mapped it
        first.append(ring + own + max(everyones - own, 0) / 2)
        second.append(ring / 2 + (everyones / len(rings) if everyones else own))
    return [[*first, engine], [*second, engine]]


def update(rank: int, ranks: int, exchange: str, shapes: Shapes) -> dict[str, Any]:
    """wsync's way; the result is rank 0's."""
    whole = values(shapes)
    layout = trainer_layout(whole, rank, ranks)
    expected = digest(whole) if rank == 0 else ""
    del whole
    consumer = Consumer(described(shapes)) if rank == 0 else None
    options = wsync.Options(exchange=exchange, progress=False)
    try:
        if consumer is not None:
            consumer.clear()
        with Rises([] if consumer is None else consumer.pids) as rises:
            sync = wsync.connect(layout, [consumer] if consumer else [], options=options)
            sync.update()
            rises.split()
            report = sync.update()
        verified = consumer is None or consumer.digest() == expected
        seconds = _median(sync.update)
        sync.close()
    finally:
        if consumer is not None:
            consumer.close()
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (rises.peaks, report.ring_nbytes, report.staging_nbytes))
    return {
        "rises": [
            [peaks[part][0] for peaks, _, _ in everyone] + everyone[0][0][part][1:]
            for part in range(2)
        ],
        "exchange": report.exchange,
        "ring_nbytes": [ring for _, ring, _ in everyone],
        "staging_nbytes": [staging for _, _, staging in everyone],
        "seconds": seconds,
        "verified": verified,
    }


def slime(rank: int, shapes: Shapes, kind: Any) -> dict[str, Any]:
    """The peers' way, from one trainer process."""
    weights = values(shapes)
    expected = digest(weights)
    with Consumer(described(shapes), kind) as consumer:

        def send() -> None:
            peers.send(weights.items(), kind, consumer.take)

        consumer.clear()
        with Rises(consumer.pids) as rises:
            send()
            rises.split()
            send()
        verified = consumer.digest() == expected
        return {"rises": rises.peaks, "seconds": _median(send), "verified": verified}


class Rises:
    """By how much the Pss of this process, and of others, rises within the block at its highest:
    a list for each part that the block is split into."""

    def __init__(self, others: list[int]) -> None:
        self._pids = [os.getpid(), *others]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peaks = [[0] * len(self._pids)]

    def __enter__(self) -> Rises:
        # what the allocator keeps of earlier work would hide what comes
        ctypes.CDLL(None).malloc_trim(0)
        self._before = [pss(pid) for pid in self._pids]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def split(self) -> None:
        """From now on is another part; the rises are still those since the block began."""
        self.peaks.append([0] * len(self._pids))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._note()

    def _note(self) -> None:
        peaks = self.peaks[-1]
        for index, (pid, before) in enumerate(zip(self._pids, self._before, strict=True)):
            peaks[index] = max(peaks[index], pss(pid) - before)


def pss(pid: int) -> int:
    """Bytes of its own and of shared memory."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        parts = [line.split()[1] for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    if len(parts) != 2:
        raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss_Anon and Pss_Shmem")
    return sum(map(int, parts)) * 1024


def above(rises: list[list[int]], base: list[list[int]]) -> list[list[int]]:
    return [[a - b for a, b in zip(*parts, strict=True)] for parts in zip(rises, base, strict=True)]


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _mb(*sizes: float) -> str:
    return " ".join(f"{nbytes / 1e6:.0f}" for nbytes in sizes)
