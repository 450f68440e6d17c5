"""What trainer ranks ask of a store until they have met.

`python -P -m support.counted_store [RANKS]`, with tests/ on PYTHONPATH, prints it for ranks that
are threads, the last of which is late.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from wsync.exchange.trainer_group import _meet

PATIENCE = 120.0


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


def main(arguments: Sequence[str]) -> None:
    size = int(arguments[0]) if arguments else 512
    for late in (0.0, 2.0, 10.0):
        names, requests = meet(size, late)
        assert len(names) == 1
        print(f"{size} ranks, the last {late:.0f} s late: {requests.total():,} requests")


if __name__ == "__main__":
    main(sys.argv[1:])
