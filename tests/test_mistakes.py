"""What somebody who is new here gets wrong, and what is said about it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import guide

import wsync
from wsync.demo import cli, cpu_server
from wsync.disk import DiskSync, newest
from wsync.handles.base import handles_of
from wsync.handles.sglang_http import HttpHandle
from wsync.layout import from_tensors


def test_a_source_folder_that_hides_the_package_is_named(tmp_path: Path) -> None:
    """As `python -c`, `python -m`, notebooks and Ray's workers find it before what is installed."""
    folder = tmp_path / "wsync"
    folder.mkdir()
    for name in ("__init__.py", "__init__.pyi"):
        shutil.copy(Path(wsync.__file__).with_name(name), folder)
    done = subprocess.run(
        [sys.executable, "-c", "import wsync"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {folder} is a source folder without the compiled module")
    assert "run Python in another folder, or with -P. Ray's workers import from" in last


def test_one_url_is_not_a_list_of_engines() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=r"expected a list, \['http://x'\]"):
        wsync.connect({}, engines="http://x")


def test_an_engine_that_is_given_twice_is_named(server: str) -> None:
    weights = {"w": torch.ones(1)}
    with pytest.raises(wsync.InvalidArgumentError, match=f"engine {server} is given twice"):
        wsync.connect(weights, engines=[server, server])
    handle = wsync.handle(server)
    with pytest.raises(wsync.InvalidArgumentError, match="is given twice"):
        wsync.Sync(from_tensors(weights), [handle, handle])


def test_an_engine_under_two_urls_is_named(server: str) -> None:
    weights = {"w": torch.ones(1)}
    port = server.rpartition(":")[2]
    for other in (f"http://localhost:{port}", f"{server}/", f"http://0.0.0.0:{port}"):
        found = "" if other.rstrip("/") == server else f": {server} is the same engine"
        text = re.escape(f"engine {other.rstrip('/')} is given twice{found}")
        with pytest.raises(wsync.InvalidArgumentError, match=f"^{text}$"):
            wsync.connect(weights, engines=[server, other])


def test_an_engine_is_known_by_what_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"http://a:1": "x", "http://b:1": "y", "http://c:1": "x", "http://d:1": None}
    monkeypatch.setattr(
        HttpHandle,
        "_info",
        lambda self, *_: {"tp_size": 1, "instance": told.get(self.name.lower())},
    )
    assert len(handles_of(["http://a:1", "http://b:1", "http://d:1"], timeout=1)) == 3
    with pytest.raises(wsync.InvalidArgumentError, match="c:1 is given twice: http://a:1 is the"):
        handles_of(["http://a:1", "http://b:1", "http://c:1"], timeout=1)
    with pytest.raises(wsync.InvalidArgumentError, match="d:1 is given twice"):
        handles_of(["http://d:1", "http://d:1/"], timeout=1)
    assert len(handles_of(["http://127.0.0.1:1", "http://127.0.0.2:1"], timeout=1)) == 2


