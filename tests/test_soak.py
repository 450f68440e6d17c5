"""Updates without end, with reconnects and random faults; see support/fault_soak.py and cycles.py.

`pytest -m slow tests/test_soak.py` is short; WSYNC_CYCLES says how often a trainer connects and
lets go (40 times).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cycles import WAYS

CYCLES = int(os.environ.get("WSYNC_CYCLES") or 40)


def run(module: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", f"support.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


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
