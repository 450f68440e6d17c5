"""`update`: replace every weight of an engine process, Qwen3-0.6B shapes in bfloat16.

From one trainer process, and from a real TP2 x PP2 Megatron trainer over gloo.  The peers' way
and wsync take turns in the same processes, on the same weights; see benchmarks/README.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import wsync
from benchmarks import peers
from benchmarks.bucket import bucket_class
from benchmarks.consumer import Consumer, digest

REPEATS = 5


def run() -> Iterator[dict[str, Any]]:
    yield from one_process()
    from benchmarks.sharded import sharded

    yield from sharded()


def qwen3_config() -> Any:
    """Qwen3-0.6B: 310 tensors, 596 million parameters, tied embeddings."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


def qwen3_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of those shapes under Hugging Face names."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3_config())
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-30000, 30000, p.shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, p in model.named_parameters()
    }


def one_process() -> Iterator[dict[str, Any]]:
    """One trainer process with plain tensors, one engine process."""
    peer, peer_class = bucket_class()
    weights = qwen3_weights(1)
    nbytes = sum(t.numel() * t.itemsize for t in weights.values())
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    consumer = Consumer(shapes, peer_class)
    try:
        with wsync.connect(weights, engines=[consumer]) as sync:
            ways: dict[str, Callable[[], object]] = {
                "peer": lambda: peers.send(weights.items(), peer_class, consumer.take),
                "wsync": sync.update,
                "memcpy": memcpy(nbytes),
            }
            seconds, verified = compare(ways, consumer, digest(weights))
    finally:
        consumer.close()
    yield row("one process", nbytes, seconds, f"slime's loop, {peer}", verified)
    seconds["peer"] = seconds["memcpy"]
    yield row("one process", nbytes, seconds, "one memcpy", verified)


def compare(
    ways: dict[str, Callable[[], object]], consumer: Consumer, expected: str
) -> tuple[dict[str, float], bool]:
    """Median seconds of each way, in turns; the updates are verified on cleared parameters."""
    verified = True
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name in ("peer", "wsync"):
        consumer.clear()
        ways[name]()
        verified = verified and consumer.digest() == expected
    for _ in range(REPEATS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    verified = verified and consumer.digest() == expected
    return {name: statistics.median(values) for name, values in times.items()}, verified


def memcpy(nbytes: int) -> Callable[[], object]:
    """One memcpy of as many bytes between warm, contiguous buffers."""
    source = torch.ones(nbytes, dtype=torch.uint8).numpy()
    target = torch.zeros(nbytes, dtype=torch.uint8).numpy()

    def copy() -> None:
        target[:] = source

    return copy


def row(
    case: str, nbytes: int, seconds: dict[str, float], peer: str, verified: bool
) -> dict[str, Any]:
    return {
        "benchmark": "update",
        "case": case,
        "bytes": nbytes,
        "seconds": seconds["wsync"],
        "peer": peer,
        "peer_seconds": seconds["peer"],
        "ratio": seconds["peer"] / seconds["wsync"],
        "verified": verified,
    }