@pytest.mark.parametrize("weights", [{}, {"a": torch.empty(0, 4)}])
def test_weights_without_an_element_are_refused(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As a filter leaves them that no name has passed: a stock engine would be sent nothing."""
    text = f"there is nothing to send: the trainer ranks have {len(weights)} tensor"
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        wsync.connect(weights, [Engine()])
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        DiskSync(weights, folder=tmp_path)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_is_not_installed_is_named(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_server, "importable", lambda name: name != engine)
    assert cpu_server.main([engine, "--model", str(tmp_path / "made")]) == 1
    said = capsys.readouterr().err
    assert f"wsync serve: the Python package '{engine}' is not installed" in said
    (version,) = re.findall(rf"{engine}(?:-cpu)?==[0-9.]+", said)
    assert any(version in block for block in guide.blocks("sh"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "own", "cores"),
    [
        ([], None, "0"),
        (["--tp", "2"], None, "0|0"),
        (["--tensor-parallel-size=2", "--pp-size", "2"], None, "0|0|0|0"),
        (["--tp-size", "2"], "0|1", "0|1"),
    ],
)
def test_each_worker_of_a_server_has_cores(
    words: list[str],
    own: str | None,
    cores: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """SGLang ends where a worker has none."""
    name, found = "SGLANG_CPU_OMP_THREADS_BIND", dict[str, str]()
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr(cpu_server, "importable", lambda name: True)
    monkeypatch.setattr(os, "execve", lambda program, argv, environment: found.update(environment))
    cpu_server.main(["sglang", "--model", str(tmp_path), *words])
    assert found[name] == cores


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("deadline", "3"), ("deadline", True), ("threads", 2.5), ("threads", True)),
        *(("round_nbytes", "1M"), ("ring_nbytes", False)),
    ],
)
def test_an_option_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(
        wsync.InvalidArgumentError,
        match=rf"{name}={value!r} is (not an integer|not a number of seconds)$",
    ):
        wsync.Options(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("threads", 65, "over 64"),
        ("bucket_nbytes", -1, "negative"),
    ],
)
def test_an_option_that_cannot_be_is_named_before_an_engine_is_asked_for_anything(
    name: str, value: Any, text: str
) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=text) as error:
        wsync.Options(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


def test_options_that_are_none_are_named() -> None:
    source = from_tensors({"w": torch.ones(1)})
    wrong: Any = {"deadline": 3}
    text = r"options=\{'deadline': 3\}: expected wsync\.Options\(...\)"
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        wsync.Sync(source, [], options=wrong)
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        DiskSync(source, folder="/nowhere", options=wrong)
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        wsync.UpdateWeightFromDistributed(
            SimpleNamespace(), source, None, model_name="any", options=wrong
        )
    assert wsync.Options(directory="here").directory == os.path.abspath("here")
    with pytest.raises(wsync.InvalidArgumentError, match="directory=3 is not a path"):
        wsync.Options(directory=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", "2"),
        ("keep", 1.5),
    ],
)
def test_what_a_disk_cannot_take_is_named(name: str, value: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"folder": tmp_path, name: value}
    with pytest.raises(wsync.InvalidArgumentError, match=rf"{name}={value!r}"):
        DiskSync({"w": torch.ones(1)}, **arguments)


def test_a_disk_takes_torchs_dtypes(tmp_path: Path) -> None:
    with DiskSync({"w": torch.ones(3)}, folder=tmp_path, dtype=torch.bfloat16) as sync:
        sync.update(version=1)
    (file,) = newest(tmp_path).glob("*.safetensors")
    assert torch.equal(load_file(file)["w"], torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("version", [7, "step-7"])
def test_a_version_in_the_place_of_weights_is_named(version: Any, tmp_path: Path) -> None:
    with DiskSync({"w": torch.ones(1)}, folder=tmp_path) as sync:
        text = f"name; to give a version, pass version={version!r}$"
        with pytest.raises(wsync.InvalidArgumentError, match=text):
            sync.update(version)


class Engine:
    """One of an own make, which is asked for nothing."""

    name, workers, load_formats = "engine", 1, ()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_running_requests_are_not_kept_without_their_cache() -> None:
    text = "pause_mode='in_place' keeps .*flush_cache=False with it"
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        wsync.Options(pause_mode="in_place")


@pytest.mark.parametrize(
    "options",
    [
        {"round_nbytes": 1 << 20},
        {"ring_nbytes": 1 << 20},
        {"delivery": "stock"},
        {"broadcast": "bucket"},
        {"backend": "gloo"},
        {"exchange": "gloo"},
        {"park": True},
        {"directory": "/tmp"},
    ],
)
def test_an_option_that_no_disk_takes_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(wsync.InvalidArgumentError, match=f"^{name}={options[name]!r} "):
        DiskSync({"w": torch.ones(1)}, folder=tmp_path, options=wsync.Options(**options))


def test_what_an_updater_is_told_of_engines_is_named() -> None:
    source = from_tensors({"w": torch.ones(1)})
    updater = wsync.UpdateWeightFromTensor(SimpleNamespace(), source, None, model_name="any")
    with pytest.raises(wsync.InvalidArgumentError, match=r"engine_gpu_offsets=\['0'\]"):
        updater.connect_rollout_engines([Engine()], None, None, ["0"])  # type: ignore[list-item]


def test_what_an_updater_is_made_of_is_named() -> None:
    source = from_tensors({"w": torch.ones(1)})
    with pytest.raises(wsync.InvalidArgumentError, match="quantise='fp8'"):
        wsync.UpdateWeightFromDistributed(
            SimpleNamespace(),
            source,
            None,
            model_name="any",
            quantization_config="fp8",
        )


def test_a_report_that_cannot_be_written_is_said_before_the_demo_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--report", str(tmp_path / "no" / "page.html")])
    assert "No such file or directory" in capsys.readouterr().err


def test_a_demo_beside_transformers_5_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.19.0")
    assert cli.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "wsync demo: transformers 5.19.0 is installed, and the demo needs 4.57: pip"
    )


def by_connect(url: str, options: wsync.Options, _: Path) -> object:
    return wsync.connect({"w": torch.ones(1)}, engines=[url], options=options)


def by_disk(url: str, options: wsync.Options, folder: Path) -> object:
    return DiskSync({"w": torch.ones(1)}, [url], folder=folder, options=options)


def by_updater(url: str, options: wsync.Options, _: Path) -> object:
    source = from_tensors({"w": torch.ones(1)})
    updater = wsync.UpdateWeightFromTensor(
        SimpleNamespace(), source, None, model_name="any", options=options
    )
    return updater.connect_rollout_engines([url])


@pytest.mark.parametrize("way", [by_connect, by_disk, by_updater])
def test_an_engine_that_does_not_say_what_it_is_has_the_deadline(way: Any, tmp_path: Path) -> None:
    options = wsync.Options(deadline=0.3, progress=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        text = f"engine {url}: /server_info: no answer within 0.3 s"
        with pytest.raises(wsync.DeadlineError, match=text):
            way(url, options, tmp_path)
