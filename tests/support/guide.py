"""What the guide says to type, as it is written there: its way to an update of a whole server on a
CPU, and others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.server_models import PATIENCE

MODEL = "tiny-qwen3"  # what the script calls its folder
_GUIDE = Path(__file__).parents[2] / "wsync/README.md"
_SERVERS = "SGLang and vLLM on a CPU"


def blocks(language: str, title: str = _SERVERS) -> list[str]:
    """What a section says to type."""
    _, found, rest = _GUIDE.read_text(encoding="utf-8").partition(f"## {title}\n")
    assert found
    section = rest.partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def run(title: str, file: Path) -> str:
    """Saves a section's program as a file and runs it there; what it prints."""
    (script,) = blocks("python", title)
    file.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, file.name],
        cwd=file.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def update(engine: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Runs its script where the model is, and compares what it prints."""
    (script,) = blocks("python")
    file = folder / "update.py"
    file.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", str(file), engine],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^(before|after): *(.*)$", done.stdout, re.MULTILINE))
    said = {moment: line.split(" expected: ") for moment, line in found.items()}
    assert said["before"][0] == said["before"][1] != said["after"][0] == said["after"][1]
    assert re.search(r"^version 7: 25 tensors, ", done.stdout, re.MULTILINE)
