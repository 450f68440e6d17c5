"""What trainer ranks do in tests/test_distributed_receivers.py; rank 0 also runs the engines."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from support import hf_reference, megatron_cpu
from support.errors import error_of
from support.fused import Fused, bytes_of, held
from support.tensor_parallel_engine import TensorParallelEngine
from support.update_cases import before_receiving, breaking_rank, compare

import wsync
from wsync import megatron
from wsync.demo.engines.model_worker import ModelWorker
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.messages.control import LOAD_FORMAT
from wsync.trainer.connection import Connection

OPTIONS: dict[str, Any] = {
    "deadline": 60.0,
    "lost": "raise",
    "progress": False,
    "delivery": "distributed",
    "round_nbytes": 1 << 15,
    "ring_nbytes": 1 << 16,
}


@contextlib.contextmanager
def started(config: Any, parallel: megatron_cpu.Parallel, *sizes: int) -> Any:
    """A sharded trainer and its layout, and on rank 0 engines of so many workers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel)
        engines = []
        for tp in sizes if dist.get_rank() == 0 else ():
            engine = TensorParallelEngine(config, tp=tp, name=f"tp{tp}")
            engines.append(stack.enter_context(engine))
        yield trainer, megatron.layout(trainer.chunks, config), engines


def come_and_go(config: Any, parallel: megatron_cpu.Parallel) -> list[dict[str, Any]]:
    """Two updates of an engine of one worker, two of that and one of two, one of the latter."""
    facts = []
    with started(config, parallel, 1, 2) as (trainer, layout, engines):
        seed = 0
        for present, updates in ((engines[:1], 2), (engines, 2), (engines[1:], 1)):
            with wsync.connect(layout, present, options=wsync.Options(**OPTIONS)) as sync:
                for _ in range(updates):
                    seed += 1
                    trainer.randomize(seed)
                    report = sync.update(version=seed)
                    expected = hf_reference.hf_state_dict(trainer.chunks, config)
                    wrong = [name for engine in present for name in compare(engine, expected)]
                    versions = {e.weight_version for e in present} - {str(seed)}
                    facts.append({**report.facts(), "wrong": wrong, "versions": versions})
    return facts


def mix(config: Any, parallel: megatron_cpu.Parallel, broadcast: str) -> dict[str, Any]:
    """One engine shares the trainer's memory, the other is beyond its ranks."""
    options = wsync.Options(**{**OPTIONS, "delivery": "auto", "broadcast": broadcast})
    with started(config, parallel, 2, 1) as (trainer, layout, engines):
        offsets = [0, dist.get_world_size()]
        wrong = []
        with wsync.Sync(layout, engines, engine_gpu_offsets=offsets, options=options) as sync:
            for seed in (1, 2):
                trainer.randomize(seed)
                report = sync.update()
                expected = hf_reference.hf_state_dict(trainer.chunks, config)
                wrong += [name for engine in engines for name in compare(engine, expected)]
    return {**report.facts(), "wrong": wrong}


def fail_once(config: Any, parallel: megatron_cpu.Parallel, way: str) -> dict[str, Any]:
    """The second update fails, one way or another; the third is to succeed."""
    options = wsync.Options(**{**OPTIONS, "deadline": 10.0 if way == "stopped" else 60.0})
    with started(config, parallel, 1, 2) as (trainer, layout, engines), contextlib.ExitStack() as s:
        sync = s.enter_context(wsync.connect(layout, engines, options=options))
        sync.update()
        trainer.randomize(5)
        with FAULTS[way](engines):
            error = error_of(sync.update)
        others = engines[1:]
        survivors = [engine.model_info(60) for engine in others]
        if way == "killed":  # connect to those that are left
            sync.close()
            engines, sync = others, s.enter_context(wsync.connect(layout, others, options=options))
        sync.update(version="after")
        expected = hf_reference.hf_state_dict(trainer.chunks, config)
        return {
            "error": error,
            "consistent": [info["consistent"] for info in survivors],
            "reasons": [info["reason"] for info in survivors],
            "wrong": [name for engine in engines for name in compare(engine, expected)],
            "versions": [engine.weight_version for engine in engines],
        }


@contextlib.contextmanager
def strike(engines: list[Any], how: signal.Signals) -> Any:
    """Rank 0 sends a signal to the first engine in a round that is sent only when all engines
    have taken the first one."""

    def hit(_: Connection, number: int) -> None:
        if number == 3 and engines:
            os.kill(engines[0].pids[0], how)

    try:
        with before_receiving(hit):
            yield
    finally:
        if engines and how == signal.SIGSTOP:
            os.kill(engines[0].pids[0], signal.SIGCONT)


FAULTS: dict[str, Any] = {
    "killed": lambda engines: strike(engines, signal.SIGKILL),
    "stopped": lambda engines: strike(engines, signal.SIGSTOP),
    "trainer": lambda engines: breaking_rank(1),
}


class Relayed:
    """An engine that is reached through another process."""

    name, workers, load_formats = "relayed", 1, (LOAD_FORMAT,)

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def _ask(self, method: str, *arguments: Any, **more: Any) -> None:
        with self._lock:
            self._pipe.send((method, arguments, more))
            error = self._pipe.recv()
        if error:
            raise wsync.RemoteError(error)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "during":
            raise AttributeError(name)
        return functools.partial(self._ask, name)


def relay(pipe: Any, engine: Any, *, timeout: float) -> str:
    """Does what a Relayed asks of an engine until that fails; why."""
    while pipe.poll(timeout):
        method, arguments, more = pipe.recv()
        try:
            getattr(engine, method)(*arguments, **more)
        except wsync.WsyncError as error:
            return str(error)
        pipe.send("")
    raise AssertionError(f"the trainer asked for nothing in {timeout:.0f} s")


def strike_the_trainer(pipe: Any, shapes: Any, how: signal.Signals) -> None:
    """A trainer of its own that is killed, or stopped, in the middle of its second update."""
    updates: list[int] = []

    def hit(_: Connection, number: int) -> None:
        if number == 2 and len(updates) == 2:
            os.kill(os.getpid(), how)

    weights = {name: torch.full(shape, 7.0, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    options = wsync.Options(**{**OPTIONS, "deadline": 5.0})
    with wsync.connect(weights, [Relayed(pipe)], options=options) as sync, before_receiving(hit):
        for _ in range(2):
            updates.append(1)
            sync.update()


class FusedWorker(ModelWorker):
    """Keeps fused parameters, and is learnt from."""

    def __init__(self, *, tp: int, rank: int) -> None:
        self.model = Fused(tp, rank, ep=True)
        self.loader = RecordedLoader(self.model)
        super().__init__(self.loader, rank=rank)

    def held(self) -> dict[str, Any]:
        return {name: bytes_of(tensor) for name, tensor in held(self.model).items()}
