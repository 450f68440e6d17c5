"""What `wsync demo` shows, and what it says where it cannot."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from support import nursery

import wsync
from wsync.demo import trainer
from wsync.demo.engines.transformers import checksum
from wsync.demo.trainer import NEW_TOKENS, PROMPT_LENGTH, SENTENCE


def run_demo(*options: str) -> str:
    """What it printed."""
    done = nursery.run(
        [sys.executable, "-P", "-m", "support.forked_demo", *options],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    assert re.search(r"compared \d+ tensors of 2 workers, .* no differences", done.stdout)


def living(session: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its, *_ = path.read_text().rpartition(")")[2].split()
            if int(its) == session and state != "Z":
                found.append(path.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["importing ", "starting the engines", "update 1 of 50: "])
def test_ctrl_c_ends_it_without_a_traceback_and_leaves_nothing(shown: str, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "wsync", "demo", "--updates", "50", "--pp", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": os.fspath(tmp_path)},
    )
    assert demo.stdout is not None
    assert any(line.startswith(shown) for line in demo.stdout)
    time.sleep(0.5)  # while an engine starts, its model is in a folder
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does it
    _, text = demo.communicate(timeout=100)
    assert (demo.returncode, text) == (130, "\nwsync demo: interrupted\n")
    end = time.monotonic() + 30
    while living(demo.pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [*tmp_path.iterdir()] == []


def test_engines_say_the_text_when_it_is_learnt() -> None:
    text = run_demo("--model", "qwen3-moe", "--tp", "1", "--pp", "1", "--ep", "1")
    said = re.findall(r"^engine [12].* says '(.*)'$", text, re.MULTILINE)
    learnt = SENTENCE[: PROMPT_LENGTH + NEW_TOKENS]
    assert [each == learnt for each in said] == [False, False, True, True]


@pytest.mark.parametrize(("mode", "model"), [("distributed", "qwen3-moe"), ("mixed", "qwen3")])
def test_remote_engines_are_sent_a_model_each(mode: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    options = ("--mode", mode, "--model", model, "--updates", "1", "--report", str(path))
    printed = run_demo(*options)
    assert f"mode {mode}: weights travel over gloo" in printed
    ways = re.findall(r"^engine [12], weights by (\w+), says", printed, re.MULTILINE)
    assert ways == ["gloo", "ring" if mode == "mixed" else "gloo"]
    (nbytes,) = re.findall(r"verified: \d+ tensors, ([0-9,]+) bytes", printed)
    delivered = f"{2 * int(nbytes.replace(',', '')):,}"
    assert f"{delivered} bytes to 2 workers" in printed
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    page = " ".join(root.itertext())
    assert delivered in page and "verified" in page
    assert "trainer rank 3" in page
    cells = [cell.text for cell in root.iter("td")]
    title = f"load of round {int(cells[cells.index('rounds') + 1] or '') - 1}: "
    assert any(title in element.get("title", "") for element in root.iter())


def test_mode_disk_writes_checkpoints_that_engines_load() -> None:
    printed = run_demo("--mode", "disk", "--pp", "1", "--updates", "2")
    assert "mode disk: weights travel as checkpoints in a folder" in printed
    assert re.findall(r"^engine [12], weights by (\w+), says", printed, re.M) == ["disk", "disk"]
    assert "verified: " in printed


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "/model_info": {"weight_version": "1"},
        "/weights_checker": {"ranks": [{"checksums": {"a": checksum(torch.ones(3)), "c": "0"}}]},
        "/wsync/logits": {"logits": [[0.5]]},
    }
    monkeypatch.setattr(trainer, "_post", lambda _, path, **__: answers[path])
    expected = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}

    def wrong(version: str, logits: float) -> list[str]:
        ids = torch.zeros(1, 1, dtype=torch.int64)
        report = wsync.Report(version=version)
        return trainer._wrong("url", report, expected, ids, torch.tensor([[logits]]))

    assert wrong("1", 0.5) == ["update 1, url: b", "update 1, url: c"]
    assert wrong("2", 0.6) == [
        *("update 2, url: version '1'", "update 2, url: b", "update 2, url: c"),
        "update 2, url: logits differ by 1.00e-01",
    ]
