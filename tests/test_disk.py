"""Updates through a folder of checkpoints, from one trainer process into running engines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import transformers
from safetensors.torch import load_file
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import Weights, draw, in_server, same, sums

import wsync
from wsync import _core
from wsync.checkpoints.safetensors_layout import INDEX
from wsync.demo.engines.serve import serve_in_process
from wsync.disk import DiskSync, newest
from wsync.handles.base import handle

OPTIONS = wsync.Options(deadline=60.0, progress=False)


def stored(folder: Path) -> Weights:
    """What the safetensors library reads; FileNotFoundError where the folder is gone."""
    return {
        name: tensor
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors"
        for name, tensor in load_file(path).items()
    }


def disk(weights: Weights, folder: Path, *engines: Any, **options: Any) -> DiskSync:
    return DiskSync(weights, engines, folder=folder, **{"options": OPTIONS, **options})


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def test_both_kinds_of_engine_get_every_byte_and_the_version(
    config: Any, engine: TensorParallelEngine, server: str, tmp_path: Path
) -> None:
    weights = draw(config, 1)
    with disk(weights, tmp_path, engine, server, base=config, shard_nbytes=100_000) as sync:
        for seed, version in ((2, 5), (3, 6)):
            weights.update(draw(config, seed))
            report = sync.update(version=version)
            assert same(engine.weights(), weights)
            assert in_server(server) == sums(weights)
            assert same(stored(newest(tmp_path)), weights)
    assert report.rounds > 2  # files
    assert report.delivered_nbytes == report.model_nbytes
    for name in (engine, server):
        assert handle(name).model_info(10)["weight_version"] == "6"
    assert not engine.paused
    assert requests.get(server + "/model_info", timeout=60).json()["model_path"] == str(
        newest(tmp_path)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_transformers_reads_what_was_written(
    config: Any, tied: bool, threads: int, tmp_path: Path
) -> None:
    config = transformers.Qwen3Config(**{**config.to_dict(), "tie_word_embeddings": tied})
    weights = draw(config, 1)
    assert ("lm_head.weight" in weights) != tied
    options = wsync.Options(progress=False, threads=threads)
    with disk(weights, tmp_path, base=config, shard_nbytes=1 << 16, options=options) as sync:
        sync.update(version=3)
    read = transformers.AutoModelForCausalLM.from_pretrained(newest(tmp_path), dtype=torch.float32)
    assert same(dict(read.named_parameters()), weights)
    index = transformers.utils.hub.get_checkpoint_shard_files
    files, metadata = index(newest(tmp_path), newest(tmp_path) / INDEX)
    assert metadata["weight_version"] == "3"
    assert metadata["total_size"] == sum(t.nbytes for t in weights.values())
    assert len(files) > 2


def test_weights_are_cast_on_their_way(
    config: Any, engine: TensorParallelEngine, tmp_path: Path
) -> None:
    weights = draw(config, 4)
    with disk(weights, tmp_path, engine, dtype="bfloat16") as sync:
        sync.update()
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert same(stored(newest(tmp_path)), rounded)
    assert same(engine.weights(), {name: tensor.float() for name, tensor in rounded.items()})


def test_configuration_and_tokenizer_are_copied_and_old_weights_are_not(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = tmp_path / "base", tmp_path / "versions"
    config.save_pretrained(base)
    for name in ("tokenizer.json", "model-00001-of-00009.safetensors", "pytorch_model.bin", ".x"):
        (base / name).write_text(name)
    (base / "model.safetensors.index.json").write_text("{}")
    (base / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with disk(draw(config, 1), root, base="base") as sync:
        monkeypatch.chdir("/")
        sync.update()  # wherever the program has gone meanwhile
    assert visible(newest(root)) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_late_engine_starts_from_the_newest_version_and_reports_it(
    config: Any, tmp_path: Path
) -> None:
    weights = draw(config, 1)
    with disk(weights, tmp_path, base=config) as sync:
        sync.update(version=41)
        sync.update(version=42)
        with serve_in_process(newest(tmp_path)) as late:
            assert handle(late.url).model_info(10)["weight_version"] == "42"
            assert in_server(late.url) == sums(weights)
    with TensorParallelEngine(config, tp=2) as other:
        version = str(newest(tmp_path))
        handle(other).update_weights_from_disk(  # type: ignore[attr-defined]
            version, weight_version=42, timeout=60
        )
        assert same(other.weights(), weights)


def test_engines_generate_while_a_version_is_written(
    config: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    original = _core.write_files

    def write(*arguments: Any) -> int:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        if not answers:
            answers.append(requests.post(server + "/generate", json=body, timeout=60).status_code)
        return original(*arguments)

    monkeypatch.setattr(_core, "write_files", write)
    with disk(draw(config, 1), tmp_path, server) as sync:
        sync.update()
    assert answers == [200]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, None])
def test_old_versions_are_removed(keep: int | None, tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3)}
    names = []
    with disk(weights, tmp_path, keep=keep) as sync:
        for number in range(1, 7):
            weights["a"].fill_(number)
            sync.update(version=number)
            names = [f"weight_v{n:06d}" for n in range(1, number + 1)][-(keep or number) :]
            assert visible(tmp_path) == ["latest", *names]
    assert [path.name for path in tmp_path.glob(".weight*")] == []
    for name in names:
        assert stored(tmp_path / name)["a"][0] == int(name[-6:])


def test_a_restarted_trainer_counts_anew_and_its_version_is_the_newest(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with disk({"a": torch.full((3,), value)}, tmp_path, keep=2) as sync:
            for _ in range(3):
                sync.update()
        with disk({"a": torch.full((3,), 10 * value)}, tmp_path, keep=2) as sync:
            sync.update()
        assert newest(tmp_path).name == "weight_v000001"
        assert stored(newest(tmp_path))["a"][0] == 10 * value
        assert visible(tmp_path) == ["latest", "weight_v000001", "weight_v000003"]


def test_two_trainers_do_not_write_into_one_folder(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3)}
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Weights:
        inside.set()
        assert go_on.wait(20)
        return weights

    with disk(weights, tmp_path) as first, disk(weights, tmp_path) as second:
        thread = threading.Thread(target=first.update, args=(slow,))
        thread.start()
        assert inside.wait(20)
        with pytest.raises(wsync.StateError, match="another trainer is writing"):
            second.update()
        go_on.set()
        thread.join(20)
        second.update(version=2)
    assert visible(tmp_path) == ["latest", "weight_v000001", "weight_v000002"]


def test_a_version_is_never_written_again(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        with disk({"a": torch.full((3,), value)}, tmp_path, keep=None) as sync:
            sync.update(version=7)
        assert stored(newest(tmp_path))["a"][0] == value
    names = ["weight_v000007", "weight_v000007.2", "weight_v000007.3"]
    assert visible(tmp_path) == ["latest", *names]
    assert [stored(tmp_path / name)["a"][0] for name in names] == [1.0, 2.0, 3.0]


KILLED = """
import os, signal, sys, torch, wsync
from wsync import _core
from wsync.disk import DiskSync
weights = {f"t{i}": torch.full((1 << 20,), 9.0) for i in range(40)}
original, calls = _core.write_files, []
def write(*arguments):
    calls.append(original(*arguments))
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls[-1]
_core.write_files = write
DiskSync(weights, folder=sys.argv[1], options=wsync.Options(progress=False)).update(
    version=9)
