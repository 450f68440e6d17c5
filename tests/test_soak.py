"""A trainer connects to an engine, updates it and lets go, again and again: nothing grows.

WSYNC_CYCLES says how often (40 times).  Memory is judged from 500 on: in fewer it says nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from support import cycles
from support.broadcast_engine import served
from support.procs import Ranks

CYCLES = int(os.environ.get("WSYNC_CYCLES") or 40)
SETTLING = 6.0  # seconds for threads and descriptors that are on their way out
SLACK = {
    "memory": 1 << 20 if CYCLES >= 500 else 1 << 40,
    "descriptors": 0,
    "threads": 8,  # of connections that are about to end
}


@pytest.mark.slow
@pytest.mark.timeout(2 * CYCLES + 600)
@pytest.mark.parametrize("way", cycles.WAYS)
def test_nothing_grows_when_a_trainer_comes_and_goes(
    way: str, config: object, tmp_path: Path
) -> None:
    with (
        served(config, dtype="float32") as server,
        Ranks(1, path=sys.path, modules=["support.cycles"]) as trainer,
    ):

        def after(count: int) -> dict[str, dict[str, int]]:
            given = (server.url, way, str(tmp_path), config, count)
            (pid,) = trainer.run(cycles.run, *given, timeout=2 * count + 300)
            time.sleep(SETTLING)
            return {"trainer": cycles.figures(pid), "engine": cycles.figures(server.pid)}

        after(CYCLES // 2)  # caches and allocators may grow so long
        before = after(CYCLES // 4)
        found = after(CYCLES)
        assert _grown(before, found) == []
        pids = [f"{each['pid']}" for each in found.values()]
    left = [name for name in os.listdir("/dev/shm") if set(pids) & set(name.split("_"))]
    assert left == []


def _grown(before: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{who}: {name} {before[who][name]} to {found[who][name]}"
        for who in before
        for name, slack in SLACK.items()
        if found[who][name] > before[who][name] + slack
    ]
