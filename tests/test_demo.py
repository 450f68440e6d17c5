"""What `wsync demo` shows, and what it says where it cannot."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
from support import fakecuda, nursery
from support.engines import NEWEST, SGLANG_VERSIONS, engine_packages, engine_tree

from wsync.demo import cli, launcher
from wsync.demo.trainer import NEW_TOKENS, PROMPT_LENGTH, SENTENCE


def run_demo(
    tmp_path: Path, *options: str, module: str = "support.forked_demo", **environment: str
) -> tuple[dict[str, Any], str]:
    """Its facts, and what it printed."""
    path = tmp_path / "facts.json"
    done = nursery.run(
        [sys.executable, "-P", "-m", module, "--json", str(path), *options],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
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


@pytest.mark.parametrize("shown", ["mode ", "importing ", "update 1 of 50: "])
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


def test_a_text_that_is_not_learnt_is_called_the_models_own(tmp_path: Path) -> None:
    facts, text = run_demo(tmp_path, "--tp", "1", "--pp", "1", "--updates", "1")
    assert (facts["verified"], facts["learnt"]) == (True, False)
    assert "the model has not learnt its text: what it generates is its own" in text


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


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        (("--mode", "distributed"), 2.0, 2.1),
        (("--mode", "distributed", "--broadcast", "bucket"), 3.0, 3.0),
        (("--mode", "mixed"), 2.0, 2.1),
    ],
)
def test_remote_engines_are_sent_what_they_keep_or_everything(
    options: tuple[str, ...], least: float, most: float, tmp_path: Path
) -> None:
    """Two engines, one of two workers, which hold one model together or are sent one each."""
    path = tmp_path / "page.html"
    facts, printed = run_demo(tmp_path, *options, "--updates", "1", "--report", str(path))
    assert facts["verified"]
    (update,) = facts["updates"]
    assert f"mode {options[1]}: weights travel over gloo" in printed
    way = "stock broadcast" if "--broadcast" in options else "gloo"
    assert (
        f"tensor-parallel engine, 2 processes: weights by {way}; " in printed or "mixed" in options
    )
    assert f"HTTP engine at {next(iter(update['paths']))}: weights by {way}; " in printed
    assert update["workers"] == len(facts["deliveries"]) == 3
    assert sum(each["nbytes"] for each in facts["deliveries"]) == update["delivered_nbytes"]
    assert least <= update["delivered_nbytes"] / facts["bytes"] <= most
    page = " ".join(ElementTree.fromstring(path.read_text(encoding="utf-8")).itertext())
    assert f"Verified: {facts['tensors']} tensors, {facts['bytes']:,} bytes" in page
    for delivery in facts["deliveries"]:
        assert delivery["engine"] in page and f"{delivery['nbytes']:,}" in page
    assert "trainer rank 3" in page
    loading = "--broadcast" not in options  # by wsync's receiver, which says when
    assert (f"load of round {update['rounds'] - 1}: " in page) is loading


def test_between_gpus_distributed_mode_travels_by_nccl(tmp_path: Path) -> None:
    """Two trainer ranks whose weights lie on GPUs, and three engine workers with GPUs of their own,
    which are played, as NCCL is."""
    facts, text = run_demo(
        *(tmp_path, "--mode", "distributed", "--pp", "1", "--updates", "2"),
        module="support.played_demo",
        **fakecuda.coherent(devices=5),
        WSYNC_NCCL_LIB=fakecuda.fake_nccl(),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert facts["verified"], facts["problems"]
    assert len(facts["updates"]) == 2
    for update in facts["updates"]:
        assert update["verified"]
        assert update["exchange"] == "nccl"
        assert set(update["paths"].values()) == {"nccl"} and len(update["paths"]) == 2
        assert update["workers"] == 3
        assert update["redundancy"] == 1.0
    assert f"verified: {facts['tensors']} tensors, {facts['bytes']:,} bytes" in text
    assert [engine["checked"].rpartition("; ")[2] for engine in facts["engines"]] == [
        "version 2"
    ] * 2


def sglang_folders(version: str) -> list[str]:
    return [str(engine_tree("sglang", version)), str(engine_packages())]


def check_sglang(
    tmp_path: Path, version: str, model: str, *options: str, **environment: str
) -> None:
    place = os.pathsep.join(sglang_folders(version))
    options = ("--engine", "sglang", "--engine-path", place, "--model", model, *options)
    facts, text = run_demo(tmp_path, *options, "--updates", "2", **environment)
    assert facts["verified"]
    assert [update["redundancy"] for update in facts["updates"]] == [1.0, 1.0]
    workers = facts["updates"][1]["workers"]
    assert workers == int(options[options.index("--engine-tp") + 1])
    # what every worker keeps whole, norms and routers, is little
    assert facts["updates"][1]["delivered_nbytes"] < 1.1 * facts["bytes"]
    assert "what SGLang's own load_weights makes of them; version 2" in text


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[dict[str, str]]:
    """An environment in which workers with SGLang are forked, too."""
    found = nursery.Further(sglang_folders(NEWEST), ["support.sglang_demo"])
    yield found.environment
    found.close()


@pytest.mark.parametrize("mode", ["colocated", "distributed"])
def test_sglangs_workers_are_sent_what_they_keep(
    mode: str, forked_workers: dict[str, str], tmp_path: Path
) -> None:
    """From TP2 x PP2, EP2: each expert goes to the one worker that has it."""
    sizes = ("--engine-tp", "2", "--engine-ep", "2")
    check_sglang(tmp_path, NEWEST, "qwen3-moe", *sizes, "--mode", mode, **forked_workers)


@pytest.mark.slow
@pytest.mark.parametrize("version", SGLANG_VERSIONS)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3", ("--engine-tp", "2")),
        ("qwen3", ("--tp", "1", "--pp", "4", "--engine-tp", "4")),
        ("qwen3-moe", ("--engine-tp", "2")),
        (
            "qwen3-moe",
            ("--tp", "2", "--pp", "1", "--ep", "4", "--engine-tp", "4", "--engine-ep", "4"),
        ),
    ],
)
def test_sglang_of_other_parallel_sizes(
    version: str, model: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    check_sglang(tmp_path, version, model, *options)


def test_what_is_missing_of_sglang_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--engine", "sglang", "--engine-path", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "sglang is not installed" in text
    assert "pip install --no-deps --target sglang-files 'sglang==" in text
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("import package_of_wsync_tests")
    few = ["--tp", "1", "--pp", "1", "--engine-tp", "1", "--engine-path", str(tmp_path)]
    assert cli.main(["--engine", "sglang", *few]) == 1
    text = capsys.readouterr().err
    assert "cannot be imported: No module named 'package_of_wsync_tests'" in text
    assert "--engine-path sglang-files" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--engine-tp", "3"), "--engine-tp 3: must divide 8"),
        (("--model", "qwen3-moe", "--engine-ep", "4"), "--engine-ep 4: must divide 2"),
        (("--engine-ep", "2"), "--engine-ep 2: qwen3 has no experts"),
        (("--engine", "sglang", "--mode", "disk"), "--engine sglang: not in mode disk"),
        (("--broadcast", "bucket"), "--broadcast bucket: not in mode colocated"),
    ],
)
def test_sizes_that_make_no_sense_are_named(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(list(options))
    assert text in capsys.readouterr().err


def test_mode_disk_has_no_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--mode", "disk", "--timeline", "update.svg"])
    assert "--timeline: in mode disk there are no rounds to draw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "fails"),
    [
        ("multiprocessing.forkserver", "ensure_running"),
        ("torch.multiprocessing.spawn", "start_processes"),
    ],
)
def test_a_demo_that_cannot_start_leaves_its_caller_as_it_was(
    module: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    failing = mock.Mock(side_effect=OSError("no memory"))
    monkeypatch.setattr(importlib.import_module(module), fails, failing)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        with pytest.raises(OSError, match="no memory"):
            launcher._run_ranks(mock.Mock(ranks=1), tmp_path)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert child.is_alive()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        child.kill()
        child.join()
