"""A folder of versions: what is removed, what is left alone, and what the disk has when."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import wsync
from wsync.checkpoints import versions
from wsync.checkpoints.safetensors_layout import INDEX
from wsync.checkpoints.versions import Versions
from wsync.disk import DiskSync, newest

OPTIONS = wsync.Options(deadline=60.0, progress=False)


def write(folder: Path, *numbers: int, keep: int | None = 1) -> None:
    with DiskSync({"a": torch.ones(3)}, folder=folder, keep=keep, options=OPTIONS) as sync:
        for number in numbers:
            sync.update(version=number)


def everything(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def died(root: Path) -> None:
    """A writer, in the middle of a version and of a link."""
    folder = Versions(root, None, 2)
    (folder.begin("2") / "part").write_text("x")
    folder._hidden(versions.LATEST).symlink_to("weight_v000001")


def test_what_a_dead_writer_left_is_removed_and_other_hidden_files_are_not(tmp_path: Path) -> None:
    write(tmp_path, 1)
    mine = {".weight_v000002.deadbeef", ".weight_v_of_mine"}
    for name in mine:
        (tmp_path / name).mkdir()
    died(tmp_path)
    assert everything(tmp_path) == {"latest", "weight_v000001", versions._WORK, *mine}
    assert len(list((tmp_path / versions._WORK).iterdir())) == 2
    write(tmp_path, 2)
    assert everything(tmp_path) == {"latest", "weight_v000002", *mine}


def test_a_version_takes_anothers_place(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        with DiskSync(
            {"a": torch.full((3,), value)}, folder=tmp_path, replace=True, options=OPTIONS
        ) as sync:
            sync.update(version=7)
        assert everything(tmp_path) == {"weight_v000007", "latest"}
        (part,) = newest(tmp_path).glob("*.safetensors")
        assert load_file(part)["a"].tolist() == [value] * 3


def test_a_base_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to it may move while its files are copied."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("a.json", "b.json"):
            (tmp_path / name / file).write_text(name)
    link = tmp_path / "base"
    link.symlink_to("one")
    copy = shutil.copyfile

    def moving(source: Path, target: Path) -> None:
        copy(source, target)
        link.unlink()
        link.symlink_to("two")

    monkeypatch.setattr(shutil, "copyfile", moving)
    (tmp_path / "root").mkdir()
    folder = Versions(tmp_path / "root", link, 2).begin("1")
    assert {path.read_text() for path in folder.iterdir()} == {"one"}


def test_only_versions_are_pruned(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 2, keep=None)
    behind = ("-best", ".best", ".20261123", ".1000", "..2")
    copies = {f"weight_v000001{text}" for text in behind}
    mine = {*copies, "weight_v000003", "weight_vacation", "weight_v_half"}
    for copy in copies:
        shutil.copytree(tmp_path / "weight_v000001", tmp_path / copy)
    (tmp_path / "weight_v000003").mkdir()  # somebody else's checkpoint: its index says nothing
    (tmp_path / "weight_v000003" / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    (tmp_path / "weight_v_half").mkdir()
    (tmp_path / "weight_v_half" / INDEX).write_text('{"meta')
    (tmp_path / "weight_vacation").write_text("a file")
    write(tmp_path, 7)
    assert everything(tmp_path) == {"latest", "weight_v000007", *mine}


def test_a_version_that_cannot_be_moved_keeps_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, 2, 3, keep=None)
    hidden, lost = Versions._hidden, tmp_path / "nowhere" / "there"
    stuck = lambda each, name: lost if name.endswith("1") else hidden(each, name)  # noqa: E731
    monkeypatch.setattr(Versions, "_hidden", stuck)
    write(tmp_path, 4)
    assert everything(tmp_path) == {"latest", "weight_v000001", "weight_v000004"}


def test_the_link_follows_when_the_disk_has_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could leave a link to a version that is not there."""
    seen: list[tuple[str, bool, str]] = []
    root = tmp_path / "made" / "here"
    sync = versions._sync

    def noting(path: Path) -> None:
        sync(path)
        there = (root / "weight_v000002").is_dir()
        link = os.readlink(root / "latest") if (root / "latest").is_symlink() else "none"
        seen.append((os.path.relpath(path, tmp_path), there, link))

    monkeypatch.setattr(versions, "_sync", noting)
    write(root, 1)
    folders = [name for name, _, _ in seen]
    assert {".", "made", "made/here"} <= set(folders)  # what was made for the first version
    seen.clear()
    write(root, 2)
    assert [facts for facts in seen if facts[0] == "made/here"] == [
        ("made/here", True, "weight_v000001"),
        ("made/here", True, "weight_v000002"),
    ]
    assert newest(root).name == "weight_v000002"
