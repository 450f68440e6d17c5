"""What a process that was forked from a trainer's can do with the trainer's objects: nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.weights_only_engine import ProcessEngine

import wsync
from wsync import _core
from wsync.machine.daemon_threads import start

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
WEIGHTS = {"w": torch.arange(8.0)}
SECONDS = 60.0


def in_a_child(call: Callable[[], object]) -> str:
    """What the call raises or returns in a forked process, as text."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    end, status = time.monotonic() + SECONDS, 0
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    with os.fdopen(ours) as answer:
        text = answer.read()
    status = ended[1]
    return text if status == 0 else f"ended with {status}"


@pytest.fixture(scope="module")
def running() -> Iterator[ProcessEngine]:
    with ProcessEngine({"w": ((8,), torch.float32)}) as engine:
        yield engine


@pytest.mark.parametrize("options", [{}, {"delivery": "distributed", "broadcast": "bucket"}])
def test_a_fork_leaves_its_parents_connection_alone(
    running: ProcessEngine, options: dict[str, Any]
) -> None:
    chosen = wsync.Options(deadline=20.0, progress=False, **options)
    with wsync.connect(WEIGHTS, [running], options=chosen) as sync:
        sync.update()
        text = in_a_child(sync.update)
        assert text.startswith(f"StateError: update: this belongs to process {os.getpid()}, which")
        assert in_a_child(sync.close) == "None"
        assert in_a_child(running.close) == "None"
        assert in_a_child(lambda: running.resume(5.0)).startswith("StateError: engine process: ")
        WEIGHTS["w"] += 1
        sync.update()
        assert torch.equal(running.weights()["w"], WEIGHTS["w"])


def test_an_end_is_heard_of_while_a_fork_goes_on() -> None:
    exporter = _core.Exporter()
    importer = start("join", lambda: _core.Importer(exporter.address, b"", SECONDS))
    exporter.accept(SECONDS)
    child = os.fork()
    if child == 0:
        time.sleep(SECONDS)
        os._exit(0)
    try:
        exporter.close()
        with pytest.raises(wsync.PeerClosedError):
            importer.result(SECONDS).begin(SECONDS)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
