"""What `wsync demo` shows, and what it says where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wsync.demo import cli


def run_demo(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Its facts, and what it printed."""
    path = tmp_path / "facts.json"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wsync", "demo", "--json", str(path), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_mode_disk_updates_all_engines_and_a_late_one(model: str, tmp_path: Path) -> None:
    facts, text = run_demo(tmp_path, "--mode", "disk", "--model", model, "--updates", "2")
    assert facts["verified"]
    assert facts["mode"] == "disk"
    assert [update["version"] for update in facts["updates"]] == ["1", "2"]
    names = [engine["name"].split(" ")[0] for engine in facts["engines"]]
    assert names == ["HTTP", "tensor-parallel", "late"]
    assert all("version 2" in engine["checked"] for engine in facts["engines"])
    assert "late engine, started from weight_v000002: " in text


def test_mode_disk_has_no_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--mode", "disk", "--timeline", "update.svg"])
    assert "--timeline: in mode disk there are no rounds to draw" in capsys.readouterr().err
