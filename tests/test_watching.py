"""Whatever ranks wait for, what goes wrong with an engine ends the wait on all of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fault_engine, watch_cases
from support.fault_lab import RANKS
from support.procs import Ranks, forked, unnamed

import wsync
from wsync.trainer.sessions.stock import StockSession


@pytest.fixture(scope="module")
def trainers() -> Iterator[Ranks]:
    with Ranks(RANKS, path=sys.path) as started:
        yield started


@pytest.mark.parametrize(
    ("place", "exchange"),
    [("plan", "auto"), ("round", "gloo"), ("round", "shared"), ("agreement", "auto")],
)
def test_a_worker_that_dies_ends_the_wait_for_a_late_rank(
    place: str, exchange: str, trainers: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / "engine")
    head = unnamed(forked(), fault_engine.run_head, path)
    head.start()
    try:
        end = time.monotonic() + watch_cases.PATIENCE
        while not os.path.exists(path) and time.monotonic() < end:
            time.sleep(0.02)
        found = trainers.run(watch_cases.late, place, exchange, path, timeout=240)
    finally:
        head.kill()
        head.join()
    texts = {text for text, _ in found}
    assert len(texts) == 1
    assert "trainer rank" in texts.pop() and "worker 1 " in found[0][0], found
    # the deadline has not been waited for
    assert all(seconds < watch_cases.PATIENCE for _, seconds in found), found


def test_a_bucket_that_was_refused_is_seen_in_other_waits() -> None:
    engine: Any = SimpleNamespace(name="stock", workers=1)
    session = StockSession(0, engine, timeout=5)
    taken: Future[None] = Future()
    taken.set_result(None)
    answer: Future[None] = Future()
    session._sent = [taken, answer]
    session.look()
    answer.set_exception(wsync.RemoteError("engine stock: no"))
    with pytest.raises(wsync.RemoteError, match="engine stock: no"):
        session.look()
    session.close()
