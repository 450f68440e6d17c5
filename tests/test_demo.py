"""What `wsync demo` shows, and what it says where it cannot."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import nursery

from wsync.demo.trainer import NEW_TOKENS, PROMPT_LENGTH, SENTENCE


def run_demo(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Its facts, and what it printed."""
    path = tmp_path / "facts.json"
    done = nursery.run(
        [sys.executable, "-P", "-m", "support.forked_demo", "--json", str(path), *options],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts, done.stdout


def test_it_runs_in_the_repository_root(tmp_path: Path) -> None:
    """As the README has it: beside a folder that is called wsync and is not what is installed."""
    (tmp_path / "wsync").mkdir()
    (tmp_path / "wsync" / "__init__.py").write_text("raise RuntimeError('the source folder')")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [Path(sys.executable).with_name("wsync"), "demo", "--pp", "1", "--updates", "1"],
        env=inherited,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: " in done.stdout


def living(session: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its, *_ = path.read_text().rpartition(")")[2].split()
            if int(its) == session and state != "Z":
                found.append(path.parent.name)
    return found


@pytest.mark.parametrize("shown", ["importing ", "update 1 of 50: "])
def test_ctrl_c_ends_it_without_a_traceback_and_leaves_no_process(shown: str) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "wsync", "demo", "--updates", "50", "--pp", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    assert any(line.startswith(shown) for line in demo.stdout)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does it
    _, text = demo.communicate(timeout=100)
    assert (demo.returncode, text) == (130, "\nwsync demo: interrupted\n")
    end = time.monotonic() + 30
    while living(demo.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_engines_say_the_text_when_it_is_learnt(tmp_path: Path) -> None:
    facts, text = run_demo(tmp_path, "--model", "qwen3-moe", "--tp", "1", "--pp", "1", "--ep", "1")
    assert (facts["verified"], facts["learnt"]) == (True, True)
    for engine in facts["engines"]:
        assert engine["after"] == SENTENCE[: PROMPT_LENGTH + NEW_TOKENS] != engine["before"]
    assert "its own" not in text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_mode_disk_updates_all_engines_and_a_late_one(model: str, tmp_path: Path) -> None:
    facts, text = run_demo(tmp_path, "--mode", "disk", "--model", model, "--updates", "2")
    assert facts["verified"]
    assert facts["mode"] == "disk"
    assert [update["version"] for update in facts["updates"]] == ["1", "2"]
    names = [engine["name"].split(" ")[0] for engine in facts["engines"]]
    assert names == ["engine", "engine", "late"]
    assert all("version 2" in engine["checked"] for engine in facts["engines"])
    assert "late engine, started from weight_v000002: " in text


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "distributed"),
        ("--mode", "mixed"),
    ],
)
def test_remote_engines_are_sent_a_model_each(options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    facts, printed = run_demo(tmp_path, *options, "--updates", "1", "--report", str(path))
    assert facts["verified"]
    (update,) = facts["updates"]
    assert f"mode {options[1]}: weights travel over gloo" in printed
    way = "gloo"
    first, other = update["paths"]
    assert f"engine 1 at {first}: weights by {way}; " in printed
    way = "shared memory" if "mixed" in options else way
    assert f"engine 2 at {other}: weights by {way}; " in printed
    assert update["workers"] == 2
    assert update["delivered_nbytes"] == 2 * facts["bytes"]
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    page = " ".join(root.itertext())
    assert f"{update['delivered_nbytes']:,}" in page and "verified" in page
    assert "trainer rank 3" in page
    titles = " ".join(element.get("title", "") for element in root.iter())
    assert f"load of round {update['rounds'] - 1}: " in titles
