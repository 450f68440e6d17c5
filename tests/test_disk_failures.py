"""Updates through a folder of checkpoints that fail, and what they leave under way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.interrupts import interrupted

import wsync
from wsync import _core
from wsync.checkpoints import versions
from wsync.disk import DiskSync, _FileCalls, newest
from wsync.machine.deadline import Deadline

OPTIONS = wsync.Options(deadline=60.0, progress=False)
PATIENCE = 60.0


class Engine:
    """A handle that notes what it is told, and waits or raises where it is to."""

    workers = 1
    load_formats = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[str] = []
        self.acts: dict[str, Exception | threading.Event] = {}
        self.reached = threading.Event()

    def pause(self, mode: str, timeout: float) -> None:
        self._act("pause")

    def flush(self, timeout: float) -> None:
        self._act("flush")

    def update_weights(self, *_: Any, **__: Any) -> None: ...

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        self._act(f"load {weight_version}")

    def resume(self, timeout: float) -> None:
        self._act("resume")

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {}

    def _act(self, what: str) -> None:
        act = self.acts.get(what)
        if isinstance(act, threading.Event):
            self.reached.set()
            act.wait(PATIENCE)
        elif act is not None:
            raise act
        self.told.append(what)


class Dead(Engine):
    """Its pause fails as soon as another engine does what it is to do slowly."""

    def __init__(self, slow: Engine) -> None:
        super().__init__("dead")
        self._slow = slow

    def pause(self, mode: str, timeout: float) -> None:
        assert self._slow.reached.wait(PATIENCE)
        raise wsync.PeerClosedError("engine dead: gone")


def disk(folder: Path, *engines: Any, options: wsync.Options = OPTIONS, **more: Any) -> DiskSync:
    return DiskSync({"a": torch.zeros(3)}, engines, folder=folder, options=options, **more)


def fail_once(folder: Path, slow: Engine, what: str, go_on: threading.Event) -> DiskSync:
    """An update to version 1 that has failed while `slow` is at `what`, until `go_on` is set."""
    slow.acts[what] = go_on
    sync = disk(folder, Dead(slow), slow)
    with pytest.raises(wsync.PeerClosedError, match="engine dead: gone"):
        sync.update(version=1)
    return sync


def end_calls() -> None:
    """Waits for what failed updates have left under way, whether anybody knows of it or not."""
    for thread in threading.enumerate():
        if thread.name == "wsync-call":
            thread.join(PATIENCE)


@pytest.mark.parametrize("what", ["pause", "flush"])
def test_an_engine_that_was_slow_does_not_load_a_version_that_was_given_up(
    what: str, tmp_path: Path
) -> None:
    slow, go_on = Engine("slow"), threading.Event()
    fail_once(tmp_path, slow, what, go_on)
    go_on.set()
    end_calls()
    assert slow.told == ["pause", "flush"][: 1 if what == "pause" else 2]


def test_a_load_under_way_is_over_before_the_engine_is_told_anything(tmp_path: Path) -> None:
    slow, go_on = Engine("slow"), threading.Event()
    sync = fail_once(tmp_path, slow, "load 1", go_on)
    timer = threading.Timer(0.5, go_on.set)
    timer.start()
    del sync._requests.engines[0]
    with sync:
        sync.update(version=2)
    timer.join()
    end_calls()
    assert slow.told == ["pause", "flush", "load 1", "pause", "flush", "load 2", "resume"]


def test_a_load_that_does_not_end_costs_the_next_update_its_deadline_and_is_named(
    tmp_path: Path,
) -> None:
    slow, go_on = Engine("slow"), threading.Event()
    options = wsync.Options(deadline=0.5, progress=False)
    slow.acts["load 1"] = go_on
    try:
        with disk(tmp_path, slow, options=options) as sync:
            for text in ("engine slow: no answer", "engine slow: not done with what an update"):
                with pytest.raises(wsync.DeadlineError, match=text):
                    sync.update(version=1)
        assert slow.told == ["pause", "flush"]
    finally:
        go_on.set()
        end_calls()


def test_versions_that_engines_fail_to_load_do_not_add_up(tmp_path: Path) -> None:
    engine = Engine("engine")
    engine.acts = {f"load {number}": wsync.RemoteError("no room") for number in (3, 4, 5)}
    with disk(tmp_path, engine) as sync:
        for number in range(1, 6):
            with pytest.raises(wsync.RemoteError) if number > 2 else contextlib.nullcontext():
                sync.update(version=number)
            found = sorted(path.name for path in tmp_path.glob("weight_v*"))
            assert found == [f"weight_v{k:06d}" for k in (number - 1, number) if k]
            assert newest(tmp_path).name == found[-1]


@pytest.mark.parametrize("again", [False, True])
def test_slime_s_updater_calls_no_other_weights_what_was_published(
    again: bool, tmp_path: Path
) -> None:
    engine = Engine("engine")
    engine.acts["load 1"] = wsync.RemoteError("no room")
    args = SimpleNamespace(update_weight_disk_dir=str(tmp_path))
    layout = wsync.layout.from_tensors({"a": torch.zeros(3)})
    updater = wsync.UpdateWeightFromDisk(args, layout, None, model_name="any", options=OPTIONS)
    updater.connect_rollout_engines([engine])
    with pytest.raises(wsync.RemoteError, match="no room"):
        updater.update_weights()
    if again:
        updater.connect_rollout_engines([engine])
    updater.update_weights()
    updater.disconnect_rollout_engines()
    assert engine.told[-2:] == ["load 2", "resume"]
    assert updater.weight_version == 2


def test_a_version_counts_though_a_rank_dies_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        if (tmp_path / "latest").exists():
            raise wsync.PeerClosedError("a trainer rank is gone")

    with disk(tmp_path) as sync:
        with monkeypatch.context() as patch, pytest.raises(wsync.PeerClosedError):
            patch.setattr(sync._group, "barrier", gone)
            sync.update()
        assert newest(tmp_path).name == "weight_v000001"
        assert sync.update().version == "2"


def test_a_reader_is_not_told_that_there_is_no_version_when_a_newer_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.resolve
    with disk(tmp_path, keep=1) as sync:
        sync.update()

        def resolve(self: Path, strict: bool = False) -> Path:
            found = original(self, strict)
            if self.name == "latest" and found.name == "weight_v000001":
                monkeypatch.undo()
                sync.update()
            return found

        monkeypatch.setattr(Path, "resolve", resolve)
        assert newest(tmp_path).name == "weight_v000002"


# --- what the file system does ----------------------------------------------------------------


def test_old_versions_that_cannot_be_removed_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine("engine")
    with disk(tmp_path, engine) as sync:
        for error in (OSError(errno.ESTALE, "stale file"), wsync.StateError("no version yet")):

            def refuse(*_: Any, error: Exception = error) -> None:
                raise error

            monkeypatch.setattr("wsync.checkpoints.versions.newest", refuse)
            with caplog.at_level(logging.WARNING, "wsync"):
                sync.update()
            said = getattr(error, "strerror", None) or str(error)
            assert re.search(f"old versions stay until the next update: .*{said}", caplog.text)
        assert sync.version == 2
    assert engine.told[-2:] == ["load 2", "resume"]


def test_removing_old_versions_for_long_fails_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The version is there: a rank that failed now would be one update behind the others."""
    go_on, original = threading.Event(), shutil.rmtree

    def slow(path: Any, *arguments: Any, **named: Any) -> None:
        if "weight_v000001" in str(path):
            go_on.wait(PATIENCE)
        original(path, *arguments, **named)

    engine = Engine("engine")
    with disk(tmp_path, engine) as sync:  # which keeps two versions
        for _ in range(2):
            sync.update()
        monkeypatch.setattr(shutil, "rmtree", slow)
        monkeypatch.setattr("wsync.disk._LAST_PART", 0.001)
        with caplog.at_level(logging.WARNING, "wsync"):
            assert sync.update().version == "3"
        go_on.set()
        _ended()
        for text in ("old versions stay until the next update", "the folder is still locked"):
            assert re.search(f"{text}: {tmp_path}: the file system did not answer", caplog.text)
        assert sync.update().version == "4"
    assert engine.told[-2:] == ["load 4", "resume"]


