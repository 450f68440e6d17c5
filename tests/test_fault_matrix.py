"""Every phase of an update with something going wrong in it; see support/fault_lab.py.

`pytest -m slow tests/test_fault_matrix.py` tries the whole table and prints it; with
WSYNC_FAULT_REPORT=FILE every cell becomes a JSON line of that file.  What is tried elsewhere:
frames that no peer should send in C (fuzz_frame.c,
test_channel.c); every system call and allocation failing in turn (test_faults.py);
engines' APIs that stall or are not there (test_trainer_calls.py); loaders that fail
(test_receiver.py); the same with sharded Megatron models (test_update_ranks.py).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import fakecuda
from support.engines import FIRST_GPU
from support.fault_cells import PHASES, RANKS, Cell, cells

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
    with _lab(request, tmp_path_factory.mktemp("lab"), {}) as started:
        yield started


@pytest.fixture(scope="module")
def attempt_on_gpus(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Try]:
    """The same with a played GPU for each rank; the first two are also of workers."""
    folder = tmp_path_factory.mktemp("gpus")
    board = {"WSYNC_FAKE_CUDA_BOARD": str(folder / "board"), FIRST_GPU: "0"}
    with _lab(request, folder, fakecuda.coherent(devices=RANKS) | board) as started:
        yield started


@contextmanager
def _lab(
    request: pytest.FixtureRequest, folder: Path, environment: Mapping[str, str]
) -> Iterator[Try]:
    """Tries cells in one process that has imported what they need; reports at the end."""
    log = folder / "stderr"
    report: list[dict[str, Any]] = []
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "support.fault_lab"],
            env={**os.environ, **environment, "PYTHONPATH": str(HERE)},
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
    if name := os.environ.get("WSYNC_FAULT_REPORT"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in report))


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


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in cells() if cell not in QUICK], ids=_name)
def test_an_update_survives_everything(cell: Cell, attempt: Try) -> None:
    found = attempt(cell, "auto")
    assert found["wrong"] == [], found


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rank0", "rank1", "worker0"])
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
@pytest.mark.parametrize("phase", ["round", "prepared"])
def test_an_update_over_gloo_survives(phase: str, how: str, who: str, attempt: Try) -> None:
    found = attempt((phase, who, how), "gloo")
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
@pytest.mark.parametrize(
    ("phase", "who"),
    [
        *itertools.product(["lend"], ["rank1", "rank2"]),
        *itertools.product(["attach", "round", "done", "prepared", "commit"], ["rank1", "worker0"]),
    ],
)
def test_an_update_of_lent_memory_survives_everything(
    phase: str, who: str, how: str, attempt: Try
) -> None:
    cell = (phase, who, how)
    _skip_what_gpus_do_not_read()
    found = attempt(cell, "direct")
    assert found["wrong"] == [], found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
@pytest.mark.parametrize("who", ["rank0", "rank1", "worker0"])
@pytest.mark.parametrize("phase", ["round", "done"])
def test_an_update_of_lent_memory_and_rings_survives(
    phase: str, who: str, how: str, attempt: Try
) -> None:
    cell = (phase, who, how)
    _skip_what_gpus_do_not_read()
    found = attempt(cell, "mixed")
    assert found["wrong"] == [], found


# those in which a GPU's memory is on its way, or is read
GPU: list[Cell] = [
    ("lend", "rank2", "kill"),
    ("round", "worker1", "kill"),
    ("done", "worker0", "stop"),
    ("done", "rank1", "kill"),
]
STEPS = ("open", "attach", "lend", "round", "done", "prepared", "commit", "close")


def _place(cell: Cell) -> str:
    """A worker that has committed keeps allocations open until it hears of the next update, and so
    does their owner, which would count as a loss."""
    return "in pieces" if cell[0] in ("commit", "close") else "by handle"


@pytest.mark.parametrize("cell", GPU, ids=_name)
def test_an_update_of_memory_lent_on_gpus_survives(cell: Cell, attempt_on_gpus: Try) -> None:
    found = attempt_on_gpus(cell, _place(cell))
    assert found["wrong"] == [], found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        cell
        for cell in itertools.product(STEPS, ("rank1", "rank2", "worker0"), ("kill", "stop"))
        if cell not in GPU
        # a rank without workers comes by few of them, and workers are not asked to lend
        and (cell[1] != "rank2" or cell[0] in ("open", "lend", "close"))
        and (cell[1] != "worker0" or cell[0] != "lend")
    ],
    ids=_name,
)
def test_an_update_of_memory_lent_on_gpus_survives_everything(
    cell: Cell, attempt_on_gpus: Try
) -> None:
    found = attempt_on_gpus(cell, _place(cell))
    assert found["wrong"] == [], found


def test_every_phase_is_tried_in_every_run() -> None:
    assert {phase for phase, _, _ in QUICK} == set(PHASES)
