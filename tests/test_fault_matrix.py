"""Every phase of an update with something going wrong in it; see support/fault_lab.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fault_lab import Cell

Try = Callable[[Cell, str], dict[str, Any]]
HERE = Path(__file__).parent

# one of each phase, and of each kind of process and fault
QUICK: list[Cell] = [
    ("open", "worker0", "kill"),
    ("attach", "rank1", "raise"),
    ("round", "worker1", "stop"),
    ("done", "rank0", "kill"),
    ("prepared", "worker1", "raise"),
    ("commit", "rank1", "kill"),
    ("close", "worker1", "kill"),
]


@pytest.fixture(scope="module")
def attempt(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Try]:
    with _lab(request, tmp_path_factory.mktemp("lab")) as started:
        yield started


@contextmanager
def _lab(request: pytest.FixtureRequest, folder: Path) -> Iterator[Try]:
    """Tries cells in one process that has imported what they need; reports at the end."""
    log = folder / "stderr"
    report: list[dict[str, Any]] = []
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "support.fault_lab"],
            env={**os.environ, "PYTHONPATH": str(HERE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as lab,
    ):

        def attempt_one(cell: Cell, exchange: str) -> dict[str, Any]:
            assert lab.stdin is not None and lab.stdout is not None
            lab.stdin.write(json.dumps([*cell, exchange]) + "\n")
            lab.stdin.flush()
            line = lab.stdout.readline()
            assert line, log.read_text(errors="replace")[-2000:]
            report.append(json.loads(line))
            return report[-1]

        yield attempt_one
        assert lab.stdin is not None
        lab.stdin.close()
    _show(report, request.config.get_terminal_writer())


def _show(report: list[dict[str, Any]], terminal: Any) -> None:
    """The table: a line for each phase and process, a word for each fault."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in report:
        word = row["how"] + (" FAILED" if row["wrong"] else "")
        lines.setdefault((row["phase"], row["who"]), []).append(word)
    terminal.line()
    for (phase, who), words in lines.items():
        terminal.line(f"fault: {phase:<9} {who:<8} {', '.join(words)}")
    survived = sum(not row["wrong"] for row in report)
    terminal.line(f"faults: {len(report)} cells tried, {survived} survived")


def _name(cell: Cell) -> str:
    return "-".join(cell)


def _skip_what_gpus_do_not_read() -> None:
    if os.environ.get("WSYNC_DEVICE"):
        pytest.skip("GPUs do not read what is lent")


@pytest.mark.parametrize("cell", QUICK, ids=_name)
def test_an_update_survives(cell: Cell, attempt: Try) -> None:
    found = attempt(cell, "auto")
    assert found["wrong"] == [], found


# those in which something else happens where memory is lent; rank 2 has no worker
DIRECT: list[Cell] = [
    ("lend", "rank0", "kill"),
    ("lend", "rank2", "stop"),
    ("round", "worker1", "kill"),
    ("done", "rank1", "raise"),
]


@pytest.mark.parametrize("cell", DIRECT, ids=_name)
def test_an_update_of_lent_memory_survives(cell: Cell, attempt: Try) -> None:
    _skip_what_gpus_do_not_read()
    found = attempt(cell, "direct")
    assert found["wrong"] == [], found