def test_an_error_is_not_hidden_by_that_of_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.glob
    stale = False

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        if stale:
            raise OSError(errno.ESTALE, "stale file")
        return iter(original(self, pattern))

    def weights() -> dict[str, torch.Tensor]:
        nonlocal stale
        stale = True
        raise wsync.SystemCallError("no space left")

    monkeypatch.setattr(Path, "glob", glob)
    with disk(tmp_path) as sync, pytest.raises(wsync.SystemCallError, match="no space left"):
        sync.update(weights)


def _ended() -> None:
    """Waits for the threads of an update that was given up."""
    for thread in threading.enumerate():
        if thread.name in ("wsync-files", "wsync-close"):
            thread.join(PATIENCE)


@pytest.mark.parametrize("place", [(os, "open"), (os, "fsync"), (_core, "write_files")])
def test_a_file_system_that_does_not_answer_costs_the_deadline(
    place: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = place
    go_on, original = threading.Event(), getattr(module, name)

    def stall(*arguments: Any, **named: Any) -> Any:
        where = ".safetensors"
        if name == "open":
            where = str(arguments[0])
        elif name == "fsync":
            where = os.readlink(f"/proc/self/fd/{arguments[0]}")
        if where.endswith(".safetensors"):
            go_on.wait(PATIENCE)
        return original(*arguments, **named)

    options = wsync.Options(deadline=1.0, progress=False)
    with disk(tmp_path, options=options) as sync:
        descriptors = len(os.listdir("/proc/self/fd"))
        text = r"/\.wsync-work/weight_v000001\..*: the file system did not answer within 1 s"
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stall)
            try:
                with pytest.raises(wsync.DeadlineError, match=text):
                    sync.update()
            finally:
                go_on.set()
                _ended()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        sync.options = OPTIONS
        sync.update()


