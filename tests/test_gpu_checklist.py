"""The list of what only GPUs can show: that it can be followed, and what it says of figures."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
