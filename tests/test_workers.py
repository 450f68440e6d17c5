"""Engines of worker processes, apart from updates."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import wsync
from wsync.demo.engines.process import ProcessEngine
from wsync.messages import payload


def test_a_worker_that_does_not_read_costs_the_timeout() -> None:
    with ProcessEngine({"w": ((8,), torch.float32)}) as engine:
        os.kill(engine.pids[0], signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(wsync.DeadlineError, match="ping: worker 0: no answer within"):
                    engine.update_weights(
                        [bytes(8 << 20)], load_format=None, weight_version=None, timeout=0.3
                    )
        finally:
            os.kill(engine.pids[0], signal.SIGCONT)
        engine.fill(7)  # the questions that were given up come first, whole
        assert engine.weights()["w"].view(torch.uint8).unique().tolist() == [7]


def test_a_worker_that_has_ended_is_named() -> None:
    with ProcessEngine({"w": ((8,), torch.float32)}) as engine:
        os.kill(engine.pids[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(wsync.PeerClosedError, match="ping: worker 0 ended with -9"):
                engine.flush(60.0)


def test_the_version_is_the_workers_whoever_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers come after the deadline, and nobody reads them."""
    with ProcessEngine({"w": ((8,), torch.float32)}) as engine:
        collect = engine._collect

        def late(where: str, *more: Any) -> None:
            if ": update" in where:
                raise wsync.DeadlineError(where)
            collect(where, *more)

        monkeypatch.setattr(engine, "_collect", late)
        content = payload.named_tensors([("w", torch.ones(8))])
        with pytest.raises(wsync.DeadlineError):
            engine.update_weights([content], load_format=None, weight_version=7, timeout=60.0)
        assert engine.weights()["w"].tolist() == [1.0] * 8
        assert engine.model_info(60.0)["weight_version"] == "7"
