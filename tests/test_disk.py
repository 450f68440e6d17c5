"""Updates through a folder of checkpoints, from one trainer process into running engines."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_qwen3 import Weights, draw, in_server, same, sums

import wsync
from wsync import _core
from wsync.checkpoints.safetensors_layout import INDEX, Checkpoint
from wsync.demo.engines.serve import _stored_version, command_line, load, serve_in_process
from wsync.demo.engines.tensor_parallel_engine import TensorParallelEngine
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


# --- what arrives -----------------------------------------------------------------------------


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


def test_files_that_others_have_written_anew_have_no_version(config: Any, tmp_path: Path) -> None:
    """Tools that change weights in place leave the index as it is."""
    with disk(draw(config, 1), tmp_path, base=config, shard_nbytes=20_000) as sync:
        sync.update(version=7)
    files = sorted(newest(tmp_path).glob("*.safetensors"))
    assert len(files) > 1
    assert Checkpoint(newest(tmp_path)).weight_version == "7"
    save_file(load_file(files[-1]), files[-1])
    assert Checkpoint(newest(tmp_path)).weight_version is None
    with serve_in_process(newest(tmp_path)) as late:
        assert handle(late.url).model_info(10)["weight_version"] == "default"


@pytest.mark.parametrize("ignore", [[], ["--ignore", "model.norm.weight"]])
@pytest.mark.parametrize("how", ["lacks", "alone has"])
def test_a_late_engine_does_not_make_up_what_a_checkpoint_lacks(
    config: Any, how: str, ignore: list[str], tmp_path: Path
) -> None:
    weights, name = draw(config, 1), "model.norm.weight"
    if how == "lacks":
        del weights[name]
    else:
        name = "model.stranger.weight"
        weights[name] = torch.zeros(3)
    with disk(weights, tmp_path, base=config) as sync:
        sync.update()
    wanted = command_line().parse_args(["--model", str(newest(tmp_path)), *ignore])
    if name in ignore:
        load(wanted)
        return
    with pytest.raises(wsync.LayoutError, match=f"the checkpoint {how} {name}"):
        load(wanted)


def test_engines_generate_while_a_version_is_written(
    config: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    original = _core.write_files

    def write(*arguments: Any) -> int:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        answers.append(requests.post(server + "/generate", json=body, timeout=60).status_code)
        return original(*arguments)

    monkeypatch.setattr(_core, "write_files", write)
    with disk(draw(config, 1), tmp_path, server) as sync:
        sync.update()
    assert answers == [200]


# --- versions ---------------------------------------------------------------------------------


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


def test_there_is_no_newest_version_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(wsync.StateError, match="holds no complete version yet"):
        newest(tmp_path)


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


def test_a_reader_finds_a_whole_version_whenever_it_looks(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(3)}
    done = threading.Event()
    found: list[tuple[float, float]] = []
    errors: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                tensors = stored(newest(tmp_path))
                found.append((float(tensors["a"][0]), float(tensors["b"][0])))
            except Exception as error:
                errors.append(error)

    with disk(weights, tmp_path, shard_nbytes=12) as sync:
        sync.update()
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(1, 20):
            weights["a"].fill_(number)
            weights["b"].fill_(number)
            sync.update(version=number % 4)  # as trainers that start again count
        done.set()
        reader.join(20)
    # a reader that was slow enough for two versions to come finds its own gone, never a part
    assert not [error for error in errors if not isinstance(error, FileNotFoundError)]
    assert all(a == b for a, b in found)
    assert found[-1][0] > 0


def test_a_reader_of_a_version_that_is_removed_reads_it_to_its_end(tmp_path: Path) -> None:
    weights = {f"t{i}": torch.full((5,), float(i)) for i in range(4)}
    with disk(weights, tmp_path, keep=1, shard_nbytes=40) as sync:
        sync.update()
        old = newest(tmp_path)
        early, late = Checkpoint(old), Checkpoint(old)
        with early.opened() as descriptors:
            sync.update()
            assert not old.exists()
            found = bytearray()
            for piece in early.pieces(20)[1]:
                part = bytearray(piece.nbytes)
                early.read(descriptors, piece, memoryview(part))
                found += part
            early.check()
        assert torch.equal(
            torch.frombuffer(found, dtype=torch.float32), torch.cat([*weights.values()])
        )
        with (
            pytest.raises(wsync.SystemCallError, match=r"safetensors: No such file"),
            late.opened(),
        ):
            pass


def test_an_engine_that_is_told_of_a_removed_version_keeps_its_own(
    config: Any, engine: TensorParallelEngine, server: str, tmp_path: Path
) -> None:
    weights = draw(config, 9)
    with disk(weights, tmp_path, engine, server, keep=1) as sync:
        sync.update(version=1)
        old = newest(tmp_path)
        sync.update(version=2)
    for running in (handle(engine), handle(server)):
        with pytest.raises(wsync.RemoteError, match=r"index.json: No such file"):
            running.update_weights_from_disk(  # type: ignore[attr-defined]
                str(old), weight_version=1, timeout=60
            )
        info = running.model_info(10)
        assert (info["weight_version"], info["consistent"]) == ("2", True)
    assert same(engine.weights(), weights)
    assert in_server(server) == sums(weights)


# --- what goes wrong --------------------------------------------------------------------------

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


def test_a_file_that_may_not_grow_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with disk({"a": torch.zeros(100_000)}, tmp_path) as sync:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises(wsync.SystemCallError, match=r"reserving \d+ bytes: File too large"):
                sync.update()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sync.update()
    assert visible(tmp_path) == ["latest", "weight_v000001"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with disk({"a": torch.zeros(3)}, tmp_path / "file" / "versions") as sync:
        with pytest.raises(wsync.SystemCallError, match=r"file/versions: Not a directory"):
            sync.update()


def test_a_half_written_checkpoint_is_refused_before_anything_is_loaded(
    config: Any, engine: TensorParallelEngine, server: str, tmp_path: Path
) -> None:
    weights = draw(config, 1)
    with disk(weights, tmp_path, engine, server, shard_nbytes=100_000) as sync:
        sync.update(version=1)
    last = sorted(newest(tmp_path).glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    for running in (handle(engine), handle(server)):
        with pytest.raises(wsync.RemoteError, match="it was not written to its end"):
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
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight: in Qwen3ForCausalLM, not deliv"),
        (lambda w: w.update(extra=torch.zeros(2)), "extra: not in Qwen3ForCausalLM"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight: shape \("),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    change: Any, text: str, config: Any, server: str, tmp_path: Path
) -> None:
    before = in_server(server)
    weights = draw(config, 8)
    change(weights)
    with disk(weights, tmp_path, server) as sync:
        with pytest.raises(wsync.RemoteError, match=text):
            sync.update()
    assert in_server(server) == before
    requests.post(server + "/continue_generation", timeout=60)


def test_the_endpoint_answers_as_sglangs(config: Any, server: str, tmp_path: Path) -> None:
    with disk(draw(config, 1), tmp_path) as sync:
        sync.update()

    def ask(**body: Any) -> tuple[int, Any]:
        answer = requests.post(server + "/update_weights_from_disk", json=body, timeout=60)
        return answer.status_code, answer.json()

    path = str(newest(tmp_path))
    good = {"model_path": path, "load_format": "auto", "weight_version": "x", "keep_pause": True}
    assert ask(**good) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        },
    )
    assert requests.get(server + "/model_info", timeout=60).json()["weight_version"] == "x"
    assert ask(model_path=path)[0] == 200
    # they may be others than those that were called so
    assert requests.get(server + "/model_info", timeout=60).json()["weight_version"] == "unknown"
    status, answer = ask(model_path=path, load_format="gguf")
    assert (status, answer["success"]) == (400, False)
    assert "load_format 'gguf'" in answer["message"]
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


def test_a_stalled_engine_costs_the_deadline(
    config: Any, engine: TensorParallelEngine, tmp_path: Path
) -> None:
    weights = draw(config, 3)
    options = wsync.Options(deadline=2.0, progress=False)
    with disk(weights, tmp_path, engine, options=options) as sync:
        os.kill(engine.pids[1], signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(wsync.DeadlineError):
                sync.update()
        finally:
            os.kill(engine.pids[1], signal.SIGCONT)
        assert time.monotonic() - start < OPTIONS.deadline
        sync.options = OPTIONS
        sync.update()
    assert same(engine.weights(), weights)


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
        ({"shard_nbytes": 0}, "shard_nbytes=0"),
        ({"base": "/nowhere"}, "'/nowhere': not a folder"),
        ({"base": 3}, "3: neither a folder nor a configuration"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        disk({"a": torch.zeros(1)}, tmp_path, **options)


def test_a_version_that_cannot_name_a_folder_is_refused(tmp_path: Path) -> None:
    with disk({"a": torch.zeros(1)}, tmp_path) as sync:
        with pytest.raises(wsync.InvalidArgumentError, match=r"version '\.\./x'"):
            sync.update(version="../x")


def test_an_index_says_nothing_of_weights_in_one_file(tmp_path: Path) -> None:
    """transformers' save_pretrained leaves the index of what it replaces."""
    with DiskSync({"a": torch.ones(4)}, folder=tmp_path, options=OPTIONS) as sync:
        sync.update(version=7)
    folder = newest(tmp_path)
    assert _stored_version(str(folder)) == "7"
    (folder / "model.safetensors").touch()
    assert _stored_version(str(folder)) is None
