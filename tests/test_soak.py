"""Updates and connections without end; see support/fault_soak.py and support/connection_soak.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", f"support.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=7000,
    )


@pytest.mark.parametrize(
    "updates", [pytest.param(30), pytest.param(10_000, marks=[pytest.mark.slow])]
)
@pytest.mark.timeout(7200)
def test_a_long_run_is_right_and_stays_flat(
    updates: int, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run("fault_soak", str(updates))
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
    done = run("connection_soak", connections, "--seed", "1")
    with capfd.disabled():
        print("\n" + done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-40000:]
    assert f"soak: {connections} connections of" in done.stdout
