"""A folder of versions: what is removed, what is left alone, and what the disk has when."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
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


def test_what_links_lead_to_is_not_removed(tmp_path: Path) -> None:
    root, mine = tmp_path / "root", tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("x")
    write(root, 1)
    died(root)
    (root / versions._WORK / "link").symlink_to(mine)
    write(root, 2, keep=None)
    assert everything(root) == {"latest", "weight_v000001", "weight_v000002"}
    assert (mine / "file").read_text() == "x"


def test_what_cannot_be_removed_stays_until_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    died(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        write(tmp_path, 2)
    assert {versions._WORK, "weight_v000002"} <= everything(tmp_path)
    write(tmp_path, 3)
    assert everything(tmp_path) == {"latest", "weight_v000003"}


@pytest.mark.parametrize(("name", "kind"), [(".lock", "regular file"), (".wsync-work", "folder")])
def test_own_files_are_not_found_through_links(name: str, kind: str, tmp_path: Path) -> None:
    """Nor waited for."""
    root = tmp_path / "root"
    write(root, 1)
    other = tmp_path / "other"
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(other)
    with pytest.raises(wsync.WsyncError, match=name):
        write(root, 2)
    assert not other.exists()
    (root / name).unlink()
    os.mkfifo(root / name)
    with pytest.raises(wsync.StateError, match=rf"{name}: is no {kind}"):
        write(root, 2)
    (root / name).unlink()
    write(root, 2)
    assert everything(root) == {"latest", "weight_v000002"}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_version_takes_anothers_place(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exchanges: whether the file system can exchange two names, so that there always is one."""
    gaps = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        made = rename(path, target)
        if not (tmp_path / "latest" / INDEX).exists():
            gaps.append(path.name)
        return made

    monkeypatch.setattr(Path, "rename", watched)
    if not exchanges:
        monkeypatch.setattr(versions, "_exchange", lambda one, other: False)
    for value in (1.0, 2.0, 3.0):
        with DiskSync(
            {"a": torch.full((3,), value)}, folder=tmp_path, replace=True, options=OPTIONS
        ) as sync:
            gaps.clear()
            sync.update(version=7)
        assert everything(tmp_path) == {"weight_v000007", "latest"}
        (part,) = newest(tmp_path).glob("*.safetensors")
        assert load_file(part)["a"].tolist() == [value] * 3
    assert gaps == ([] if exchanges else ["weight_v000007"])


def test_an_index_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "weight_v000003").mkdir()
    os.mkfifo(tmp_path / "weight_v000003" / INDEX)
    write(tmp_path, 2)
    assert everything(tmp_path) >= {"latest", "weight_v000002", "weight_v000003"}
    assert "weight_v000001" not in everything(tmp_path)


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


def test_a_version_has_a_tokenizers_further_templates(tmp_path: Path) -> None:
    base, root = tmp_path / "base", tmp_path / "root"
    for folder in (base / "additional_chat_templates", base / "onnx", root):
        folder.mkdir(parents=True)
    for file in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "onnx/x.json"):
        (base / file).write_text(file)
    folder = Versions(root, base, 2).begin("1")
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
    assert all((folder / file).read_text() == file for file in found)


def test_only_versions_are_pruned(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 2, keep=None)
    behind = ("-best", ".best", ".20261123", ".0", ".1", ".007", ".1000", "..2")
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


def test_old_versions_are_removed_while_there_is_time(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, keep=None)
    turns = iter([True, False])
    Versions(tmp_path, None, 1).prune(lambda: next(turns))
    assert everything(tmp_path) == {".wsync-work", "latest", "weight_v000002", "weight_v000003"}


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


def refused(root: Path, match: str) -> None:
    for _ in range(2):
        with pytest.raises(wsync.WsyncError, match=match):
            write(root, 7)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_has_the_name_of_the_link_is_left_alone(kind: str, tmp_path: Path) -> None:
    """A folder of links that was copied without them has one."""
    latest = tmp_path / "latest"
    make = latest.mkdir if kind == "folder" else latest.touch
    make()
    refused(tmp_path, "^.*/latest: is no link, ")
    assert everything(tmp_path) == {"latest"}
    latest.rmdir() if kind == "folder" else latest.unlink()
    with DiskSync({"a": torch.ones(3)}, folder=tmp_path, options=OPTIONS) as sync:
        make()
        for _ in range(2):
            with pytest.raises(wsync.StateError, match=r"^.*/latest: is no link, "):
                sync.update(version=7)
    assert everything(tmp_path) == {"latest"}


def test_versions_that_get_no_link_do_not_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patched:

        def no_links(path: Path, *_: object) -> None:
            raise PermissionError(1, "Operation not permitted", str(path))

        patched.setattr(Path, "symlink_to", no_links)
        refused(tmp_path, "Operation not permitted")
    assert everything(tmp_path) == {"latest", "weight_v000001"}
    assert newest(tmp_path).name == "weight_v000001"


def test_a_version_that_readers_have_is_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = versions._sync

    def failing(path: Path) -> None:
        if (tmp_path / "latest").is_symlink():
            raise OSError(5, "Input/output error", str(path))
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(versions, "_sync", failing)
        with pytest.raises(wsync.SystemCallError):
            write(tmp_path, 1)
    assert newest(tmp_path).name == "weight_v000001"


@pytest.mark.parametrize("replace", [False, True])
def test_a_link_that_leads_nowhere_is_no_free_name(replace: bool, tmp_path: Path) -> None:
    (tmp_path / "weight_v000007").symlink_to("nowhere")
    with DiskSync({"a": torch.ones(3)}, folder=tmp_path, replace=replace, options=OPTIONS) as sync:
        sync.update(version=7)
    assert newest(tmp_path).name == ("weight_v000007" if replace else "weight_v000007.2")
    assert (tmp_path / "weight_v000007").is_symlink() != replace


def test_the_newest_versions_stay_whatever_the_clock_says(tmp_path: Path) -> None:
    write(tmp_path, 1)
    ahead = 4_000_000_000
    os.utime(tmp_path / "weight_v000001" / INDEX, (ahead, ahead))
    write(tmp_path, 2, 3, 4, keep=2)
    assert everything(tmp_path) == {"latest", "weight_v000003", "weight_v000004"}
