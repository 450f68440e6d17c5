"""How trainer ranks find each other in a store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from wsync.exchange.trainer_group import _meet

PATIENCE = 120.0
RANKS = 8


class CountedStore:
    """A store of this process that counts the requests of all of its ranks."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._store.set_timeout(timedelta(seconds=PATIENCE))
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            self.requests[name] += name != "set_timeout"  # which is the client's own
        return getattr(self._store, name)

    def set_timeout(self, _: timedelta) -> None:
        """Ranks that are threads have one store."""


def meet(size: int, late: float) -> tuple[set[str], Counter[str]]:
    """The names that ranks have met under, and the requests; the last rank comes `late` seconds
    after the others."""
    store = CountedStore()

    def come(rank: int) -> str:
        if rank == size - 1:
            time.sleep(late)
        return _meet(store, rank, size, PATIENCE)

    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(come, range(size))), store.requests


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
    assert errors == ["trainer ranks [2, 3] did not join the others within 0.2 s"] * 2
