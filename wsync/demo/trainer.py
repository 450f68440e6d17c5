"""One trainer process of the demo: train, update the engines, check every byte."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wsync
from wsync.demo import reference
from wsync.demo.pair import Engines
from wsync.demo.run import LACKING, Settings
from wsync.demo.sglang_engine import SglangEngine
from wsync.handles.base import EngineHandle
from wsync.layout import TrainerLayout, from_tensors

SENTENCE = "Fresh weights reach every engine, byte for byte, before the next token is due. "
PROMPT_LENGTH = 18
STEPS_PER_UPDATE = 12
TOLERANCE = 1e-3


class MegatronTrainer:
    """A real megatron-core model, sharded over the demo's processes."""

    def __init__(self, settings: Settings, config: Any) -> None:
        from wsync import megatron
        from wsync.demo import megatron_cpu

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(megatron_cpu.on_cpu())
        parallel = megatron_cpu.Parallel(
            tp=settings.tp, pp=settings.pp, ep=settings.ep, etp=1 if settings.ep > 1 else None
        )
        self._stack.enter_context(megatron_cpu.groups(parallel))
        self._trainer = megatron_cpu.build(config, parallel, dtype=torch.float32)
        self._config = config
        self.layout: TrainerLayout = megatron.layout(self._trainer.chunks, config)
        self.step = self._trainer.step
        self.logits = self._trainer.logits

    def reference(self) -> dict[str, torch.Tensor]:
        """The weights under Hugging Face names, converted without wsync; collective."""
        return reference.hf_state_dict(self._trainer.chunks, self._config)

    def close(self) -> None:
        self._stack.close()


class PlainTrainer:
    """A transformers model in one process, for machines without megatron-core."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_config(config).float()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self.layout = from_tensors(dict(self._model.named_parameters()))

    def step(self, ids: torch.Tensor) -> float:
        self._optimizer.zero_grad()
        loss = self._model(ids, labels=ids).loss
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(ids).logits
        return logits

    def reference(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    def close(self) -> None:
        pass


def train(rank: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """What one rank does; rank 0 prints how far it is and returns the facts of the demo."""
    config = settings.config()
    with contextlib.ExitStack() as stack:
        if settings.megatron:
            stack.enter_context(_distributed(rank, settings, folder / "store"))
        trainer = MegatronTrainer(settings, config) if settings.megatron else PlainTrainer(config)
        stack.callback(trainer.close)
        engines = None
        if rank == 0:
            engines = _start_engines(settings, config, folder)
            stack.callback(engines.close)
            print("engines: " + "; ".join(fact["name"] for fact in engines.facts), flush=True)
        return _updates(trainer, engines, settings, folder / "versions")


def _start_engines(settings: Settings, config: Any, folder: Path) -> Engines | SglangEngine:
    if settings.engine == "transformers":
        return Engines(config, settings.engine_tp)
    try:
        return SglangEngine(
            config, tp=settings.engine_tp, ep=settings.engine_ep, path=settings.engine_path
        )
    except wsync.RemoteError as error:
        (folder / LACKING).write_text(str(error), encoding="utf-8")
        raise


@contextlib.contextmanager
def _distributed(rank: int, settings: Settings, store: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.ranks,
        timeout=datetime.timedelta(seconds=300),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _updates(
    trainer: MegatronTrainer | PlainTrainer,
    engines: Engines | SglangEngine | None,
    settings: Settings,
    folder: Path,
) -> dict[str, Any]:
    """Alternates training and updating; every rank takes part, rank 0 has engines and reports."""
    text = list(SENTENCE.encode())
    ids = torch.tensor([text])
    prompt = text[:PROMPT_LENGTH]
    problems: list[str] = []
    updates: list[dict[str, Any]] = []
    if engines is not None:
        engines.note("before", prompt)
    expected: dict[str, torch.Tensor] = {}
    handles = [] if engines is None else engines.handles
    with _connect(trainer.layout, handles, settings, folder) as sync:
        for number in range(1, settings.updates + 1):
            for _ in range(STEPS_PER_UPDATE):
                trainer.step(ids)
            report = sync.update(version=number)
            expected = trainer.reference()
            logits = trainer.logits(ids)[0]
            if engines is None:
                continue
            found = engines.check(
                expected, str(number), ids=text, logits=logits, tolerance=TOLERANCE
            )
            verdict = "WRONG" if found else "verified"
            print(f"update {number} of {settings.updates}: {verdict}", flush=True)
            problems += [f"update {number}: {problem}" for problem in found]
            updates.append({**report.facts(), "verified": not found})
    if engines is None:
        return {}
    engines.note("after", prompt)
    if isinstance(engines, Engines) and settings.mode == "disk":
        found = engines.join_late(folder, expected, str(settings.updates))
        problems += [f"after the last update: {problem}" for problem in found]
    return {
        "verified": not problems,
        "problems": problems,
        "mode": settings.mode,
        "model": settings.model,
        "trainer": "megatron-core" if settings.megatron else "torch",
        "parallel": settings.parallel,
        "ranks": settings.ranks,
        "tensors": len(expected),
        "bytes": sum(tensor.nbytes for tensor in expected.values()),
        "phases": updates[-1]["phases"],
        "redundancy": updates[-1]["redundancy"],
        "updates": updates,
        "engines": engines.facts,
        "processes": engines.processes,
        "versions": _versions(),
    }


def _connect(
    layout: TrainerLayout, handles: Sequence[EngineHandle], settings: Settings, folder: Path
) -> wsync.Sync | wsync.DiskSync:
    if settings.mode == "disk":
        return wsync.DiskSync(
            layout, handles, folder=folder, base=settings.config(), shard_nbytes=1 << 20
        )
    delivery = "distributed" if settings.mode == "distributed" else "auto"
    broadcast = settings.broadcast
    options = wsync.Options(round_nbytes=1 << 18, delivery=delivery, broadcast=broadcast)
    # the first engine is beyond the trainer's GPUs, the other one shares them
    offsets = [settings.ranks, 0] if settings.mode == "mixed" else None
    return wsync.Sync(layout, handles, engine_gpu_offsets=offsets, options=options)


def _versions() -> dict[str, str]:
    import importlib.metadata

    names = ("wsync", "torch", "transformers", "megatron-core")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
