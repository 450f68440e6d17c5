"""`needed`: the bytes that engine workers are sent, learnt of SGLang's own model classes.

Every worker of a TP8 engine is learnt for itself, at the model's own shapes but few layers; the
others are like those.  Eight trainer ranks then plan the whole model, each beside one worker.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import SGLANG, sglang_path
from wsync import _core
from wsync.trainer.planning import whole

_HERE = Path(__file__).parent
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
GOAL_SECONDS = 2.0


@dataclass(frozen=True)
class Case:
    """layers: how many of the model's are like each one that is learnt."""

    name: str
    family: str
    sizes: dict[str, Any]
    layers: tuple[int, ...]
    engine: dict[str, Any] = field(default_factory=lambda: {"tp": 8, "ep": 8})


# config.json of Qwen/Qwen3-30B-A3B and deepseek-ai/DeepSeek-V3, in bfloat16
_QWEN = {
    **{"hidden_size": 2048, "num_hidden_layers": 1, "vocab_size": 151936, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144},
    **{"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
}
_DEEPSEEK = {
    **{"hidden_size": 7168, "num_hidden_layers": 2, "vocab_size": 129280},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432},
    **{"n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 8},
    **{"n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "q_lora_rank": 1536},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
CASES = (
    Case("Qwen3-30B-A3B, TP8", "qwen3_moe", _QWEN, (48,), {"tp": 8, "ep": 1}),
    Case("Qwen3-30B-A3B, TP8 EP8", "qwen3_moe", _QWEN, (48,)),
    Case("DeepSeek-V3, TP8 EP8", "deepseek_v3", _DEEPSEEK, (3, 58)),
)


def run() -> Iterator[dict[str, Any]]:
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="wsync-benchmark-") as folder:
            yield measure(case, Path(folder), learn(case, folder))


def learn(case: Case, folder: str) -> list[dict[str, Any]]:
    """Facts of every worker; layouts are left in the folder."""
    told = {"family": case.family, "sizes": case.sizes, **case.engine}
    script = str(_HERE / "needed_engine.py")
    done = subprocess.run(
        [sys.executable, "-P", script, *sglang_path(), folder, json.dumps(told)],
        capture_output=True,
        text=True,
        timeout=1200,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark needed: {done.stderr[-2000:]}")
    facts: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return facts


def measure(case: Case, folder: Path, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """One row; seconds are those of a rank's plan."""
    learnt = [_core.Layout.from_bytes((folder / str(rank)).read_bytes()) for rank in range(8)]
    model = _core.Layout.from_bytes((folder / "model").read_bytes())
    workers = [repeated(layout, case.layers) for layout in learnt]
    source = dealt(model, case.layers, len(workers))
    start = time.perf_counter()
    needed = planned(source, [(layout, False) for layout in workers])
    seconds = time.perf_counter() - start
    full = planned(source, [(whole(source, range(source.tensor_count)), True)] * len(workers))
    sizes = [layout.shard_nbytes for layout in workers]
    sent, most = needed["delivered_nbytes"], full["delivered_nbytes"]
    figure = (
        f"{sent:,} bytes to {len(workers)} workers ({min(sizes):,} to {max(sizes):,} each), "
        f"redundancy {sent / needed['needed_nbytes']:.2f}; in full {most:,}: "
        f"{most / sent:.2f} times as many"
    )
    return {
        "benchmark": "needed",
        "case": case.name,
        "bytes": source.nbytes,
        "seconds": seconds,
        "peer": f"none; the goal of {GOAL_SECONDS:g} s",
        "peer_seconds": GOAL_SECONDS,
        "ratio": GOAL_SECONDS / seconds,
        "verified": verify(learnt, facts, sizes, needed, full, source.nbytes),
        "figure": figure,
        "engine": f"SGLang {SGLANG}",
        "worker_nbytes": sizes,
        "delivered_nbytes": sent,
        "full_nbytes": most,
        "reduction": most / sent,
        "learning_seconds": [each["seconds"] for each in facts],
    }


def verify(
    learnt: list[_core.Layout],
    facts: list[dict[str, Any]],
    sizes: list[int],
    needed: dict[str, int],
    full: dict[str, int],
    nbytes: int,
) -> bool:
    """Workers keep what their parameters hold, and nothing is sent beside it, nor twice."""
    return (
        not any(each["fallback"] for each in facts)
        and [layout.shard_nbytes for layout in learnt] == [each["parameters"] for each in facts]
        and needed["delivered_nbytes"] == needed["needed_nbytes"] == sum(sizes)
        and full["delivered_nbytes"] == len(sizes) * nbytes
    )


def names(name: str, layers: tuple[int, ...]) -> Iterator[str]:
    """What a tensor is called in each layer that is like its own."""
    found = _LAYER.match(name)
    if not found:
        yield name
        return
    layer = int(found[1])
    for number in range(sum(layers[:layer]), sum(layers[: layer + 1])):
        yield f"model.layers.{number}.{name[found.end() :]}"


def repeated(layout: _core.Layout, layers: tuple[int, ...]) -> _core.Layout:
    """A worker's layout with as many layers as the model has; buffers are new for each."""
    builder = _core.LayoutBuilder()
    buffers = layout.buffer_count()
    for index in range(layout.tensor_count):
        name, dtype, shape, _ = layout.tensor(index)
        for copy, new in enumerate(names(name, layers)):
            for _, buffer, offset, start, extent, strides, _ in layout.shards(index):
                place = copy * buffers + buffer
                builder.add_shard(new, dtype, shape, start, extent, place, offset, strides)
    return builder.build()


def dealt(model: _core.Layout, layers: tuple[int, ...], ranks: int) -> _core.Layout:
    """A trainer whose ranks hold the model's tensors whole, in turn."""
    builders = [_core.LayoutBuilder(rank) for rank in range(ranks)]
    count = 0
    for index in range(model.tensor_count):
        name, dtype, shape, _ = model.tensor(index)
        item = 4 if dtype == "float32" else 2
        strides = [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        for new in names(name, layers):
            zeros = [0] * len(shape)
            builders[count % ranks].add_shard(new, dtype, shape, zeros, shape, count, 0, strides)
            count += 1
    return _core.Layout.merge([builder.build() for builder in builders])


def planned(source: _core.Layout, destinations: list[tuple[_core.Layout, bool]]) -> dict[str, int]:
    """What the plan of rank 0 counts over all ranks, each beside a worker."""
    ranks = range(len(destinations))
    return _core.Plan(source, destinations, [(k, k) for k in ranks], [0] * len(ranks), 0).stats
