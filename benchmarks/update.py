"""`update`: replace every weight of an engine process, Qwen3-0.6B shapes in bfloat16.

From one trainer process, and from a real TP2 x PP2 Megatron trainer over gloo, into an engine with
wsync's receiver and into a stock one, which has only SGLang's code.  The peers' way and wsync take
turns in the same processes, on the same weights; see benchmarks/README.md.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

import wsync
from benchmarks import peers
from benchmarks.bucket import bucket_class
from benchmarks.consumer import Consumer, digest

REPEATS = 5
STOCK = wsync.Options(delivery="stock")
DIRECT = wsync.Options(delivery="direct")

# what each way is called: torch's threads on both sides, and one update
Ways = dict[str, tuple[int, Callable[[], object]]]


def run(*, direct: bool = False, layers: int = 0) -> Iterator[dict[str, Any]]:
    """direct: only the rows of direct delivery, with less memory; layers: so many instead of 28."""
    from benchmarks import sharded

    if direct:
        yield from one_process_direct(layers)
        yield from sharded.sharded_direct(layers)
    else:
        yield from one_process(layers)
        yield from sharded.sharded(layers)


def qwen3_config(layers: int = 0) -> Any:
    """Qwen3-0.6B: 310 tensors, 596 million parameters, tied embeddings.  layers: fewer of them, for
    a rehearsal, with a small vocabulary."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=1024 if layers else 151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers or 28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


def qwen3_weights(seed: int, layers: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of those shapes under Hugging Face names."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3_config(layers))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-30000, 30000, p.shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, p in model.named_parameters()
    }


def one_process(layers: int) -> Iterator[dict[str, Any]]:
    """One trainer process with plain tensors, one engine process."""
    peer, peer_class = bucket_class()
    weights = qwen3_weights(1, layers)
    nbytes = size(weights)
    consumer = consumer_of(weights, peer_class)
    stock = peers.StockEngine("consumer", 1, consumer.take)
    try:
        with (
            wsync.connect(weights, engines=[consumer]) as sync,
            wsync.connect(weights, engines=[stock], options=STOCK) as stock_sync,
        ):
            ways: Ways = {
                **slime(lambda: peers.send(weights.items(), peer_class, consumer.take)),
                "wsync": (1, sync.update),
                "wsync, stock": (1, stock_sync.update),
                "memcpy": (1, memcpy(nbytes)),
            }
            seconds, verified = compare(ways, consumer, digest(weights), REPEATS)
            verified = verified and verify(sync, seconds)
        lent, agreed = directly(weights, consumer, peer_class)
    finally:
        consumer.close()
    case = functools.partial(row, nbytes=nbytes, seconds=seconds, verified=verified)
    for name in seconds:
        if name.startswith("slime's loop"):
            yield case("one process", "wsync", name, f"{name}, {peer}")
            yield case("one process, stock engine", "wsync, stock", name, f"{name}, {peer}")
    yield case("one process", "wsync", "memcpy", "one memcpy")
    yield case("one process, Sync.verify", "verify", "wsync", "the update")
    yield from direct_rows("one process", peer, nbytes=nbytes, seconds=lent, verified=agreed)


def one_process_direct(layers: int) -> Iterator[dict[str, Any]]:
    """The rows of direct delivery of `one_process` alone."""
    peer, peer_class = bucket_class()
    weights = qwen3_weights(1, layers)
    consumer = consumer_of(weights, peer_class)
    try:
        seconds, verified = directly(weights, consumer, peer_class)
    finally:
        consumer.close()
    found = {"nbytes": size(weights), "seconds": seconds, "verified": verified}
    yield from direct_rows("one process", peer, **found)


def directly(
    weights: dict[str, torch.Tensor], consumer: Consumer, bucket: Any
) -> tuple[dict[str, float], bool]:
    """As `compare`, of the weights in memory that the engine reads, to which they are moved."""
    share(weights.values())
    with wsync.connect(weights, engines=[consumer], options=DIRECT) as direct:
        ways: Ways = {
            **slime(lambda: peers.send(weights.items(), bucket, consumer.take), most=1),
            "wsync": (1, direct.update),
            "memcpy": (1, memcpy(size(weights))),
        }
        seconds, verified = compare(ways, consumer, digest(weights), REPEATS)
        return seconds, verified and verify(direct, seconds)


def verify(sync: wsync.Sync, seconds: dict[str, float]) -> bool:
    """Whether all verifications agree; adds their median seconds."""
    found = [sync.verify() for _ in range(REPEATS)]
    seconds["verify"] = statistics.median(each.seconds for each in found)
    return all(found)


def size(weights: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in weights.values())


def consumer_of(weights: dict[str, torch.Tensor], bucket: Any) -> Consumer:
    """An engine process for these tensors."""
    return Consumer({name: (tuple(t.shape), t.dtype) for name, t in weights.items()}, bucket)


def direct_rows(case: str, peer: str, **found: Any) -> Iterator[dict[str, Any]]:
    """The rows of a direct update beside slime's loop and a memcpy; found: as `row` takes it."""
    for name in found["seconds"]:
        if name == "verify":
            yield row(f"{case}, direct, Sync.verify", name, "wsync", "the update", **found)
        elif name != "wsync":
            whose = "one memcpy" if name == "memcpy" else f"{name}, {peer}"
            yield row(f"{case}, direct", "wsync", name, whose, **found)


def share(tensors: Iterable[torch.Tensor]) -> None:
    """Moves tensors to memory that an engine's process can map."""
    for tensor in tensors:
        tensor.untyped_storage().share_memory_()


def slime(loop: Callable[[], object], most: int = peers.DEFAULT_THREADS) -> Ways:
    """The peers' way with one thread of torch's, and with as many as torch uses by default."""
    counts = sorted({1, most})
    return {f"slime's loop, torch threads {count}": (count, loop) for count in counts}


def compare(
    ways: Ways,
    consumer: Any,
    expected: str,
    repeats: int,
    together: Callable[[], object] = lambda: None,
    *,
    beside: Collection[str] = ("memcpy",),
    once: Collection[str] = (),
) -> tuple[dict[str, float], bool]:
    """Median seconds of each way, in turns; the updates are verified on cleared parameters, and
    once more at the end.

    together: returns when all trainer ranks have called it.  consumer: None but on rank 0.
    beside: ways that do not update it.  once: ways that are timed once.
    """
    verified = True
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, (threads, way) in ways.items():
            if repeat > 1 and name in once:
                continue
            torch.set_num_threads(threads)
            if consumer is not None:
                consumer.set_threads(threads)
                if not repeat:
                    consumer.clear()
            together()
            start = time.perf_counter()
            way()
            together()
            if repeat:
                times[name].append(time.perf_counter() - start)
            elif consumer is not None and name not in beside:
                verified = verified and consumer.digest() == expected
    if consumer is not None:
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
    case: str,
    way: str,
    other: str,
    peer: str,
    *,
    nbytes: int,
    seconds: dict[str, float],
    verified: bool,
) -> dict[str, Any]:
    """`way` of these seconds against the `other`, which is called `peer`."""
    return {
        "benchmark": "update",
        "case": case,
        "bytes": nbytes,
        "seconds": seconds[way],
        "peer": peer,
        "peer_seconds": seconds[other],
        "ratio": seconds[other] / seconds[way],
        "verified": verified,
    }
