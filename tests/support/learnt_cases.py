"""What trainer ranks do in tests/test_learnt_ranks.py; rank 0 also runs the engine."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import gqa_families, hf_reference, megatron_cpu, own_family, tiny_models
from support.sglang_processes import SglangProcesses
from support.vllm_engine import VllmEngine

import wsync
from wsync import megatron

OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=1 << 15, ring_nbytes=1 << 16)
DIRECT = wsync.Options(deadline=60, progress=False, delivery="direct")
_engines: list[Any] = []


def start(engine: str, version: str) -> None:
    """Starts the engine's two workers; without a collective, for they take their time."""
    if dist.get_rank() == 0:
        _engines.append(VllmEngine() if engine == "vllm" else SglangProcesses(version))


def stop() -> None:
    while _engines:
        _engines.pop().close()


def update_twice(
    family: str,
    changes: dict[str, Any],
    parallel: megatron_cpu.Parallel,
    ep: int,
    delivery: str,
) -> dict[str, Any]:
    """Two updates with different weights; the last report, and what differs from the engine's own
    loading of an independent conversion."""
    direct = delivery == "direct"
    config = tiny_models.config(family, **changes)
    engine = _engines[0] if _engines else None
    if engine is not None:
        engine.prepare(family, ep=ep, changes=changes)
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        options: dict[str, Any] = {}
        if family == own_family.NAME:
            own_family.add()
            options = gqa_families.options(config)
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16, **options)
        for chunk in trainer.chunks if direct else ():
            chunk.share_memory()
        layout = megatron.layout(trainer.chunks, config)
        engines = [] if engine is None else [engine]
        sync = stack.enter_context(
            wsync.connect(layout, engines, options=DIRECT if direct else OPTIONS)
        )
        for seed in (1, 2):
            trainer.randomize(seed)
            report = sync.update()
            weights = converted(trainer.chunks, config)
            if engine is not None:
                wrong += differing(engine, weights)
    return {"wrong": wrong, **report.facts()}


def converted(chunks: list[torch.nn.Module], config: Any) -> dict[str, torch.Tensor]:
    """hf_reference's conversion, with the names of Mixtral's experts where they are."""
    if config.model_type != own_family.NAME:
        return hf_reference.hf_state_dict(chunks, config)
    plain = copy.copy(config)
    plain.num_experts = config.num_local_experts
    names = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    found = {}
    for name, tensor in hf_reference.hf_state_dict(chunks, plain).items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    return found


def differing(engine: Any, weights: dict[str, torch.Tensor]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        torch.save(weights, path)
        return [
            f"worker {rank}: {name}"
            for rank, names in enumerate(engine.differing(str(path)))
            for name in names
        ]
