"""slime's updates through the disk: what its RayTrainGroup finds when the actors are done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import ray_double
from support.ray_double import Actor

import wsync
from wsync.checkpoints.safetensors_layout import INDEX
from wsync.layout import from_tensors

OPTIONS = wsync.Options(deadline=60.0, progress=False)
HOOK = "custom_update_weight_post_write_path"
noted: list[Any] = []


def note(args: Any, folder: str, engines: list[Any]) -> None:
    """A function of a user's, as --custom-update-weight-post-write-path names it."""
    files = {path.name for path in Path(folder).iterdir()}
    noted.append((args, Path(folder).name, engines, INDEX in files))


def fail(args: Any, folder: str, engines: list[Any]) -> None:
    if Path(folder).name == "weight_v000001":
        raise OSError("the store is full")


class Untouched:
    """An engine's actor that nobody is to call."""


def arguments(folder: Path, **more: Any) -> SimpleNamespace:
    base = folder / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    told = {
        "update_weight_mode": "full",
        "update_weight_transport": "disk",
        "update_weight_disk_dir": str(folder / "versions"),
        "update_weight_disk_keep_files": False,
        "custom_update_weight_post_write_path": None,
        "hf_checkpoint": str(base),
        "actor_num_nodes": 1,
    }
    return SimpleNamespace(**{**told, **more})


def updater(args: Any, weights: dict[str, torch.Tensor]) -> wsync.UpdateWeightFromDisk:
    return wsync.UpdateWeightFromDisk(
        args, from_tensors(weights), lambda: weights, model_name="any", options=OPTIONS
    )


def stored(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors")} == {*index.values()}
    return {name: t for file in {*index.values()} for name, t in load_file(folder / file).items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in expected.items()
    )


@pytest.mark.parametrize("keep", [False, True])
def test_slimes_group_finds_each_version_under_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has engines load weight_v<number>, and removes that unless it is to stay."""
    ray_double.install(monkeypatch)
    root = tmp_path / "versions"
    old = root / "weight_v000001"  # of an earlier run
    old.mkdir(parents=True)
    (old / "model-00007-of-00009.safetensors").write_bytes(b"old")
    weights = {"w": torch.zeros(8), "router": torch.full((4,), 1 / 3)}
    told = updater(arguments(tmp_path, update_weight_disk_keep_files=keep), weights)
    caplog.set_level("INFO", "wsync.slime")
    told.connect_rollout_engines([Actor(Untouched())], None, [4], [0], [{"tp_size": 2}])
    said = "wsync: UpdateWeightFromDisk: slime makes all engines load the files"
    assert [text for text in caplog.messages if text.startswith(said)] == caplog.messages[-1:]
    for number in range(1, 5):
        weights["w"] = torch.full((8,), float(number))
        told.update_weights()
        folder = root / f"weight_v{number:06d}"
        assert told.weight_version == number
        assert same(stored(folder), weights)
        if not keep:
            shutil.rmtree(folder)
    told.disconnect_rollout_engines()
    found = sorted(path.name for path in root.glob("weight_v*"))
    assert found == ([f"weight_v{number:06d}" for number in range(1, 5)] if keep else [])


def test_a_later_run_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    """slime makes actors anew when it has released them, and says the version they begin at."""
    weights = {"w": torch.ones(3)}
    told = updater(arguments(tmp_path), weights)
    told.weight_version = 6
    told.connect_rollout_engines([], None)
    told.update_weights()
    assert same(stored(tmp_path / "versions" / "weight_v000007"), weights)


def test_a_users_function_is_called_when_a_version_is_complete(tmp_path: Path) -> None:
    args = arguments(tmp_path, **{HOOK: f"{__name__}.note"})
    told, engines = updater(args, {"w": torch.ones(3)}), [Actor(Untouched())]
    told.connect_rollout_engines(engines, None)
    told.update_weights()
    assert noted == [(args, "weight_v000001", engines, True)]
    told.disconnect_rollout_engines()


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_users_function_raises_is_the_updates_error(tmp_path: Path, anew: bool) -> None:
    """And its version is no other weights' name."""
    weights = {"w": torch.ones(3)}
    told = updater(arguments(tmp_path, **{HOOK: f"{__name__}.fail"}), weights)
    told.connect_rollout_engines([], None)
    with pytest.raises(wsync.RemoteError, match="OSError: the store is full"):
        told.update_weights()
    weights["w"] = torch.zeros(3)
    if anew:
        told.connect_rollout_engines([], None)
    told.update_weights()
    assert told.weight_version == 2
    assert same(stored(tmp_path / "versions" / "weight_v000002"), weights)


def test_a_folder_of_versions_is_wanted(tmp_path: Path) -> None:
    told = updater(arguments(tmp_path, update_weight_disk_dir=None), {"w": torch.ones(3)})
    with pytest.raises(
        wsync.InvalidArgumentError, match="update_weight_disk_dir=None: give a folder"
    ):
        told.connect_rollout_engines([], None)


def test_hosts_that_have_to_publish_their_files_cannot_write_one_together(tmp_path: Path) -> None:
    args = arguments(tmp_path, **{HOOK: f"{__name__}.note", "actor_num_nodes": 2})
    with pytest.raises(wsync.UnsupportedError, match=f"{HOOK} with actor_num_nodes=2"):
        updater(args, {"w": torch.ones(3)}).connect_rollout_engines([], None)
