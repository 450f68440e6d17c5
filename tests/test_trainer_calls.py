"""What trainer ranks do around the rounds of an update, with engines that are mere stand-ins."""

from __future__ import annotations

import re
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import agreement_cases, call_cases
from support.procs import Ranks

import wsync
from wsync import _core
from wsync.handles.base import handles_of
from wsync.trainer.requests import Calls
from wsync.trainer.sessions.stock import StockSession

OPTIONS = wsync.Options(deadline=60.0, progress=False, lost="raise")


def never() -> None:
    """A check that finds nothing."""


def test_an_engine_that_refuses_is_reported_while_another_stalls() -> None:
    release = threading.Event()
    engines: list[Any] = [SimpleNamespace(name="stalled"), SimpleNamespace(name="refusing")]

    def call(index: int, engine: Any) -> None:
        if index == 1:
            raise wsync.RemoteError("engine refusing: no")
        release.wait(30)

    try:
        with pytest.raises(wsync.RemoteError, match="engine refusing: no"):
            Calls(list(enumerate(engines)), call).join(60)
        with pytest.raises(wsync.DeadlineError, match="engine stalled: no answer within"):
            Calls([(0, engines[0])], call).join(0.1)
    finally:
        release.set()


def test_an_engine_that_ends_its_opening_request_early_is_named() -> None:
    engine: Any = SimpleNamespace(name="hasty")
    calls = Calls([(3, engine)], lambda index, engine: None)
    calls.join(60)
    calls.check_pending()  # a worker's own words may be on their way
    with pytest.raises(wsync.ProtocolError, match="engine hasty answered"):
        while True:
            calls.check_pending()
            time.sleep(0.05)


def test_what_an_engine_has_not_answered_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing waits for nothing."""
    monkeypatch.setattr("wsync.trainer.requests.LEAVE_SECONDS", 0.05)
    release = threading.Event()
    engines = [call_cases.Engine(pause=RuntimeError("no")), call_cases.Engine(pause=release)]
    made = handles_of(engines, timeout=60)
    try:
        with wsync.connect({"a": torch.zeros(1)}, made, options=OPTIONS) as sync:
            with pytest.raises(wsync.RemoteError, match="no"):
                sync.update()
        (said,) = [text for text in caplog.messages if "have no answer" in text]
        assert f"have no answer: engine {made[1].name}: pause_generation.  Such an engine" in said
        assert said.endswith(
            "call update again, or, if the engine holds the weights of one update, "
            "wsync.handle(url).resume(30)"
        )
    finally:
        release.set()


def test_an_engine_that_was_started_again_is_looked_at_anew() -> None:
    made = handles_of([agreement_cases.Stock()], timeout=60)[0]
    looks, found = list[float](), {"instance": "one"}

    def look(handle: Any, timeout: float) -> None:
        if handle is made:  # threads of earlier tests may still look
            looks.append(timeout)

    with (
        mock.patch.object(type(made), "look_anew", look, create=True),
        mock.patch.object(type(made), "model_info", lambda _, timeout: dict(found)),
        wsync.connect({"a": torch.zeros(1)}, [made], options=agreement_cases.OPTIONS) as sync,
    ):
        for instance, times in (("one", 1), ("one", 1), ("two", 2)):
            found["instance"] = instance
            sync.update()
            assert len(looks) == times


class OneRound:
    """The plan of a stock engine's worker whose last round belongs to other workers."""

    round_count = 2

    def ring_nbytes(self, worker: int) -> int:
        return 64

    def slot(self, worker: int, round: int) -> _core.Slot:
        return _core.Slot((0, 16, -1) if round == 0 else (16, 0, -1))

    def manifest(self, worker: int) -> wsync.Layout:
        builder = _core.LayoutBuilder()
        builder.add_shard("a", "float32", [4], [0], [4], 0, 0, [4])
        return builder.build()


def test_a_stock_engine_takes_on_the_version_with_its_own_last_bucket() -> None:
    sent: list[str | None] = []
    engine: Any = SimpleNamespace(
        name="stock",
        workers=1,
        update_weights=lambda payloads, weight_version, **_: sent.append(weight_version),
    )
    session = StockSession(0, engine, timeout=60)
    plan: Any = OneRound()
    session.make_ring(plan, _core.host())
    session.attach(plan, _core.host(), 60, never)
    session.begin(1, "7", 60, never)
    stream = _core.Stream()
    for round in range(plan.round_count):
        session.post(round, stream, 60, never)
    session.prepared(60, never)
    session.close()
    assert sent == ["7"]


REFUSED = wsync.PeerClosedError("nobody there")
REFUSED.__cause__ = ConnectionRefusedError()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (wsync.RemoteError("not now"), False),
        (wsync.PeerClosedError("cut off when it had been sent"), True),
        (wsync.DeadlineError("it may read it yet"), True),
        (REFUSED, False),
    ],
)
def test_a_ring_whose_buckets_were_not_read_is_removed(
    error: Exception, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references to its file that travel with buckets are only dropped by who reads them."""

    def refuse(payloads: list[bytes], **_: Any) -> None:
        raise error

    engine: Any = SimpleNamespace(name="stock", workers=2, update_weights=refuse)
    session = StockSession(0, engine, timeout=60)
    plan: Any = OneRound()
    session.make_ring(plan, _core.host())
    session.attach(plan, _core.host(), 60, never)
    ring: Any = session._ring
    file = Path("/dev/shm", ring._bytes.untyped_storage()._share_filename_cpu_()[1].decode()[1:])
    session.begin(1, "7", 60, never)
    session.post(0, _core.Stream(), 60, never)
    with pytest.raises(type(error)):
        session.prepared(60, never)
    ended: list[Future[bool]] = []
    thread = session._thread
    with monkeypatch.context() as patch:
        patch.setattr(thread, "close", lambda: ended.append(thread.submit(bool)))
        session.close()
    thread.close()
    ended[0].result(60)
    assert file.exists() == stays
    ring._bytes[:] = 1  # for streams that still write to it
    file.unlink(missing_ok=True)


def test_all_ranks_hear_of_what_one_rank_finds() -> None:
    with Ranks(3, path=sys.path) as ranks:
        found = ranks.run(call_cases.unfortunate, timeout=240)
    for what in ("absent", "stalled", "getter", "different", "exchange"):
        assert len({facts[what] for facts in found}) == 1, what
    first = found[0]
    assert first["absent"].startswith("PeerClosedError: trainer rank 0: engine http://127.0.0.1:9")
    assert first["stalled"].startswith("DeadlineError: trainer rank 0: engine ")
    assert first["getter"] == "RemoteError: trainer rank 1: ValueError: no weights today"
    assert re.search(r": rank 0 makes Sync\(.*\).* rank 1 .*\bDiskSync\(", first["different"])
    made = re.search(r"rank 0 .*exchange='(\w+)'.*rank 1 .*exchange='(\w+)'", first["exchange"])
    assert made and made.groups() == ("gloo", "shared")
    # sockets of communicators that were given up
    assert [facts["leaked"] for facts in found] == [0] * 3
