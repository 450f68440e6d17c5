"""Updates through a folder of checkpoints that fail, and what they leave under way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import test_checked_engine
import torch

import wsync
from wsync.disk import DiskSync, newest

OPTIONS = wsync.Options(deadline=60.0, progress=False)
PATIENCE = 60.0


class Engine(test_checked_engine.Engine):
    """One that waits or raises where it is to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.acts: dict[str, Exception | threading.Event] = {}
        self.reached = threading.Event()

    def _hear(self, what: str) -> None:
        act = self.acts.get(what)
        if isinstance(act, threading.Event):
            self.reached.set()
            act.wait(PATIENCE)
        elif act is not None:
            raise act
        super()._hear(what)


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


def test_a_load_that_does_not_end_costs_the_next_update_its_deadline_and_is_named(
    tmp_path: Path,
) -> None:
    slow, go_on = Engine("slow"), threading.Event()
    options = wsync.Options(deadline=0.5, progress=False)
    slow.acts["load"] = go_on
    try:
        with disk(tmp_path, slow, options=options) as sync:
            for text in ("engine slow: no answer", "engine slow: still busy with a request"):
                with pytest.raises(wsync.DeadlineError, match=text):
                    sync.update(version=1)
        assert slow.told == ["pause", "flush"]
    finally:
        go_on.set()
        end_calls()


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
