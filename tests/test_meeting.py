"""How trainer ranks find each other in a store, and what they make of one that answers late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.counted_store import PATIENCE, CountedStore, meet

import wsync
from wsync.exchange import trainer_group
from wsync.exchange.trainer_group import _Board, _meet
from wsync.machine.daemon_threads import Lane

RANKS = 8


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_ranks_that_wait_ask_nothing(late: float) -> None:
    names, requests = meet(RANKS, late)
    assert len(names) == 1
    assert requests.total() <= 8 * RANKS, requests


def test_ranks_that_came_are_told_who_did_not() -> None:
    store = CountedStore()
    with ThreadPoolExecutor(2) as pool:
        came = pool.submit(_meet, store, 1, 4, PATIENCE)
        while not store.check(["rank1"]):
            pass
        errors = [str(pool.submit(_meet, store, 0, 4, 0.2).exception()), str(came.exception())]
    assert errors == ["trainer ranks [2, 3] did not come within 0.2 s"] * 2


class SlowStore:
    """Answers when somebody has waited for more than it used to be given."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def check(self, keys: list[str]) -> bool:
        assert self.answer.wait(PATIENCE)
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert self.answer.wait(PATIENCE)
        return desired.encode()


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda board: board.begin(), True),
        (lambda board: board.check_now(), None),
        (
            lambda board: str(board.publish(wsync.RemoteError("no weights"))),
            "trainer rank 1: no weights",
        ),
    ],
)
def test_a_store_may_take_as_long_to_answer_as_a_rank(
    call: Callable[[_Board], object], outcome: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the rank that hosts it is stopped."""
    monkeypatch.setattr(trainer_group, "_STORE_SECONDS", 0.05)
    store, lane = SlowStore(), Lane("test")
    board = _Board(store, 1, lane, PATIENCE)
    given: Any = None
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(call, board)
        with pytest.raises(TimeoutError):
            given.result(0.5)
        store.answer.set()
        assert given.result(PATIENCE) == outcome
    lane.close()
