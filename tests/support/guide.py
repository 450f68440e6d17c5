"""What the guide says to type, as it is written there: its way to an update of a whole server on a
CPU, and others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.server_models import PATIENCE

import wsync

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "wsync/guide"
PAGES = [ROOT / "README.md", ROOT / "wsync/README.md", *sorted(GUIDE.glob("*.md"))]
MODEL = "tiny-qwen3"  # what the script calls its folder
_SERVERS = "SGLang and vLLM on a CPU"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def all_blocks() -> list[str]:
    """What README and guide say to type."""
    return [text for page in PAGES for _, text in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def blocks(language: str, title: str = _SERVERS) -> list[str]:
    """What a section says to type."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    (section,) = re.findall(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)",
        "\n## \n".join(texts),
        re.DOTALL | re.MULTILINE,
    )
    return [block for written_in, block in _BLOCK.findall(section) if written_in == language]


def execute(title: str, changes: Mapping[str, object], **names: object) -> dict[str, Any]:
    """Runs a section's code in this process, with these names, and these words for others that it
    has; the names that there are then."""
    (code,) = blocks("python", title)
    for word, other in changes.items():
        assert word in code
        code = code.replace(word, str(other))
    given = {"wsync": wsync, **names}
    exec(code, given)
    return given


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
