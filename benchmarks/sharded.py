"""The TP2 x PP2 case of `update`: a real Megatron model in four processes over gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import on_ranks

RANKS = 4
REPEATS = 3


def sharded() -> Iterator[dict[str, Any]]:
    """Rows of the case; rank 0 of the trainer reports them."""
    yield from on_ranks(RANKS, _rank)


def _rank(rank: int) -> list[dict[str, Any]]:
    from benchmarks.update import qwen3_config
    from wsync.demo import megatron_cpu

    parallel = megatron_cpu.Parallel(tp=2, pp=2)
    with megatron_cpu.on_cpu(), megatron_cpu.groups(parallel):
        config = qwen3_config()
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        return _measure(rank, trainer.chunks, config)


def _measure(rank: int, chunks: list[torch.nn.Module], config: Any) -> list[dict[str, Any]]:
    import wsync
    from benchmarks import peers, update
    from benchmarks.bucket import bucket_class
    from benchmarks.consumer import Consumer, digest
    from wsync.demo import reference

    peer, peer_class = bucket_class()
    expected = reference.hf_state_dict(chunks, config)
    expected_digest = digest(expected)
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in expected.items()}
    nbytes = sum(t.numel() * t.itemsize for t in expected.values())
    del expected
    consumer = Consumer(shapes, peer_class) if rank == 0 else None
    gather = peers.Gather(chunks, config)

    def slime() -> None:
        if consumer is not None:
            peers.send(gather.named_tensors(), peer_class, consumer.take)
        else:
            for _ in gather.named_tensors():
                pass

    rows = []
    try:
        for exchange in ("shared", "gloo"):
            options = wsync.Options(exchange=exchange)
            engines = [consumer] if consumer is not None else []
            layout = wsync.megatron.layout(chunks, config)
            with wsync.connect(layout, engines, options=options) as sync:
                ways: dict[str, Callable[[], object]] = {"peer": slime, "wsync": sync.update}
                seconds, verified = _compare(ways, consumer, expected_digest)
            case = f"TP2 x PP2, {exchange} exchange"
            rows.append(update.row(case, nbytes, seconds, f"slime's loop, {peer}", verified))
    finally:
        if consumer is not None:
            consumer.close()
    return rows


def _compare(
    ways: dict[str, Callable[[], object]], consumer: Any, expected: str
) -> tuple[dict[str, float], bool]:
    """As `update.compare`, with all ranks starting and ending together."""
    verified = True
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            if consumer is not None and repeat == 0:
                consumer.clear()
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            if repeat:
                times[name].append(time.perf_counter() - start)
            elif consumer is not None:
                verified = verified and consumer.digest() == expected
    return {name: statistics.median(values) for name, values in times.items()}, verified
