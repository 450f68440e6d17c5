"""One trainer process of the demo: train, update the engines, check every byte."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import wsync
from wsync.demo import hf_reference, megatron_cpu
from wsync.demo.launcher import Settings
from wsync.demo.two_engines import Engines
from wsync.handles.base import EngineHandle
from wsync.layout import TrainerLayout

SENTENCE = "Fresh weights reach every engine, byte for byte, before the next token is due. "
PROMPT_LENGTH = 18
NEW_TOKENS = 40
STEPS_PER_UPDATE = 12
TOLERANCE = 1e-3
_PATHS = {"ring": "shared memory", "disk": "files"}  # others are named so in a Report


def train(rank: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """What one rank does; rank 0 prints how far it is and returns the facts of the demo."""
    config = settings.config()
    parallel = megatron_cpu.Parallel(
        tp=settings.tp, pp=settings.pp, ep=settings.ep, etp=1 if settings.ep > 1 else None
    )
    with contextlib.ExitStack() as stack:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=settings.ranks,
            timeout=datetime.timedelta(seconds=300),
        )
        stack.callback(dist.destroy_process_group)
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=torch.float32)
        engines = None
        if rank == 0:
            print("starting the engines", flush=True)
            engines = Engines(config)
            stack.callback(engines.close)
            print("engines: " + "; ".join(fact["name"] for fact in engines.facts), flush=True)
        return _updates(trainer, engines, settings, folder / "versions")


def _updates(
    trainer: megatron_cpu.CpuTrainer,
    engines: Engines | None,
    settings: Settings,
    folder: Path,
) -> dict[str, Any]:
    """Alternates training and updating; every rank takes part, rank 0 has engines and reports."""
    text = list(SENTENCE.encode())
    ids = torch.tensor([text], device="cpu")
    prompt = text[:PROMPT_LENGTH]
    problems: list[str] = []
    updates: list[dict[str, Any]] = []
    if engines is not None:
        engines.note("before", prompt, NEW_TOKENS)
    expected: dict[str, torch.Tensor] = {}
    layout = wsync.megatron.layout(trainer.chunks, trainer.hf)
    with _connect(layout, engines.handles if engines else [], settings, folder) as sync:
        for number in range(1, settings.updates + 1):
            steps = STEPS_PER_UPDATE
            if number == settings.updates > 1:  # until the text is learnt
                steps *= 5
            for _ in _shown(range(steps), f"training before update {number}"):
                trainer.step(ids)
            report = sync.update(version=number)
            expected = hf_reference.hf_state_dict(trainer.chunks, trainer.hf)
            logits = trainer.logits(ids)[0]
            if engines is None:
                continue
            found = engines.check(
                expected, str(number), ids=text, logits=logits, tolerance=TOLERANCE
            )
            verdict = "WRONG" if found else "verified"
            seconds = f"{report.seconds:.3f} s, {verdict}"
            print(f"update {number} of {settings.updates}: {seconds}", flush=True)
            problems += [f"update {number}: {problem}" for problem in found]
            updates.append({**report.facts(), "verified": not found})
    if engines is None:
        return {}
    engines.note("after", prompt, NEW_TOKENS)
    learnt = SENTENCE[: PROMPT_LENGTH + NEW_TOKENS]
    _add_paths(engines, report.paths)
    if settings.mode == "disk":
        found = engines.join_late(folder, expected, str(settings.updates))
        problems += [f"after the last update: {problem}" for problem in found]
    return {
        "verified": not problems,
        "learnt": all(fact.get("after", learnt) == learnt for fact in engines.facts),
        "problems": problems,
        "mode": settings.mode,
        "model": settings.model,
        "parallel": {"tp": settings.tp, "pp": settings.pp, "ep": settings.ep},
        "ranks": settings.ranks,
        "tensors": len(expected),
        "bytes": sum(tensor.nbytes for tensor in expected.values()),
        "updates": updates,
        "engines": engines.facts,
        "processes": engines.processes,
    }


def _add_paths(engines: Engines, paths: Mapping[str, str]) -> None:
    for fact, engine in zip(engines.facts, engines.handles, strict=True):
        path = paths[engine.name]
        fact["checked"] = f"weights by {_PATHS.get(path, path)}; {fact['checked']}"


def _shown(steps: range, what: str) -> tqdm[int]:
    """Steps with a bar, on rank 0 and where stderr is a terminal."""
    hidden = None if dist.get_rank() == 0 else True
    return tqdm(steps, desc=what, unit="step", leave=False, disable=hidden)


def _connect(
    layout: TrainerLayout, handles: Sequence[EngineHandle], settings: Settings, folder: Path
) -> wsync.Sync | wsync.DiskSync:
    if settings.mode == "disk":
        return wsync.DiskSync(
            layout, handles, folder=folder, base=settings.config(), shard_nbytes=1 << 20
        )
    delivery = "distributed" if settings.mode == "distributed" else "auto"
    options = wsync.Options(round_nbytes=1 << 20, delivery=delivery)
    # the first engine is beyond the trainer's GPUs, the other one shares them
    offsets = [settings.ranks, 0] if settings.mode == "mixed" else None
    return wsync.Sync(layout, handles, engine_gpu_offsets=offsets, options=options)
