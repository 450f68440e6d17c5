"""A folder of versions: what is removed, what is left alone, and what the disk has when."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import wsync
from wsync import versions
from wsync.checkpoint import INDEX
from wsync.disk import DiskSync, newest
from wsync.versions import Versions

OPTIONS = wsync.Options(deadline=10.0, progress=False)


def write(folder: Path, *numbers: int, keep: int | None = 1) -> None:
    with DiskSync({"a": torch.ones(3)}, folder=folder, keep=keep, options=OPTIONS) as sync:
        for number in numbers:
            sync.update(version=number)


def everything(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A child of this process, with its descriptors, until the block ends."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    try:
        yield
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_a_process_that_was_forked_meanwhile_keeps_nobody_out(tmp_path: Path) -> None:
    folder = Versions(tmp_path, None, 2)
    with contextlib.ExitStack() as stack:
        with folder.writing():
            stack.enter_context(forked())
        with Versions(tmp_path, None, 2).writing():
            pass


def test_what_a_dead_writer_left_is_removed_and_other_hidden_files_are_not(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".weight_vlatest.0123abcd").symlink_to("weight_v000001")
    (tmp_path / ".weight_v000002.0123abcd").mkdir()
    (tmp_path / ".weight_v000002.0123abcd" / "part").write_text("x")
    (tmp_path / ".weight_v_of_mine").mkdir()
    write(tmp_path, 2)
    assert everything(tmp_path) == {"latest", "weight_v000002", ".weight_v_of_mine"}


def test_only_versions_are_pruned(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 2, keep=None)
    mine = {"weight_v000001-best", "weight_v000003", "weight_vacation", "weight_v_half"}
    shutil.copytree(tmp_path / "weight_v000001", tmp_path / "weight_v000001-best")
    (tmp_path / "weight_v000003").mkdir()  # somebody else's checkpoint: its index says nothing
    (tmp_path / "weight_v000003" / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    (tmp_path / "weight_v_half").mkdir()
    (tmp_path / "weight_v_half" / INDEX).write_text('{"meta')
    (tmp_path / "weight_vacation").write_text("a file")
    write(tmp_path, 7)
    assert everything(tmp_path) == {"latest", "weight_v000007", *mine}


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
