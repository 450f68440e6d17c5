"""Work that one caller does at a time, and interrupts of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.interrupts import interrupted

import wsync
from wsync.engine.update_state import UpdateState

MODULES = ("wsync.trainer.updates_base", "wsync.engine.update_state", "wsync.machine.try_lock")


def test_an_interrupt_at_any_line_leaves_no_engine_busy() -> None:
    state = UpdateState()

    def load() -> None:
        with state.replacing("a load"), pytest.raises(wsync.StateError), state.only():
            raise AssertionError("two are alone")

    # each time, a state that stayed busy would refuse the next
    assert len(list(interrupted(load, *MODULES))) > 10


def test_an_interrupt_at_any_line_leaves_no_trainer_busy(tmp_path: Path) -> None:
    sync = wsync.DiskSync({"w": torch.zeros(1)}, folder=tmp_path)

    def update() -> None:
        with sync._updating("1", None):
            pass

    assert len(list(interrupted(update, *MODULES))) > 10
    assert len(list(interrupted(sync.close, *MODULES))) > 3
    with pytest.raises(wsync.StateError, match="after close"):
        sync.update()
