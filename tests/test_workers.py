"""Engines of worker processes, apart from updates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stopping import Stopping

import wsync
from wsync.demo.engines.weights_only_engine import ProcessEngine
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


def test_an_answer_that_comes_half_costs_the_timeout() -> None:
    with ProcessEngine({"w": ((8,), torch.float32)}, worker=Stopping) as engine:
        status = Path(f"/proc/{engine.pids[0]}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            with pytest.raises(wsync.DeadlineError, match="weights: worker 0: no answer within"):
                engine.weights(timeout=0.5)
        with pytest.raises(wsync.DeadlineError, match="weights: worker 0: no answer within"):
            engine.weights(timeout=0.5)
        os.kill(engine.pids[0], signal.SIGCONT)
        engine.fill(7)  # the rest of that answer comes first, and is dropped


def test_the_version_is_the_workers_whoever_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers come after the deadline, and nobody reads them."""
    with ProcessEngine({"w": ((8,), torch.float32)}) as engine:
        call = engine._call

        def late(what: str, *more: Any) -> Any:
            answers = call(what, *more)
            if what == "update":
                raise wsync.DeadlineError(what)
            return answers

        monkeypatch.setattr(engine, "_call", late)
        content = payload.named_tensors([("w", torch.ones(8))])
        with pytest.raises(wsync.DeadlineError):
            engine.update_weights([content], load_format=None, weight_version=7, timeout=60.0)
        assert engine.weights()["w"].tolist() == [1.0] * 8
        assert engine.model_info(60.0)["weight_version"] == "7"


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([("v", torch.ones(2)), ("x", torch.ones(1))], "x: not in"),
        ([("v", torch.ones(2)), ("w", torch.ones(1))], r"w: shape \(1,\) delivered, \(8,\) in"),
        (
            [("v", torch.ones(2)), ("w", torch.ones(8, dtype=torch.complex64))],
            r"w: torch\.complex64 delivered, torch\.float32 in",
        ),
        *(
            (
                [("v", torch.ones(2)), ("w", torch.ones(8, dtype=dtype))],
                rf"w: {dtype} delivered, torch\.float32 in",
            )
            for dtype in (torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn)
        ),
        ([("b", torch.ones(2))], r"b: torch\.float32 delivered, torch\.int8 in"),
        ([("h", torch.ones(2).bfloat16())], r"h: torch\.bfloat16 delivered, torch\.float16 in"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    bare: ProcessEngine, pairs: Any, text: str
) -> None:
    content = payload.named_tensors(pairs)
    with pytest.raises(wsync.RemoteError, match=text):
        bare.update_weights([content], load_format=None, weight_version=1, timeout=60.0)
    assert not any(tensor.any() for tensor in bare.weights().values())


@pytest.fixture(scope="module")
def bare() -> Iterator[ProcessEngine]:
    shapes = {"v": ((2,), torch.float32), "w": ((8,), torch.float32)}
    more = {"b": ((2,), torch.int8), "h": ((2,), torch.float16)}
    with ProcessEngine({**shapes, **more}) as engine:
        yield engine