@pytest.mark.parametrize(
    "place", [(fcntl, "flock"), (_core, "reserve_file"), (versions, "_sync"), (shutil, "rmtree")]
)
def test_a_folder_that_does_not_answer_costs_the_deadline_and_gets_no_version(
    place: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rank 0 does alone, for which the others wait."""
    module, name = place
    go_on, original = threading.Event(), getattr(module, name)

    def stall(*arguments: Any, **named: Any) -> Any:
        go_on.wait(PATIENCE)
        return original(*arguments, **named)

    left = tmp_path / versions._WORK / "weight_v000009.01234567"  # by a trainer that was killed
    left.mkdir(parents=True)
    with disk(tmp_path, options=wsync.Options(deadline=1.0, progress=False)) as sync:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stall)
            try:
                with pytest.raises(wsync.DeadlineError, match="the file system did not answer"):
                    sync.update()
            finally:
                go_on.set()
                _ended()
        kept = {".lock", versions._WORK}
        assert not [path for path in tmp_path.iterdir() if path.name not in kept]
        sync.options = OPTIONS
        version = sync.update().version
    assert newest(tmp_path).name == f"weight_v{int(version):06d}"


def test_an_interrupt_at_any_line_leaves_no_folder_locked(tmp_path: Path) -> None:
    """Another process would find "another trainer is writing" until this one has ended."""
    kept: list[contextlib.AbstractContextManager[None]] = []  # as a traceback keeps it
    entered = []

    def update() -> None:
        kept[:] = [versions.Versions(tmp_path, None, None).writing()]
        with _FileCalls(1, PATIENCE, lambda: None) as calls, calls.within(tmp_path, kept[0]):
            entered.append(True)

    places = set()
    for place in interrupted(update, "wsync.disk", "wsync.machine.daemon_threads"):
        places.add(place)
        with (tmp_path / ".lock").open("a") as lock:
            deadline = Deadline(PATIENCE)
            while not _lockable(lock.fileno()):
                deadline.check(f"interrupted at {place}: the folder was not unlocked")
                time.sleep(0.01)
    assert entered and len(places) > 20


def _lockable(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True
