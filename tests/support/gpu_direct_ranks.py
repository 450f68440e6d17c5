"""What Megatron trainer ranks do in tests/test_gpu_direct_ranks.py, each with its weights on a GPU
of its own, which tests/fakecuda plays; rank 0 also runs the engine, whose workers have the first
two of these GPUs."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import remote_nccl_cases, tiny_models, tiny_qwen3
from support.engines import FIRST_GPU
from support.errors import error_of
from support.fakecuda import calls, position
from support.learnt_cases import differing
from support.played_gpu import PLACES, PlayedTensor, by_handle, placed
from support.sglang_processes import SglangProcesses
from support.tensor_parallel_engine import TensorParallelEngine
from support.update_cases import compare
from support.vllm_engine import VllmEngine

import wsync
from wsync import megatron
from wsync.demo import hf_reference, megatron_cpu

OPTIONS = wsync.Options(deadline=60.0, progress=False, flush_cache=False, delivery="direct")
UPDATES = (1, 2, 3)  # the last is a steady one
_engines: list[Any] = []


def start(engine: str, version: str) -> None:
    """Starts an engine's workers; without a collective, for they take their time."""
    if dist.get_rank() == 0 and engine != "tensor-parallel":
        with mock.patch.dict(os.environ, {FIRST_GPU: "0"}):
            _engines.append(VllmEngine() if engine == "vllm" else SglangProcesses(version))


def stop() -> None:
    while _engines:
        _engines.pop().close()


@contextlib.contextmanager
def _engine(config: Any, family: str, ep: int) -> Any:
    """On rank 0: the engine with such a model, the ids of its workers, and what says which of their
    weights differ; elsewhere nothing."""
    if dist.get_rank() > 0:
        yield None, [], lambda _: []
    elif _engines:
        (engine,) = _engines
        engine.prepare(family, ep=ep)
        yield engine, [p.pid for p in engine.processes], functools.partial(differing, engine)
    else:
        experts = "ep" if ep > 1 else "tp"
        with remote_nccl_cases.engine(config, 2, 0, experts) as started:
            yield started, started.pids, functools.partial(compare, started)


def update(
    named: str, family: str, parallel: megatron_cpu.Parallel, ep: int, place: str
) -> dict[str, Any]:
    """Updates with other weights each time: what differs from an independent conversion in each,
    and what the last one asks of the driver.  named: the engine that was started."""
    config, dtype = tiny_models.config(family), torch.bfloat16
    if named == "tensor-parallel":
        config = tiny_qwen3.sparse() if family == "qwen3_moe" else tiny_qwen3.dense()
        dtype = torch.float32
    wrong, paths = [], set[str]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=dtype)
        on_gpu = functools.partial(PLACES[place], gpu=dist.get_rank())
        layout = placed(megatron.layout(trainer.chunks, config), on_gpu)
        engine, pids, compared = stack.enter_context(_engine(config, family, ep))
        dist.barrier()  # nobody waits for engines to start within an update's deadline
        engines = [] if engine is None else [engine]
        sync = stack.enter_context(wsync.connect(layout, engines, options=OPTIONS))
        for seed in UPDATES:
            trainer.randomize(seed)
            dist.barrier()
            begin = position()
            dist.barrier()
            report = sync.update()
            dist.barrier()
            counts = calls(begin)
            paths |= set(report.paths.values())
            wrong.append(compared(hf_reference.hf_state_dict(trainer.chunks, config)))
            dist.barrier()
    return {
        **report.facts(),
        "wrong": wrong,
        "paths": paths,
        "trainer": counts.get(os.getpid(), Counter()),
        "workers": [counts.get(pid, Counter()) for pid in pids],
    }


def on_two_gpus() -> dict[str, Any]:
    """What a rank is told that has some of its parameters on another GPU than the rest, when it
    makes a layout of them and when they have moved since; and whether the engine is the same."""
    config = tiny_qwen3.dense()
    weights = tiny_qwen3.draw(config, 1)
    names = list(weights)
    played: dict[str, PlayedTensor] = by_handle(weights)
    moved = played | by_handle({names[1]: weights[names[1]]}, 1)
    with TensorParallelEngine(config, tp=2) as engine:
        early = error_of(lambda: wsync.connect(moved, [engine], options=OPTIONS))
        with wsync.connect(played, [engine], options=OPTIONS) as sync:
            sync.update()
            late = error_of(lambda: sync.update(moved))
            wrong = compare(engine, weights)
            sync.update()
    return {"name": names[1], "early": early, "late": late, "wrong": wrong}


def serves_two_gpus() -> str | None:
    """What a rank on GPU 0 is told that would serve a worker there and one on GPU 1."""
    config = tiny_qwen3.dense()
    played = by_handle(tiny_qwen3.draw(config, 1))
    with (
        _engine(config, "qwen3", 1) as (engine, _, _),
        wsync.connect(played, [engine], options=OPTIONS) as sync,
    ):
        return error_of(sync.update)
