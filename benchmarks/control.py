"""`control`: what rounds and updates cost when nearly nothing is moved; `fixed_costs` has the part
of it that is the processor's, with as many tensors as a large model.

One trainer process, one engine process; one tensor that is cut into rounds of 4 KiB.  The
figure is the slope between a few and many rounds, so that what an update costs beside its rounds
does not count.  The peers' way has no rounds: its unit is a bucket, of one tensor of 4 KiB here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import wsync
from benchmarks import fixed_costs, peers
from benchmarks.bucket import bucket_class
from benchmarks.consumer import Consumer, digest

ROUND_NBYTES = 4096
FEW, MANY = 256, 8192
REPEATS = 9
GOAL = 50e-6
PEER_BUCKETS = 256


def run() -> Iterator[dict[str, Any]]:
    peer, peer_seconds = peer_bucket()
    for label, slots in (("the default ring", 0), ("a ring of 64 slots", 64)):
        few, few_good, _ = updates(FEW, slots)
        many, many_good, rounds = updates(MANY, slots)
        seconds = (many - few) / (MANY - FEW)
        verified = few_good and many_good and rounds == MANY
        for whose, other in ((f"one bucket, {peer}", peer_seconds), ("none; the goal", GOAL)):
            yield {
                "benchmark": "control",
                "case": f"a round, {label}",
                "bytes": ROUND_NBYTES,
                "seconds": seconds,
                "peer": whose,
                "peer_seconds": other,
                "ratio": other / seconds,
                "verified": verified,
                "figure": f"{1e6 * seconds:.1f} us a round, {1e6 * other:.0f} us",
                "microseconds": 1e6 * seconds,
                "update_seconds": {str(FEW): few, str(MANY): many},
            }
    yield from fixed_costs.run()


def updates(rounds: int, slots: int) -> tuple[float, bool, int]:
    """Median seconds of an update of so many rounds, whether it was right, its rounds."""
    weights = {"large": _values(rounds * ROUND_NBYTES)}
    options = wsync.Options(
        round_nbytes=ROUND_NBYTES, ring_nbytes=slots * ROUND_NBYTES, progress=False
    )
    with (
        Consumer({name: (tuple(t.shape), t.dtype) for name, t in weights.items()}) as consumer,
        wsync.connect(weights, engines=[consumer], options=options) as sync,
    ):
        consumer.clear()
        report = sync.update()
        verified = consumer.digest() == digest(weights)
        seconds = _median(sync.update, REPEATS)
        return seconds, verified and consumer.digest() == digest(weights), report.rounds


def peer_bucket() -> tuple[str, float]:
    """Whose buckets, and median seconds of one."""
    name, kind = bucket_class()
    named = [("large", _values(ROUND_NBYTES))]
    with Consumer({"large": (tuple(named[0][1].shape), torch.uint8)}, kind) as consumer:
        consumer.clear()
        seconds = _median(lambda: peers.send(named, kind, consumer.take), PEER_BUCKETS)
        if consumer.digest() != digest(dict(named)):
            raise RuntimeError("the peers' bucket arrived with other bytes")
    return name, seconds


def _median(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _values(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
