"""`bucket`: fill a warm bucket from many tensors, bfloat16.

wsync.FlattenedTensorBucket(named_tensors, out=...) against one memcpy of the same bytes, and
against SGLang's FlattenedTensorBucket, which allocates anew each time.  See benchmarks/README.md.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import wsync

REPEATS = 21
SLOW_REPEATS = 4
TOTAL_NBYTES = 256 << 20
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}

Shapes = dict[str, tuple[int, ...]]


def run() -> Iterator[dict[str, Any]]:
    for label, nbytes in SIZES.items():
        count = TOTAL_NBYTES // nbytes
        yield from case(
            f"{count} tensors of {label}", {f"t{i}": (nbytes // 2,) for i in range(count)}
        )
    yield from case("Qwen3-0.6B", qwen3_shapes())


def bucket_class() -> tuple[str, Any]:
    """(what it is, class) of the peers' bucket."""
    from benchmarks import sglang_bucket

    return sglang_bucket.ORIGIN, sglang_bucket.FlattenedTensorBucket


def qwen3_shapes() -> Shapes:
    """The 310 tensors of Qwen3-0.6B, 596 million elements; its embeddings are tied."""
    layer: Shapes = {
        "input_layernorm": (1024,),
        "self_attn.q_proj": (2048, 1024),
        "self_attn.k_proj": (1024, 1024),
        "self_attn.v_proj": (1024, 1024),
        "self_attn.o_proj": (1024, 2048),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "post_attention_layernorm": (1024,),
        "mlp.gate_proj": (3072, 1024),
        "mlp.up_proj": (3072, 1024),
        "mlp.down_proj": (1024, 3072),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (151936, 1024)}
    for index in range(28):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (1024,)}


def case(label: str, shapes: Shapes) -> Iterator[dict[str, Any]]:
    """Two rows: against memcpy, against the peers' bucket."""
    peer, peer_class = bucket_class()
    block, named = _weights(shapes)
    expected = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named])
    warm = torch.empty(expected.numel(), dtype=torch.uint8)

    def fill() -> torch.Tensor:
        return wsync.FlattenedTensorBucket(named, out=warm).flattened_tensor

    peers: dict[str, tuple[int, Callable[[], torch.Tensor]]] = {
        "one memcpy": (REPEATS, lambda: _memcpy(warm, block)),
        peer: (SLOW_REPEATS, lambda: peer_class(named_tensors=named).flattened_tensor),
    }
    for name, (repeats, way) in peers.items():
        verified = True
        for each in (fill, way):
            warm.fill_(0xA5)
            wanted = block if name == "one memcpy" and each is way else expected
            verified = verified and torch.equal(each(), wanted)
        seconds, peer_seconds = _alternate(fill, way, repeats)
        yield {
            "benchmark": "bucket",
            "case": label,
            "bytes": expected.numel(),
            "seconds": seconds,
            "peer": name,
            "peer_seconds": peer_seconds,
            "ratio": peer_seconds / seconds,
            "verified": verified,
        }


def _alternate(
    first: Callable[[], object], second: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Median seconds of each.  Who begins changes from turn to turn, because each finds the caches
    as the other left them."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        order = ((first, times[0]), (second, times[1]))
        for way, seconds in order if turn % 2 else order[::-1]:
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def _weights(shapes: Shapes) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """One block of bytes, and tensors that lie in it in another order than they are named.

    All ways read the same memory: where that lies in the machine matters by a tenth."""
    sizes = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(1)
    block = torch.randint(0, 256, (sum(sizes.values()),), dtype=torch.uint8, generator=generator)
    order = list(shapes)
    random.Random(1).shuffle(order)
    ends = itertools.accumulate(sizes[name] for name in order)
    starts = {name: end - sizes[name] for name, end in zip(order, ends, strict=True)}
    return block, [
        (name, block[starts[name] :][: sizes[name]].view(torch.bfloat16).view(shape))
        for name, shape in shapes.items()
    ]


def _memcpy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    return target
