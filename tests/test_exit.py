"""Interpreters that end in the middle of an update: no crash, no hang, and the other side says who
is gone.  With --fakecuda streams, rings and kernels are under way, and the driver is asked for
nothing once the process has begun to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import exiting, fault_engine

import wsync

HERE = Path(__file__).parent
SECONDS = 180.0  # of an interpreter that imports torch beside many others
PHASES = ("round", "done", "prepared", "commit")
QUICK = {("round", "wait"), ("done", "raise"), ("prepared", "exit")}


def _cells(*hows: str) -> list[Any]:
    return [
        pytest.param(phase, how, marks=[] if (phase, how) in QUICK else [pytest.mark.slow])
        for phase in PHASES
        for how in hows
    ]


@contextmanager
def _started(*arguments: str, **named: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        text=True,
        **{"stderr": subprocess.PIPE, **named},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _ended(process: subprocess.Popen[str], how: str) -> None:
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == exiting.CODES[how], errors
    assert "Fatal Python error" not in errors, errors


def _until(what: Any) -> Any:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("nothing has come of it")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fault_engine.Handle]:
    """One engine for many trainers."""
    path = str(tmp_path_factory.mktemp("engine") / "socket")
    code = f"from support import fault_engine; fault_engine.run_head({path!r})"
    with _started("-c", code, process_group=0, stderr=subprocess.DEVNULL) as head:
        _until(lambda: os.path.exists(path))
        yield fault_engine.Handle(path)
        os.killpg(head.pid, signal.SIGKILL)


def _held(engine: fault_engine.Handle) -> list[Any]:
    return [engine.call("ask", (rank, "held", None), SECONDS) for rank in range(engine.workers)]


@pytest.mark.parametrize(("phase", "how"), _cells("wait", "thread", "exit", "raise", "end"))
def test_a_trainer_s_interpreter_ends(phase: str, how: str, engine: fault_engine.Handle) -> None:
    with _started("-m", "support.exiting", "trainer", engine.path, phase, how) as trainer:
        _ended(trainer, how)

    assert "trainer" in _until(lambda: engine.model_info(SECONDS)["error"])
    with wsync.connect(fault_engine.weights(3), [engine], options=exiting.OPTIONS) as sync:
        sync.update(version="3")
    whole = fault_engine.weights(3).values()
    for rank, (held, consistent, _) in enumerate(_held(engine)):
        assert consistent
        assert held == [fault_engine.share(t, rank).numpy().tobytes() for t in whole]


@pytest.mark.parametrize(("phase", "how"), _cells("wait", "exit", "raise", "end"))
def test_an_engine_s_interpreter_ends(phase: str, how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "engine")
    with _started("-m", "support.exiting", "engine", path, phase, how) as process:
        _until(lambda: os.path.exists(path) or process.poll() is not None)
        weights = fault_engine.weights(1)
        with wsync.connect(weights, [exiting.One(path)], options=exiting.OPTIONS) as sync:
            sync.update(version="1")
            with pytest.raises(wsync.WsyncError, match=r"engine matrix: |worker \(pid \d+\) "):
                sync.update(fault_engine.weights(2), version="2")
        _ended(process, how)


REFUSED = """
import time
import torch
from wsync.exchange.update_group import Rendezvous, Store

def check():
    time.sleep(0.5)  # until the other thread is within torch
    raise RuntimeError("an engine refuses to join")

store = Store(60.0)
try:
    Rendezvous("localhost", store.port, 2).join(0, 60.0, check, device=torch.device("cpu"))
except RuntimeError:
    store.close()
"""


def test_a_script_ends_after_an_engine_has_refused_to_join_a_group() -> None:
    """The thread that joins comes back from torch as its store is closed."""
    with ExitStack() as stack:
        for process in [stack.enter_context(_started("-c", REFUSED)) for _ in range(4)]:
            _ended(process, "wait")
