"""Benchmarks that need GPUs, run dry: they have to work on the day that there are some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import fakecuda

ROOT = Path(__file__).resolve().parent.parent


def benchmark(name: str, folder: Path, **environment: str) -> tuple[str, list[dict[str, object]]]:
    """What `python -m benchmarks NAME` in the repository root prints, and its rows."""
    file = folder / "rows.json"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-B", "-m", "benchmarks", name, "--layers", "1", "--json", str(file)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = file.read_text().splitlines() if file.exists() else []
    return done.stdout, [json.loads(row) for row in rows]


def test_every_part_runs_and_checks_its_bytes_without_a_gpu(tmp_path: Path) -> None:
    text, rows = benchmark("gpu", tmp_path, **fakecuda.logged(tmp_path))
    assert "a dry run: the figures say nothing" in text
    parts = [str(row["case"]).partition(":")[0] for row in rows]
    assert set(parts) == {"memory", "order", "copy", "quantise", "update"}
    assert parts.count("order") == 2
    assert all(row["verified"] for row in rows)


def test_without_a_driver_it_says_why_it_measures_nothing(tmp_path: Path) -> None:
    text, rows = benchmark("gpu", tmp_path, WSYNC_CUDA_LIB="/nowhere/libcuda.so.1")
    assert "/nowhere/libcuda.so.1" in text
    assert rows == []


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-c", code, *arguments],
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=True,
    )


def test_rounds_by_nccl_are_verified_and_counted_without_a_gpu(tmp_path: Path) -> None:
    text, rows = benchmark("nccl", tmp_path, WSYNC_CUDA_LIB="/nowhere/libcuda.so.1")
    assert "nccl: 4 played GPUs and a played NCCL; a dry run" in text
    assert len(rows) == 7
    assert all(row["verified"] and row["dry"] for row in rows)
    hosts = [row for row in rows if "processor" in str(row["case"])]
    assert [row["calls"] for row in hosts] == [pytest.approx(5, abs=0.1)] * 3
    assert [row["repeated_nbytes"] for row in hosts] == [0, 0, 0]
    # what two want is there once more, what all want twice more
    again = [int(str(row["peer_repeated_nbytes"])) for row in hosts]
    assert again[0] == 0 < 4 * again[1] == again[2]


def test_the_picture_in_the_readme_is_that_of_the_rows_beside_it() -> None:
    text = (ROOT / "benchmarks/update.json").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert all(row["verified"] for row in rows)
    drawn = run("from benchmarks.chart import main; main()", "benchmarks/update.json").stdout
    assert (ROOT / "benchmarks/update.svg").read_text() == drawn
    assert "(benchmarks/update.svg)" in (ROOT / "README.md").read_text()
    bars = [bar.get("class") for bar in ElementTree.fromstring(drawn).iter() if "rect" in bar.tag]
    assert bars.count("slime") >= 3 < bars.count("wsync")
