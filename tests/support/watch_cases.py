"""Trainer ranks that wait for a late one while a worker of their engine dies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import torch.distributed as dist
from support import fault_engine
from support.errors import error_of
from support.fault_lab import RANKS
from support.rows import rows_of, sharded

import wsync
from wsync.trainer.connection import Connection
from wsync.trainer.planning import Planning

PATIENCE = 90.0
OPTIONS: dict[str, Any] = {
    "deadline": PATIENCE,
    "progress": False,
    "round_nbytes": 1 << 13,
    "ring_nbytes": 1 << 14,
}
# what the late rank is about to call; the others wait in the next collective
PLACES = {
    "plan": (Planning, "gather"),
    "round": (Connection, "_wait_and_unpack"),
    "agreement": (Connection, "prepared"),
}


def late(place: str, exchange: str, path: str) -> tuple[str, float]:
    """What this rank raises, and how long that took; the last rank, which serves no worker, is
    late and kills worker 1 meanwhile."""
    rank, engine = dist.get_rank(), fault_engine.Handle(path)
    options = wsync.Options(**OPTIONS, exchange=exchange)
    engines, source = [engine] if rank == 0 else [], sharded(fault_engine.weights(0))
    with wsync.connect(source, engines, options=options) as sync:
        if place != "plan":  # which is made once
            sync.update(rows_of(fault_engine.weights(1)), version="1")
        owner, name = PLACES[place]
        method = getattr(owner, name)

        def wait(*given: Any, **named: Any) -> Any:
            time.sleep(0.5)  # the others come to their waits, or are at least near them
            os.kill(engine.model_info(PATIENCE)["pids"][1], signal.SIGKILL)
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                sync._group.check()
                time.sleep(0.02)
            return method(*given, **named)

        start = time.monotonic()
        with mock.patch.object(owner, name, wait if rank == RANKS - 1 else method):
            weights = rows_of(fault_engine.weights(2))
            text = error_of(lambda: sync.update(weights, version="2"))
        return text, time.monotonic() - start
