"""Updates without end, with reconnects and random faults; see support/fault_soak.py and cycles.py.

`pytest -m slow tests/test_soak.py` is short; WSYNC_CYCLES says how often a trainer connects and
lets go (40 times).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cycles import WAYS, names_one_of

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
