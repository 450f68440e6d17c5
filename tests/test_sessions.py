"""Which trainer rank serves which engine worker, and what it says of it."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import wsync
from wsync import _core
from wsync.trainer.roster import Delivery, PlanWorker, RolloutEngine, Roster
from wsync.trainer.sessions.worker import WorkerSession


def plan_workers(engines: list[RolloutEngine], hosts: list[int]) -> list[PlanWorker]:
    model = _core.LayoutBuilder().build()
    return Roster(hosts, model, engines).workers


def servers(workers: list[int], hosts: list[int], gpus: list[int] | None = None) -> list[int]:
    """By engines that run wsync, of so many workers."""
    engines = [
        RolloutEngine(f"e{i}", count, Delivery.WSYNC, None if gpus is None else gpus[i])
        for i, count in enumerate(workers)
    ]
    return [worker.served_by for worker in plan_workers(engines, hosts)]


@pytest.mark.parametrize(
    ("name", "offset", "refused"),
    [
        ("http://192.0.2.1:30000", None, True),  # an address that no machine has (RFC 5737)
        ("http://[2001:db8::1]:30000", None, True),  # nor this one (RFC 3849)
        ("http://192.0.2.1:30000", 0, False),
        ("http://127.0.0.1:30000", None, False),
        ("http://localhost", None, False),
        ("an actor", None, False),
    ],
)
def test_no_file_of_shared_memory_is_named_to_another_host(
    name: str, offset: int | None, refused: bool
) -> None:
    engine: Any = SimpleNamespace(name=name, workers=1, load_formats=())
    given = (engine, offset, wsync.Options(), 1)
    if refused:
        with pytest.raises(wsync.UnsupportedError, match=r"192\.|2001.*: it is on another host"):
            RolloutEngine.of(*given)
    else:
        assert RolloutEngine.of(*given).delivery is Delivery.STOCK


def test_workers_are_spread_over_the_ranks_of_one_host() -> None:
    assert servers([1, 2], [0, 0, 0, 0]) == [0, 1, 2]
    assert servers([4, 2], [0, 0]) == [0, 1, 0, 1, 0, 1]


def test_ranks_of_another_host_serve_nobody_by_chance() -> None:
    assert servers([3], [0, 0, 2, 2]) == [0, 1, 0]


def test_an_offset_names_the_rank_on_the_engines_gpu() -> None:
    assert servers([2, 2], [0, 0, 0, 0], [2, 0]) == [2, 3, 0, 1]


def test_workers_beyond_the_trainer_go_to_the_least_busy_rank() -> None:
    assert servers([2], [0, 0], [7]) == [0, 1]


def test_a_stock_engine_is_served_by_rank_0() -> None:
    engines = [RolloutEngine("a", 1, Delivery.STOCK), RolloutEngine("b", 1, Delivery.WSYNC)]
    found = plan_workers(engines, [0, 0])
    assert [(w.engine, w.served_by, w.takes_buckets) for w in found] == [
        (0, 0, True),
        (1, 1, False),
    ]


def test_errors_of_a_session_say_whose_it_is() -> None:
    session = WorkerSession(5, engine="http://host:1", index=1, directory=None)
    try:
        late = r"^engine http://host:1: worker 1 did not join the update within 0\.01 s: "
        with pytest.raises(wsync.DeadlineError, match=late):
            session.accept(0.01, check=lambda: None)

        def refuse() -> None:
            raise wsync.RemoteError("trainer rank 3: no")

        with pytest.raises(wsync.RemoteError, match=r"^trainer rank 3: no$"):
            session.accept(60.0, refuse)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(_core.Importer, session.address, b"layout", 60.0)
            assert session.accept(60.0, check=lambda: None) == b"layout"
            connecting.result().fail("update 2: no room")
        text = rf"engine http://host:1: worker 1 \(pid {os.getpid()}\) failed: update 2: no room"
        with pytest.raises(wsync.RemoteError, match=f"^{text}$") as caught:
            session.send_model(b"", 60.0, check=lambda: None)
            session.accept_layout(60.0, check=lambda: None)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    finally:
        session.close()