"""


def test_a_killed_writer_leaves_the_previous_version_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    weights = {"a": torch.ones(3)}
    with disk(weights, tmp_path) as sync:
        sync.update(version=8)
    command = [sys.executable, "-P", "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".wsync-work/weight_v000009.*"))) == 1
    assert newest(tmp_path).name == "weight_v000008"
    assert same(stored(newest(tmp_path)), weights)
    with disk(weights, tmp_path) as sync:
        sync.update(version=10)
    assert not (tmp_path / ".wsync-work").exists()
    assert newest(tmp_path).name == "weight_v000010"


@contextlib.contextmanager
def small_file_system(folder: Path, nbytes: int) -> Iterator[Path]:
    place = folder / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_and_engines_go_on_with_what_they_have(
    config: Any, engine: TensorParallelEngine, tmp_path: Path
) -> None:
    weights = draw(config, 6)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with small_file_system(tmp_path, int(1.5 * nbytes)) as root:
        with disk(weights, root, engine) as sync:
            sync.update(version=1)
            with pytest.raises(wsync.SystemCallError, match=r"safetensors: reserving .*No space"):
                sync.update(draw(config, 7), version=2)
            assert not engine.paused
            assert handle(engine).model_info(10)["weight_version"] == "1"
            assert same(stored(newest(root)), weights)
            # what was written is gone, so that the disk is not full any more
            assert visible(root) == ["latest", "weight_v000001"]
            assert not list(root.glob(".weight*"))
            with disk(weights, tmp_path / "elsewhere", engine) as other:
                other.update(version=3)
    assert same(engine.weights(), weights)


def test_a_half_written_checkpoint_is_refused_before_anything_is_loaded(
    config: Any, engine: TensorParallelEngine, server: str, tmp_path: Path
) -> None:
    weights = draw(config, 1)
    with disk(weights, tmp_path, engine, server, shard_nbytes=100_000) as sync:
        sync.update(version=1)
    last = sorted(newest(tmp_path).glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    for running in (handle(engine), handle(server)):
        with pytest.raises(wsync.RemoteError, match=r"safetensors: "):
            running.update_weights_from_disk(  # type: ignore[attr-defined]
                str(newest(tmp_path)), weight_version=2, timeout=60
            )
        info = running.model_info(10)
        assert (info["weight_version"], info["consistent"]) == ("1", True)
    assert same(engine.weights(), weights)
    assert in_server(server) == sums(weights)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        # by the engine, or by the version that it has, if that is there
        (
            lambda w: w.pop("model.norm.weight"),
            r"model.norm.weight: \w+ has it|not delivered: model.norm",
        ),
        (lambda w: w.update(extra=torch.zeros(2)), r"extra: \w+ has no such|not there: extra"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight:? .*\(3,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    change: Any, text: str, config: Any, server: str, tmp_path: Path
) -> None:
    before = in_server(server)
    weights = draw(config, 8)
    change(weights)
    with pytest.raises(wsync.RemoteError, match=text), disk(weights, tmp_path, server) as sync:
        sync.update()
    assert in_server(server) == before


def test_an_endpoint_loads_a_version(config: Any, server: str, tmp_path: Path) -> None:
    with disk(draw(config, 1), tmp_path) as sync:
        sync.update()

    def ask(**body: Any) -> tuple[int, Any]:
        answer = requests.post(server + "/update_weights_from_disk", json=body, timeout=60)
        return answer.status_code, answer.json()

    path = str(newest(tmp_path))
    status, answer = ask(model_path=path, weight_version="x", keep_pause=True)
    assert (status, answer["success"]) == (200, True)
    assert requests.get(server + "/model_info", timeout=60).json()["weight_version"] == "x"
    assert ask(model_path=path)[0] == 200
    # they may be others than those that were called so
    assert requests.get(server + "/model_info", timeout=60).json()["weight_version"] == "unknown"
    status, answer = ask(model_path="/nowhere")
    assert status == 400
    assert "/nowhere/model.safetensors.index.json: No such file" in answer["message"]
    assert ask()[0] == 400


def test_an_engine_that_dies_is_named_and_the_version_stays(config: Any, tmp_path: Path) -> None:
    weights = draw(config, 1)
    with TensorParallelEngine(config, tp=1, name="victim") as victim:
        with disk(weights, tmp_path, victim) as sync:
            sync.update()
            os.kill(victim.pids[0], signal.SIGKILL)
            with pytest.raises(wsync.PeerClosedError, match="victim"):
                sync.update()
    assert newest(tmp_path).name == "weight_v000002"


def test_an_engine_without_the_call_is_named(tmp_path: Path) -> None:
    class Old:
        name = "old"
        workers = 1
        load_formats = ()

        def pause(self, mode: str, timeout: float) -> None: ...
        def flush(self, timeout: float) -> None: ...
        def update_weights(self, *_: Any, **__: Any) -> None: ...
        def resume(self, timeout: float) -> None: ...
        def model_info(self, timeout: float) -> dict[str, Any]:
            return {}

    with pytest.raises(wsync.UnsupportedError, match="engine old: its handle has no update"):
        disk({"a": torch.zeros(1)}, tmp_path, Old())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, "keep=0"),
        ({"base": "/nowhere"}, "base=/nowhere: expected the folder"),
        ({"base": 3}, "base=3: expected the folder of"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        disk({"a": torch.zeros(1)}, tmp_path, **options)
