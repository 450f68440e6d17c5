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
from test_handles import FakeServer, server

import wsync

__all__ = ["server"]

HERE = Path(__file__).parent
PATH = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
SECONDS = 180.0  # of an interpreter that imports torch beside many others
CELLS = [("round", "wait"), ("done", "raise"), ("prepared", "exit")]


@contextmanager
def _started(*arguments: str, **named: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *PATH])},
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


@pytest.mark.parametrize(("phase", "how"), CELLS)
def test_a_trainer_s_interpreter_ends(phase: str, how: str, engine: fault_engine.Handle) -> None:
    with _started("-m", "support.exiting", "trainer", engine.path, phase, how) as trainer:
        _ended(trainer, how)

    if how == "wait":  # others have asked the engine whether it has written anything
        assert "trainer" in _until(lambda: engine.model_info(SECONDS)["error"])
    with wsync.connect(fault_engine.weights(3), [engine], options=exiting.OPTIONS) as sync:
        sync.update(version="3")
    whole = fault_engine.weights(3).values()
    for rank, (held, consistent, _) in enumerate(_held(engine)):
        assert consistent
        assert held == [fault_engine.share(t, rank).numpy().tobytes() for t in whole]


@pytest.mark.parametrize(("phase", "how"), CELLS)
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


STUCK = """
import sys
import torch
import wsync

options = wsync.Options(deadline=120.0, progress=False)
sync = wsync.connect({"w": torch.ones(4)}, [sys.argv[1]], options=options)
if sys.argv[2] == "with":
    with sync:
        sync.update()
else:
    sync.update()
"""
LEFT = "wsync: the update has failed, and these requests have no answer"
GOOD = {"success": True, "status": "ok", "message": "Cache flushed."}
ASKED = ("pause_generation", "flush_cache", "update_weights_from_tensor", "continue_generation")


@pytest.mark.parametrize(
    ("path", "answer", "closing"),
    [
        ("server_info", "stall", "with"),
        ("pause_generation", "stall", "never"),
        ("flush_cache", "half", "with"),
        ("update_weights_from_tensor", "stall", "with"),
        ("update_weights_from_tensor", "half", "never"),
        ("continue_generation", "stall", "with"),
    ],
)
def test_ctrl_c_ends_a_script_that_waits_for_an_engine(
    path: str, answer: str, closing: str, server: FakeServer
) -> None:
    """Long before any deadline; one line says what the engine was asked."""
    server.answers |= {f"/{name}": (200, GOOD) for name in ASKED}
    server.answers["/server_info"] = (200, {"tp_size": 1})
    server.answers["/model_info"] = (200, {"weight_version": "default"})
    server.answers["/update_weights_from_tensor"] = lambda: (
        server.answers.__setitem__(
            "/model_info", (200, {"weight_version": server.seen[-1][1]["weight_version"]})
        ),
        (200, GOOD),
    )[1]
    server.answers[f"/{path}"] = answer
    with _started("-c", STUCK, server.url, closing) as script:
        _until(lambda: any(seen[0] == f"/{path}" for seen in server.seen))
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=15)
    assert script.returncode == -signal.SIGINT, errors
    assert errors.endswith("KeyboardInterrupt\n"), errors
    left = [line for line in errors.splitlines() if "have no answer" in line]
    where = f"engine {server.url}: /{path}"
    assert len(left) == (path != "server_info")
    assert all(line.startswith(f"{LEFT}: {where}.  Such an engine may") for line in left)
