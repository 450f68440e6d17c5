"""What trainer ranks do in tests/test_update_ranks.py; rank 0 also runs the engines."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wsync
from wsync import megatron
from wsync.connection import Connection
from wsync.demo import megatron_cpu, reference
from wsync.engine.tensor_parallel import TensorParallelEngine

# a ring of two rounds: when a later one is posted, the first has surely been loaded
OPTIONS: dict[str, Any] = {
    "deadline": 4.0,
    "progress": False,
    "round_nbytes": 1 << 15,
    "ring_nbytes": 1 << 16,
}


@contextlib.contextmanager
def trainer_and_engine(config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any]) -> Any:
    """A sharded trainer, and on rank 0 an engine of two workers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel)
        started = None
        if dist.get_rank() == 0:
            started = stack.enter_context(TensorParallelEngine(config, **engine))
        yield trainer, started


def compare(engine: TensorParallelEngine | None, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ between the engine and the independent conversion."""
    if engine is None:
        return []
    found = engine.weights()
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    ]


def update_twice(
    config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any], exchange: str
) -> dict[str, Any]:
    """Two updates with different weights; returns the last report and what differed."""
    options = wsync.Options(**OPTIONS, exchange=exchange)
    wrong: list[str] = []
    with trainer_and_engine(config, parallel, engine) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        with wsync.connect(layout, [started] if started else [], options=options) as sync:
            for seed in (1, 2):
                trainer.randomize(seed)
                report = sync.update()
                wrong += compare(started, reference.hf_state_dict(trainer.chunks, config))
    return {"wrong": wrong, **report.facts()}


def fail_once(
    config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any], exchange: str
) -> dict[str, Any]:
    """Rank 1 fails in the middle of the second update; the third is to succeed."""
    options = wsync.Options(**OPTIONS, exchange=exchange)
    with trainer_and_engine(config, parallel, engine) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        with wsync.connect(layout, [started] if started else [], options=options) as sync:
            sync.update()
            trainer.randomize(5)
            error = ""
            with breaking_rank(1):
                try:
                    sync.update()
                except wsync.WsyncError as caught:
                    error = f"{type(caught).__name__}: {caught}"
            inconsistent = started is not None and not started.model_info(5)["consistent"]
            paused = started is not None and started.paused
            sync.update()
            wrong = compare(started, reference.hf_state_dict(trainer.chunks, config))
    return {"error": error, "wrong": wrong, "inconsistent": inconsistent, "paused": paused}


@contextlib.contextmanager
def breaking_rank(rank: int) -> Any:
    """Makes one rank fail in its last round."""
    original = Connection._receive

    def receive(self: Connection, number: int, *rest: Any) -> None:
        assert self.plan is not None
        if dist.get_rank() == rank and number == self.plan.round_count - 1:
            raise ValueError("a planted failure")
        original(self, number, *rest)

    Connection._receive = receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        Connection._receive = original  # type: ignore[method-assign]


def die_in_the_middle(
    config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any], folder: str
) -> None:
    """Rank 2 is killed in the middle of an update; the others note what they raise."""
    options = wsync.Options(**OPTIONS)
    original = Connection._receive

    def receive(self: Connection, number: int, *rest: Any) -> None:
        if dist.get_rank() == 2 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, number, *rest)

    with trainer_and_engine(config, parallel, engine) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        sync = wsync.connect(layout, [started] if started else [], options=options)
        sync.update()
        Connection._receive = receive  # type: ignore[method-assign]
        try:
            sync.update()
        except wsync.WsyncError as error:
            text = f"{type(error).__name__}: {error}"
            Path(folder, f"rank{dist.get_rank()}").write_text(text)
        os._exit(0)  # groups that a rank has left cannot be taken down in order
