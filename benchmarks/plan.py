"""`plan`: what one rank spends on the plan of a large model, in a process of its own.

Nothing is moved: layouts are built, sent through their wire format as at connect, merged and
planned for one rank.  See benchmarks/README.md for the fields and the checks.
"""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.plan_shapes import (
    ITEM_NBYTES,
    Engine,
    Trainer,
    Weight,
    engine_layouts,
    kimi_k2,
    local_nbytes,
    qwen3_moe,
    trainer_layouts,
)
from wsync import _core
from wsync.trainer.planning import whole

T = TypeVar("T")
RANKS_PER_HOST = 8
RANK = 5
ROUND_NBYTES = 32 << 20
GOAL_SECONDS = 2.0


@dataclass(frozen=True)
class Case:
    """Workers of equal engines, one on each trainer rank; `full` gives each the whole model."""

    name: str
    weights: Callable[[], list[Weight]]
    trainer: Trainer
    engine: Engine
    full: bool = False
    round_nbytes: int = 0


_QWEN = Trainer(tp=4, pp=2, ep=8, ranks=32)
_KIMI = Trainer(tp=8, pp=8, ep=32, ranks=512)
CASES = (
    Case("Qwen3-30B-A3B, 32 ranks, needed", qwen3_moe, _QWEN, Engine(8, 8)),
    Case("Qwen3-30B-A3B, 32 ranks, full", qwen3_moe, _QWEN, Engine(8, 8), full=True),
    Case("Kimi-K2, 512 ranks, EP16, needed", kimi_k2, _KIMI, Engine(16, 16)),
    Case("Kimi-K2, EP16, needed, 256 MiB", kimi_k2, _KIMI, Engine(16, 16), round_nbytes=256 << 20),
    Case("Kimi-K2, 512 ranks, TP64, needed", kimi_k2, _KIMI, Engine(64, 1)),
    Case("Kimi-K2, 512 ranks, full", kimi_k2, _KIMI, Engine(16, 16), full=True),
)


def run() -> Iterator[dict[str, Any]]:
    for number in range(len(CASES)):
        command = [sys.executable, "-m", "benchmarks.plan", str(number)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
        yield json.loads(done.stdout)


class Steps(dict[str, float]):
    """Seconds of the steps around a plan, by name."""

    def run(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self[name] = time.perf_counter() - start
        return result


def measure(case: Case) -> dict[str, Any]:
    """One row; seconds and peak are those of the plan alone, steps those around it."""
    weights, steps = case.weights(), Steps()
    source = connect(case, weights, steps)
    destinations, sizes = kept_by(case, weights, source, steps)
    ranks = range(case.trainer.ranks)
    plan, seconds, peak = timed(
        lambda: _core.Plan(
            source,
            destinations,
            [(rank % len(destinations), rank) for rank in ranks],
            [rank // RANKS_PER_HOST for rank in ranks],
            RANK,
            round_nbytes=case.round_nbytes,
        )
    )
    manifest = steps.run("manifest", lambda: plan.manifest(RANK))
    text = steps.run("encode manifest", manifest.to_bytes)
    received = steps.run("parse manifest", lambda: _core.Layout.from_bytes(text))
    if not case.full:
        kept = destinations[RANK % len(destinations)][0]
        steps.run("route", lambda: _core.Route(received, kept))
    local = local_nbytes(weights, case.trainer, None if case.full else case.engine)
    slots = [plan.slot(RANK, k)[1] for k in range(plan.round_count)]
    return {
        "benchmark": "plan",
        "case": case.name,
        "bytes": sum(sizes) * len(ranks) // len(sizes),
        "seconds": seconds,
        "peer": f"none; the goal of {GOAL_SECONDS:g} s",
        "peer_seconds": GOAL_SECONDS,
        "ratio": GOAL_SECONDS / seconds,
        "verified": verify(plan, sizes, len(ranks), local),
        "peak_nbytes": peak,
        "rounds": plan.round_count,
        "fill": sum(slots) / (plan.round_count * (case.round_nbytes or ROUND_NBYTES)),
        "source_shards": source.shard_count,
        "wanted_boxes": sum(layout.shard_count for layout, _ in destinations),
        "manifest_nbytes": len(text),
        "steps": steps,
    }


def connect(case: Case, weights: list[Weight], steps: Steps) -> _core.Layout:
    """The trainer's layout, as every rank makes it of what all ranks sent."""
    mine = trainer_layouts(weights, case.trainer)
    steps.run("encode own layout", mine[RANK].to_bytes)
    blobs = [layout.to_bytes() for layout in mine]
    parsed = steps.run("parse all layouts", lambda: [_core.Layout.from_bytes(b) for b in blobs])
    return steps.run("merge", lambda: _core.Layout.merge(parsed))


def kept_by(
    case: Case, weights: list[Weight], source: _core.Layout, steps: Steps
) -> tuple[list[tuple[_core.Layout, bool]], list[int]]:
    """The distinct destinations, and the bytes of each as the shapes say."""
    if case.full:
        model = steps.run("destinations", lambda: whole(source, range(source.tensor_count)))
        return [(model, True)], [sum(math.prod(w.shape) * ITEM_NBYTES for w in weights)]
    layouts, sizes = engine_layouts(weights, case.engine)
    texts = [layout.to_bytes() for layout in layouts]
    layouts.clear()
    parsed = steps.run("destinations", lambda: [_core.Layout.from_bytes(t) for t in texts])
    return [(layout, False) for layout in parsed], sizes


def timed(work: Callable[[], T]) -> tuple[T, float, int]:
    """The result, wall seconds, and by how much resident memory rose at its highest."""
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak starts again from what is resident now
    before = _status("VmRSS")
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, seconds, _status("VmHWM") - before


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def verify(plan: _core.Plan, sizes: list[int], ranks: int, local: int) -> bool:
    """Counts that come from the shapes alone: over all ranks, and of this rank's own copies."""
    total = sum(sizes) * ranks // len(sizes)
    stats = plan.stats
    written = sum(
        copy[4] * math.prod(copy[6]) * ITEM_NBYTES
        for k in range(plan.round_count)
        for phase in (_core.LOCAL, _core.UNPACK)
        for copy in plan.copies(k, phase)
    )
    manifest = plan.manifest(RANK)
    listed = sum(
        math.prod(shard[4]) * ITEM_NBYTES
        for tensor in range(manifest.tensor_count)
        for shard in manifest.shards(tensor)
    )
    return (
        stats["delivered_nbytes"] == stats["needed_nbytes"] == total
        and stats["sent_nbytes"] == total - local
        and written == listed == sizes[RANK % len(sizes)]
    )


if __name__ == "__main__":
    json.dump(measure(CASES[int(sys.argv[1])]), sys.stdout)
