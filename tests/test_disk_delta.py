"""Versions that hold only what has changed: what readers of slime's format make of them."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import delta_reader, disk_cases
from support.megatron_cpu import Parallel
from support.procs import Ranks
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import Weights, dense, draw, same, sparse
from test_checked_engine import Engine
from test_disk import stored, visible
from test_handles import FakeServer, server

import wsync
from wsync.checkpoints import deltas
from wsync.checkpoints.safetensors_layout import Place
from wsync.disk import DiskSync, newest

__all__ = ["server"]

OPTIONS = wsync.Options(deadline=60.0, progress=False)


class Host(Engine):
    """An engine that fetches versions into a copy on its own host, as slime's SGLang does."""

    fails = False

    def pulls(self, timeout: float) -> bool:
        return True

    def pull_weights(self, *, folder: str, source: str, number: int, timeout: float) -> None:
        self._hear("pull")
        if self.fails:
            raise wsync.RemoteError("engine stock: pull_weights: the host's disk is full")
        self.taken = delta_reader.pull(Path(folder), Path(source), number)


class LoadingHost(TensorParallelEngine):
    """The same, with a model."""

    def pulls(self, timeout: float) -> bool:
        return True

    def pull_weights(self, *, folder: str, source: str, number: int, timeout: float) -> None:
        assert not self.paused
        delta_reader.pull(Path(folder), Path(source), number)


def disk(weights: Weights, folder: Path, *engines: Any, **more: Any) -> DiskSync:
    local = folder.parent / "local"
    told = {"folder": folder, "local_folder": local, "delta": True, "options": OPTIONS}
    return DiskSync(weights, engines, **{**told, **more})


def numbers(folder: Path) -> list[int]:
    return [int(name.removeprefix("weight_v")) for name in visible(folder) if name != "latest"]


def test_engines_get_every_byte_and_files_hold_what_has_changed(
    config: Any, tmp_path: Path
) -> None:
    weights, folder = draw(config, 1), tmp_path / "versions"
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with LoadingHost(config, tp=2) as engine, disk(weights, folder, engine, base=config) as sync:
        report = sync.update(version=5)
        assert (report.delivered_nbytes, report.changed_nbytes) == (nbytes, None)
        assert same(engine.weights(), weights)
        for version in (6, 7):
            weights["model.norm.weight"][:3] *= -1  # the sign's byte
            weights["model.embed_tokens.weight"].view(torch.uint8)[version, 1] ^= 0x55
            report = sync.update(version=version)
            assert report.changed_nbytes == 4
            assert "4 of " in str(report)
            assert report.metrics()["perf/update_weights_density"] == 4 / nbytes
            assert report.delivered_nbytes < nbytes / 100
            assert same(engine.weights(), weights)
            assert engine.model_info(10)["weight_version"] == str(version)
        assert sync.update(version=8).delivered_nbytes == 0  # nothing has changed
        assert same(engine.weights(), weights)
        assert engine.model_info(10)["weight_version"] == "8"
    first, second, third, last = numbers(folder)
    assert [second, third, last] == [first + 1, first + 2, first + 3]
    assert newest(folder).name == f"weight_v{first}"  # a whole one
    changed = {"model.norm.weight", "model.embed_tokens.weight"}
    assert stored(delta_reader.folder(folder, second)).keys() == changed


CASES: dict[str, tuple[Any, Parallel, str | None]] = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2), None),
    "tp4-bfloat16": (dense(), Parallel(tp=4), "bfloat16"),
    "tp2pp2vpp2-tied": (dense(4, tied=True), Parallel(tp=2, pp=2, vpp=2), None),
    "moe-tp2pp2ep2": (sparse(), Parallel(tp=2, pp=2, ep=2, etp=1), None),
    "moe-etp2": (sparse(), Parallel(tp=2, ep=2, etp=2), None),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_write_tensors_together(name: str, ranks: Ranks, tmp_path: Path) -> None:
    config, parallel, dtype = CASES[name]
    told = (disk_cases.write_changes, config, parallel, str(tmp_path), dtype)
    found = ranks.run(*told, timeout=240)
    assert [facts["wrong"] for facts in found] == [[]] * 4
    first = found[0]
    assert first["versions"] == [f"weight_v{first['first'] + n}" for n in range(3)]
    assert first["files"][-1] == delta_reader.INDEX
    assert len(first["files"]) > 2  # ranks share the work
    assert all(file.startswith("model") for file in first["files"])
    for facts in found:
        assert 0 < facts["changed_nbytes"] == first["changed_nbytes"] < facts["model_nbytes"] / 50
        assert facts["delivered_nbytes"] < facts["model_nbytes"] / 2


