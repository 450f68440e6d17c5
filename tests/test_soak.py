"""Updates without end, with reconnects and random faults; see support/fault_soak.py,
connection_soak.py, chaos.py and cycles.py.

`pytest -m slow tests/test_soak.py` is short; WSYNC_CHAOS_SECONDS and WSYNC_CYCLES say how long
everything is killed at random (30 s), and how often a trainer connects and lets go (40 times);
WSYNC_CONNECTIONS, how many connections are made while processes are stopped (500).
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from support import known_weights
from support.chaos_judge import Kill, Update, count, recoveries
from support.chaos_watch import Look, Oracle, Watcher
from support.cycles import WAYS, names_one_of

from wsync.demo.engines.transformers import create_app

SECONDS = float(os.environ.get("WSYNC_CHAOS_SECONDS") or 30)
CYCLES = int(os.environ.get("WSYNC_CYCLES") or 40)


def run(module: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", f"support.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize(
    "updates", [pytest.param(30), pytest.param(10_000, marks=[pytest.mark.slow])]
)
@pytest.mark.timeout(7200)
def test_a_long_run_is_right_and_stays_flat(
    updates: int, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run("fault_soak", str(updates), timeout=7000)
    with capfd.disabled():
        print("\n" + done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"soak: {updates} updates in" in done.stdout
    assert " 0 reported" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_connections_come_about_while_processes_are_stopped_for_a_while(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """WSYNC_CONNECTIONS says how many."""
    connections = os.environ.get("WSYNC_CONNECTIONS", "500")
    done = run("connection_soak", connections, "--seed", "1", timeout=7000)
    with capfd.disabled():
        print("\n" + done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-40000:]
    assert f"soak: {connections} connections of" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_nothing_wrong_is_served_while_everything_is_killed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    done = run("chaos", str(SECONDS), timeout=SECONDS + 800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("chaos: ")]
    with capfd.disabled():
        print("\n" + "\n".join(lines))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(CYCLES + 900)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_grows_when_a_trainer_comes_and_goes(
    way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run("cycles", way, str(CYCLES), timeout=CYCLES + 800)
    with capfd.disabled():
        print("\n" + done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("prefix", ["torch_", "torch_wsync_"])
def test_files_of_other_programs_are_none_of_a_cycles(prefix: str) -> None:
    names = [f"{prefix}{pid}_2683927223_0" for pid in (7, 77, 78)]
    names += ["sem.mp-lebb3kw4", "sglang_loads_7_15d13477.shm"]
    assert [name for name in names if names_one_of(name, [7, 78])] == [names[0], names[2]]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    torch.set_num_threads(1)
    return Oracle()


@pytest.fixture
def served() -> Iterator[tuple[Any, str]]:
    """An engine of version 2 and its address, in this process."""
    app = create_app(known_weights.model(2), weight_version="2")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield app.state.engine, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_the_watcher_knows_a_mixture_from_another_version(
    oracle: Oracle, served: tuple[Any, str]
) -> None:
    engine, url = served
    watcher = Watcher(oracle, 0, url)

    def seen() -> list[tuple[str, int, int]]:
        return [(look.verdict, look.label, look.held) for look in watcher.look()]

    assert seen() == [("right", 2, 2), ("info", 2, -1)]
    name = "model.layers.3.mlp.down_proj.weight"
    known_weights.put(engine.model, {name: known_weights.weights(3)[name]})
    assert seen()[0] == ("mixed", 2, -1)
    known_weights.put(engine.model, known_weights.weights(3))
    look = next(iter(watcher.look()))
    assert (look.verdict, look.label, look.held) == ("mislabelled", 2, 3)
    assert f"'{name}': 3" in look.details
    engine.receiver.state.lose("of a test")
    assert seen() == [("refused", -1, -1), ("info", 2, -1)]


# two updates, from 10 s to 12 s and from 20 s to 22 s
UPDATES = [Update(1, 10.0, 12.0, True), Update(2, 14.0, 15.0, False), Update(3, 20.0, 22.0, True)]


def look(at: float, verdict: str, label: int) -> Look:
    return Look(at, at + 0.1, 0, verdict, label)


JUDGED: dict[str, tuple[list[Look], list[Kill], dict[str, int]]] = {
    "right": ([look(13, "right", 1), look(21, "right", 1), look(23, "right", 3)], [], {}),
    "early": ([look(11, "right", 1), look(21, "right", 3)], [], {}),
    "mixed": ([look(21, "mixed", 1)], [], {"mixed": 1}),
    "soon over": ([look(13, "mixed", 1), look(21, "mixed", 1)], [], {"mixed": 2}),
    "lasting": ([look(13, "mixed", 1), look(23, "mixed", 3)], [], {"mixed": 2, "lasting": 1}),
    "mended": (
        [look(13, "mixed", 1), look(14, "right", 1), look(23, "mixed", 3)],
        [],
        {"mixed": 2},
    ),
    "killed": ([look(13, "mixed", 1), look(23, "mixed", 3)], [Kill(19, 0)], {"mixed": 2}),
    "mislabelled": ([look(13, "mislabelled", 1)], [], {"mislabelled": 1}),
    "stale": ([look(23, "right", 1)], [], {"stale": 1}),
    "says stale": ([look(13, "info", 0), look(23, "info", 1)], [], {"stale": 2, "lasting": 1}),
    "new": ([look(23, "right", 0)], [Kill(21, 0)], {}),
    "not new": ([look(23, "right", 0)], [Kill(21, 1), Kill(19, 0)], {"stale": 1}),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_judge_counts_what_is_wrong(case: str) -> None:
    looks, kills, expected = JUDGED[case]
    found = count(looks, UPDATES, kills)
    assert {name: n for name, n in found.items() if name not in ("right", "info")} == expected


def test_a_recovery_ends_with_an_update_that_began_after_the_kill() -> None:
    kills = [Kill(9.0, 0), Kill(11.0, -1), Kill(15.0, 0), Kill(21.0, 0)]
    assert recoveries(UPDATES, kills) == [3.0, 11.0, 7.0]
