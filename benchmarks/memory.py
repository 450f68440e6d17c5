"""`memory`: what an update needs beside the weights, process by process.

Every process's proportional set size (Pss: a page that n processes map counts 1/n in each) is
read from /proc/PID/smaps_rollup all through a first and a second update.  What counts is by how
much more it rises at its highest than over updates that move nothing, in processes of the same
kind.  A ring counts whole in the trainer until the engine maps it, and half in each from then on.
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
_SAMPLE_SECONDS = 0.01

Shapes = dict[str, Shape]


def run() -> Iterator[dict[str, Any]]:
    shapes, nothing = shapes_of(TENSORS, NBYTES), shapes_of(1, 1)
    name, kind = bucket_class()
    peer, base = on_ranks(1, slime, shapes, kind), on_ranks(1, slime, nothing, kind)
    peer["rises"] = above(peer["rises"], base["rises"])
    for ranks, exchange in ((1, "auto"), (4, "shared"), (4, "gloo")):
        facts = on_ranks(ranks, update, ranks, exchange, shapes)
        base = on_ranks(ranks, update, ranks, exchange, nothing)
        facts["rises"] = above(facts["rises"], base["rises"])
        title = f"{ranks} trainer ranks, {exchange} exchange" if ranks > 1 else "one process"
        yield row(title, shapes, facts, peer, f"slime's loop of one process, {name}")


def row(
    title: str, shapes: Shapes, facts: dict[str, Any], peer: dict[str, Any], whose: str
) -> dict[str, Any]:
    *trainers, engine = facts["rises"]
    bucket, staging = max(facts["ring_nbytes"]), facts["staging_nbytes"]
    met = max(trainers) <= GOAL * 2 * bucket and engine <= GOAL * bucket
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
            f"MB: trainer ranks {_mb(*trainers)}, engine {_mb(engine)}; ring {_mb(bucket)}, "
            f"staging {_mb(*staging)}; peer: trainer and engine {_mb(*peer['rises'])}; "
            f"goal {'met' if met else 'MISSED'}"
        ),
        "trainer_nbytes": trainers,
        "engine_nbytes": engine,
        "bucket_nbytes": bucket,
        "staging_nbytes": staging,
        "peer_nbytes": peer["rises"],
        "goal_met": met,
    }


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
        "rises": [peaks[0] for peaks, _, _ in everyone] + everyone[0][0][1:],
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
            send()
        verified = consumer.digest() == expected
        return {"rises": rises.peaks, "seconds": _median(send), "verified": verified}


class Rises:
    """By how much the Pss of this process, and of others, rises within the block at its highest."""

    def __init__(self, others: list[int]) -> None:
        self._pids = [os.getpid(), *others]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peaks: list[int] = []

    def __enter__(self) -> Rises:
        # what the allocator keeps of earlier work would hide what comes
        ctypes.CDLL(None).malloc_trim(0)
        self._before = [pss(pid) for pid in self._pids]
        self.peaks = [0] * len(self._pids)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._note()
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._note()

    def _note(self) -> None:
        rises = [pss(pid) - b for pid, b in zip(self._pids, self._before, strict=True)]
        self.peaks = [max(pair) for pair in zip(self.peaks, rises, strict=True)]


def pss(pid: int) -> int:
    """Bytes."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


def above(rises: list[int], base: list[int]) -> list[int]:
    return [a - b for a, b in zip(rises, base, strict=True)]


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _mb(*sizes: int) -> str:
    return " ".join(f"{nbytes / 1e6:.0f}" for nbytes in sizes)