def test_parts_of_a_checksum_add_up() -> None:
    """Also of boxes that take every step-th index, as some families cut their tensors."""
    draw = random.Random(1)
    for _ in range(200):
        shape = tuple(draw.choice([1, 2, 6, 12]) for _ in range(draw.randint(1, 4)))
        data = np.random.default_rng(draw.randint(0, 99)).bytes(2 * math.prod(shape))
        tensor = np.frombuffer(data, np.uint16).reshape(shape)
        cuts = [draw.choice([c for c in (1, 2, 3) if size % c == 0]) for size in shape]
        steps = tuple(draw.choice([1, cut]) for cut in cuts)
        found, whole = np.zeros(2, int), np.zeros(len(data), np.uint8)
        for index in itertools.product(*map(range, cuts)):
            extent = tuple(size // cut for size, cut in zip(shape, cuts, strict=True))
            start = tuple(
                i if step > 1 else i * size
                for i, step, size in zip(index, steps, extent, strict=True)
            )
            slices = (slice(a, a + n * s, s) for a, n, s in zip(start, extent, steps, strict=True))
            part = tensor[tuple(slices)].tobytes()
            box = deltas._Box(("t", (start, extent), steps), Place("bfloat16", shape, 0, 0), True)
            found += box.add_up(np.frombuffer(part, np.uint8))
            box.put(np.frombuffer(part, np.uint8), whole)
        assert whole.tobytes() == data
        low, high = (int(number) % 65521 for number in found + np.array([1, len(data)]))
        assert high << 16 | low == zlib.adler32(data)


def test_a_whole_version_follows_so_that_late_hosts_fetch_less(tmp_path: Path) -> None:
    weights, folder = {"a": torch.zeros(300)}, tmp_path / "versions"
    host = Host()
    with disk(weights, folder, host, delta=2, keep=1) as sync:
        taken = []
        for step in range(7):
            weights["a"][step] = 1
            assert (sync.update().changed_nbytes is None) == (step % 3 == 0)
            taken.append(host.taken)
            delta_reader.pull(tmp_path / f"late{step}", folder, host.taken[-1])
            assert same(stored(tmp_path / f"late{step}"), weights)
    first = taken[0][0]
    assert taken == [[first + step] for step in range(7)]
    assert numbers(folder) == [first + 6]  # with keep=1, what came before the last whole one goes
    with disk(weights, tmp_path / "others", delta=2, keep=2) as sync:
        for _ in range(8):
            sync.update()
    assert len(numbers(tmp_path / "others")) == 5
    assert host.told[:5] == ["pull", "pause", "flush", "load", "resume"]


@pytest.mark.parametrize("where", ["versions", "elsewhere"])
def test_a_new_run_replaces_the_copies_of_an_earlier_one(where: str, tmp_path: Path) -> None:
    """Their hosts never go back to a lower number."""
    weights, host = {"a": torch.zeros(300)}, Host()
    with disk(weights, tmp_path / "versions", host) as sync:
        for _ in range(3):
            sync.update()
        at = host.taken[-1]
    weights["a"][0] = 7
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / f"weight_v{at + 5}").mkdir()  # the clock is behind
    with disk(weights, tmp_path / where, host) as sync:
        sync.update(version=1)
        assert same(stored(tmp_path / "local"), weights)
        weights["a"][1] = 1.5
        assert sync.update().changed_nbytes == 2
        assert same(stored(tmp_path / "local"), weights)


def test_versions_are_whole_after_a_failure_or_without_the_ones_before(tmp_path: Path) -> None:
    weights, folder = {"a": torch.zeros(300)}, tmp_path / "versions"
    host = Host()
    with disk(weights, folder, host) as sync:
        sync.update()
        host.fails = True
        with pytest.raises(wsync.RemoteError, match="the host's disk is full"):
            sync.update()
        assert host.told[-1] == "pull"  # it generates
        host.fails = False
        assert sync.update().changed_nbytes is None
        weights["a"][0] = 1
        assert sync.update().changed_nbytes == 2
        shutil.rmtree(newest(folder))
        assert sync.update().changed_nbytes is None
        assert same(stored(tmp_path / "local"), weights)
        with disk(weights, folder, Host()) as other:
            other.update()
        weights["a"][1] = 1
        assert sync.update().changed_nbytes is None  # the folder's last version is another's
        assert same(stored(tmp_path / "local"), weights)


def test_what_delta_lacks_is_named_before_anything_is_paused(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.zeros(3)}
    text = r"has no /pull_weights \(slime's SGLang has\): use DiskSync without delta"
    for engine in (Engine(), server.url):
        with pytest.raises(wsync.UnsupportedError, match=text):
            disk(weights, tmp_path, engine)
    assert "/pause_generation" not in [path for path, *_ in server.seen]
    with pytest.raises(wsync.InvalidArgumentError, match="delta: give local_folder="):
        disk(weights, tmp_path, Host(), local_folder=None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "wsync.checkpoints.deltas", raising=False)
    with pytest.raises(wsync.UnsupportedError, match="pip install numpy zstandard"):
        disk(weights, tmp_path)


def test_a_server_is_asked_for_what_slimes_patch_has(server: FakeServer, tmp_path: Path) -> None:
    good = (200, {"success": True, "message": "Success."})
    for path in ("pause_generation", "flush_cache", "update_weights_from_disk"):
        server.answers[f"/{path}"] = good
    server.answers |= {
        "/pull_weights": good,
        "/continue_generation": good,
        "/model_info": (200, {"weight_version": "1", "model_path": ""}),
    }
    with disk({"a": torch.zeros(3)}, tmp_path / "versions", server.url) as sync:
        sync.update(version=1)
    bodies = [body for path, body, _ in server.seen if path == "/pull_weights" and body]
    local = str(tmp_path / "local")
    (number,) = numbers(tmp_path / "versions")
    source = str(tmp_path / "versions")
    told = {"local_checkpoint_dir": local, "source_dir": source, "target_version": number}
    assert bodies == [told]
    (load,) = [body for path, body, _ in server.seen if path == "/update_weights_from_disk"]
    assert (load["model_path"], load["weight_version"]) == (local, "1")
