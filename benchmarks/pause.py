"""`pause`: how long an engine does not generate during an update, Qwen3-0.6B shapes in bfloat16.

One trainer process and one engine process.  wsync's figure is `Report.paused`: from the request to
pause until the engine generates again.  The peers' way pauses the engine for the whole update.  The
floor is one memcpy of the weights, which the engine cannot do without.  `pause_serving` adds
engines that answer requests meanwhile, in each pause mode.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import wsync
from benchmarks import pause_serving, peers
from benchmarks.bucket import bucket_class, qwen3_shapes
from benchmarks.consumer import Consumer, digest

REPEATS = 9
WAYS: dict[str, dict[str, Any]] = {
    "same host, in place": {"delivery": "wsync", "stage": "off"},
    "same host, staged": {"delivery": "wsync", "stage": "on"},
    "as if remote, in place": {"delivery": "distributed", "stage": "off"},
    "as if remote, staged": {"delivery": "distributed"},
}


def run() -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randint(-99, 99, shape, generator=generator, dtype=torch.int16).view(
            torch.bfloat16
        )
        for name, shape in qwen3_shapes().items()
    }
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    peer, kind = bucket_class()
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    with Consumer(shapes, kind) as engine:
        send = functools.partial(peers.send, [*weights.items()], kind, engine.take)
        engine.clear()
        send()
        right = engine.digest() == digest(weights)
        floor = _memcpy(nbytes)
        for case, given in WAYS.items():
            options = wsync.Options(progress=False, **given)
            with wsync.connect(weights, [engine], options=options) as sync:
                sync.update()
                engine.clear()
                sync.update()
                verified = right and engine.digest() == digest(weights)
                found, others = [], []
                for _ in range(REPEATS):
                    found.append(sync.update())
                    start = time.perf_counter()
                    send()
                    others.append(time.perf_counter() - start)
            paused = statistics.median(report.paused[engine.name] for report in found)
            whole = statistics.median(report.seconds for report in found)
            for name, seconds in (
                (f"slime's loop, {peer}", statistics.median(others)),
                ("one memcpy; the floor", floor),
            ):
                yield {
                    "benchmark": "pause",
                    "case": case,
                    "bytes": nbytes,
                    "seconds": paused,
                    "peer": name,
                    "peer_seconds": seconds,
                    "ratio": seconds / paused,
                    "verified": verified,
                    "figure": f"the whole update {whole:.3f} s",
                }
    yield from pause_serving.run()


def _memcpy(nbytes: int) -> float:
    """Median seconds of copying so many bytes between warm memory."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8).fill_(k) for k in (1, 2))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
