"""The list of what only GPUs can show: that it can be followed, and what it says of figures."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import fakecuda

ROOT = Path(__file__).resolve().parent.parent


def python(*arguments: str, status: int = 0, **environment: str) -> str:
    """What a program in the repository root prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-B", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def commands() -> list[str]:
    code = "import json; from benchmarks.gpu_checks import CHECKS as all"
    found: list[str] = json.loads(
        python("-c", f"{code}; print(json.dumps([check.command for check in all]))")
    )
    return found


def test_the_table_of_the_readme_is_the_list() -> None:
    table = python("-c", "from benchmarks import gpu_checks; print(gpu_checks.table())")
    assert table in (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")


def test_commands_name_what_there_is(commands: list[str]) -> None:
    parts = python("-m", "benchmarks", "--help")
    for command in commands:
        for part in re.findall(r"--only (\w+)", command):
            assert part in parts.partition("--only {")[2].partition("}")[0].split(",")
        for file, words in re.findall(r'(tests/\w+\.py)(?: -k "?([\w ]+))?', command):
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            for word in words.split(" or ") if words else []:
                assert any(test.startswith("test_") and word in test for test in tests), command


def test_without_a_gpu_it_is_listed_with_the_reason(commands: list[str]) -> None:
    text = python("-m", "benchmarks", "gpu", "--checklist", WSYNC_CUDA_LIB="/nowhere/libcuda.so.1")
    first, *rest = text.splitlines()
    assert "/nowhere/libcuda.so.1" in first and first.endswith("nothing is run")
    assert [line.strip() for line in rest if line.strip() in commands] == commands
    assert rest[-1] == "0 held, 0 missed"


JUDGED = """
import json, sys
from benchmarks.gpu_checks import CHECKS, Done
for what, status, output, rows, plain in json.load(sys.stdin):
    check, = [check for check in CHECKS if check.what.startswith(what)]
    print(json.dumps([good for _, good in check.judge(Done(status, output, rows, plain))]))
"""


def judged(*cases: tuple[Any, ...]) -> list[list[bool]]:
    """What the checks whose texts begin so say of output, rows, and rows without settings."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    given = json.dumps([(what, 0, *rest) for what, *rest in cases])
    done = subprocess.run(
        [sys.executable, "-B", "-c", JUDGED],
        env=inherited,
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_figures_are_held_against_thresholds() -> None:
    def made(make: float, mapped: float) -> list[dict[str, Any]]:
        times = {"make": make, "map": mapped}
        return [{"case": "memory: 1024 MiB made and mapped", "times": times}]

    def update(name: str, seconds: float) -> list[dict[str, Any]]:
        facts = {"bytes": 61.06e9, "seconds": seconds, "device": {"name": name}}
        return [{"case": "update: 18867 to 531 tensors, 1024 MiB", **facts}]

    def turn(seconds: float) -> list[dict[str, Any]]:
        return [{"case": "order: a turn with 4 KiB", "seconds": seconds}]

    parked = {"case": "the first update after it was parked", "bytes": 10}
    one = "one channel, as Megatron sets it, holds"
    assert judged(
        ("memory is shared", "", made(0.0029, 0.0009), []),
        ("memory is shared", "", made(0.0031, 0.0011), []),
        ("updates between", "", update("NVIDIA H200", 0.079), []),
        ("updates between", "", update("NVIDIA H200", 0.081), []),
        ("updates between", "", update("another", 9.0), []),
        (one, "", turn(0.44), turn(0.3)),
        (one, "", turn(0.46), turn(0.3)),
        (one, "", turn(0.3), []),
        ("a parked exchange", "", [{**parked, "returned_nbytes": 11, "ratio": 0.7}], []),
        ("a parked exchange", "", [{**parked, "returned_nbytes": 9, "ratio": 0.6}], []),
        ("NCCL is found", "NCCL                 found    2.28.9", [], []),
        ("NCCL is found", "NCCL                 missing  no NCCL", [], []),
        ("streams of two", "...\n3 passed in 2s\n", [], []),
        ("streams of two", "...\n3 skipped in 2s\n", [], []),
        ("streams of two", "...\n1 failed, 2 passed in 2s\n", [], []),
        ("a stream that waits", "", [], []),
    ) == [
        *([True, True], [False, False]),
        *([True], [False], [True]),
        *([True], [False], [False]),
        *([True, True], [False, False]),
        *([True], [False]),
        *([True], [False], [False]),
        [False],
    ]


RUN = """
from unittest import mock
from benchmarks import gpu_checklist
from benchmarks.gpu_checks import Check, rows
def size(row): return row["bytes"] / 2**20
memory = "python -m benchmarks gpu --only memory"
checks = [
    Check("held", memory, "", "", judge=rows("8 MiB made", size, 8, 8)),
    Check("missed", memory, "", "", judge=rows("8 MiB made", size, 9)),
    Check("failing", "echo why; exit 3", "", ""),
    Check("endless", "sleep 1000", "", ""),
    Check("too many", "exit 1", "", "", gpus=2),
]
run, commands = gpu_checklist._run, []
def counted(command, plain):
    commands.append(command)
    gpu_checklist.SECONDS = 0.2 if "sleep" in command else 200.0
    return run(command, plain)
with mock.patch.multiple(gpu_checklist, _gpus=lambda: (1, ""), _run=counted):
    print(gpu_checklist.run(0, checks), commands == [check.command for check in checks[1:4]])
"""


def test_commands_are_run_once_and_judged(tmp_path: Path) -> None:
    lines = [line.strip() for line in python("-c", RUN, **fakecuda.logged(tmp_path)).splitlines()]
    assert lines[-1] == "3 True"
    assert lines[-2] == "1 held, 3 missed"
    assert lines.count("held: memory: 8 MiB made and mapped: 8") == 1
    assert lines.count("MISSED: memory: 8 MiB made and mapped: 8") == 1
    assert lines.count("held: exit status 0") == 2
    assert "why" in lines and "MISSED: exit status 3" in lines
    assert "ended after 0 s" in lines and "MISSED: exit status -9" in lines
    assert not any("exit status 1" in line for line in lines)


def test_a_number_that_is_not_there_is_named() -> None:
    python("-m", "benchmarks", "gpu", "--checklist", "99", status=1)
    python("-m", "benchmarks", "plan", "--checklist", status=2)
