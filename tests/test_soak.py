"""Updates without end, with reconnects and random faults; see support/fault_soak.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "updates", [pytest.param(30), pytest.param(10_000, marks=[pytest.mark.slow])]
)
@pytest.mark.timeout(7200)
def test_a_long_run_is_right_and_stays_flat(
    updates: int, capfd: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "support.fault_soak", str(updates)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=7000,
    )
    with capfd.disabled():
        print("\n" + done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"soak: {updates} updates in" in done.stdout
    assert " 0 reported" not in done.stdout
