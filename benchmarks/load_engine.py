"""Run as a script by benchmarks.load: SGLang's load_weights and its replay, in one process.

python load_engine.py TREE PACKAGES
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, sys.argv[2])
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

import torch
from support import sglang_host, tiny_models

from wsync._core import Layout, LayoutBuilder, Memory, host
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import Receipt, RingManifest
from wsync.module_tensors import flat_bytes
from wsync.module_tensors.held import bound_tensors
from wsync.probing.lines import raw

# as many tensors as Qwen3-30B-A3B, each of a few hundred bytes
SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 48, "num_attention_heads": 2, "head_dim": 8},
    **{"num_key_value_heads": 1, "num_experts": 128, "moe_intermediate_size": 8},
    **{"intermediate_size": 16, "vocab_size": 64},
}
LOADS, REPLAYS = 3, 15


def ring_of(tensors: dict[str, torch.Tensor]) -> tuple[Memory, Layout]:
    """A ring that holds all tensors as round 0."""
    builder, offset = LayoutBuilder(), 0
    places: dict[str, int] = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        zeros, shape = [0] * tensor.dim(), list(tensor.shape)
        builder.add_shard(name, dtype, shape, zeros, shape, 0, offset, strides)
        places[name] = offset
        offset += -(-tensor.nbytes // 64) * 64
    ring = Memory(offset)
    for name, tensor in tensors.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        memoryview(ring)[places[name] : places[name] + len(data)] = data
    return ring, builder.build()


def held(model: torch.nn.Module) -> list[bytes]:
    return [flat_bytes(tensor).numpy().tobytes() for *_, tensor in bound_tensors(model)]


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median seconds after one run that is not counted."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    sglang_host.load(Path(sys.argv[1]))
    sglang_host.host(tp=1, ep=1, rank=0)
    config = tiny_models.config("qwen3_moe", **SIZES)
    tensors = tiny_models.tensors(tiny_models.checkpoint("qwen3_moe", config), 1)
    model = sglang_host.build("qwen3_moe", config)
    ring, manifest = ring_of(tensors)
    views = RingManifest(ring, manifest).views(0, host())
    peer = timed(lambda: model.load_weights(views), LOADS)
    wanted = held(model)
    loader = RecordedLoader(model)
    start = time.perf_counter()
    loader.learn(manifest)
    learning = time.perf_counter() - start
    loader.attach(ring, manifest)

    def replay() -> Receipt:
        loader.begin(1)
        loader.load(0)
        return loader.finish(60.0)

    def audited() -> int:
        """Nanoseconds of an update's audit."""
        receipt = replay()
        loader.confirm()
        return receipt.audit_ns

    for path, *_, tensor in bound_tensors(model):
        if path.endswith("weight"):
            raw(tensor).bitwise_not_()
    seconds = timed(replay, REPLAYS)
    audits = [1e-9 * audited() for _ in range(REPLAYS)][1:]
    result = {"seconds": seconds, "peer_seconds": peer, "learning": learning}
    result |= {"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors.values())}
    result |= {"audit": statistics.median(audits), "longest_audit": max(audits)}
    result |= {"reason": loader.reason, "verified": held(model) == wanted and not loader.reason}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
