"""Places of the protocol at which a process of the fault matrix meets with its fault.

A fault is (phase, how).  `Trainer faults` wrap a method of wsync's classes in one process for one
update; a worker's are calls that its receiver makes at the same places (fault_engine.py).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from wsync.sync import Sync
from wsync.trainer.lending import Lending
from wsync.trainer.requests import EngineRequests
from wsync.trainer.sessions.worker import WorkerSession

# where a trainer rank is in each phase: just before it calls
TRAINER: dict[str, tuple[type, str]] = {
    "open": (Sync, "_open"),
    "attach": (WorkerSession, "attach"),
    "lend": (Lending, "share"),  # direct delivery alone
    "round": (WorkerSession, "post"),
    "done": (WorkerSession, "wait"),
    "prepared": (WorkerSession, "prepared"),
    "commit": (WorkerSession, "commit"),
    "close": (EngineRequests, "answered"),
}

SLACK_NBYTES = 4 << 20  # per process: what an allocator may keep


class Fault:
    """A fault that strikes once, at its phase."""

    def __init__(self, phase: str, how: str, folder: str) -> None:
        self.phase, self.how, self.folder = phase, how, folder
        self.struck = False
        self._undo: list[Callable[[], object]] = []

    def at(self, phase: str) -> None:
        """Says that this process has come to a phase."""
        if phase == self.phase and not self.struck:
            self.struck = True
            getattr(self, "_" + self.how)()

    def arm(self) -> None:
        """Makes the phases of this trainer rank known."""
        owner, name = TRAINER[self.phase]
        method = getattr(owner, name)

        def struck(target: Any, *arguments: Any, **named: Any) -> Any:
            self.at(self.phase)
            return method(target, *arguments, **named)

        setattr(owner, name, struck)
        self._undo.append(lambda: setattr(owner, name, method))

    def disarm(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # --- what can happen; the names are those of the report -----------------------------------

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _raise(self) -> None:
        raise ValueError("a planted failure")

    def _exit(self) -> None:
        sys.exit(3)


def census() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        maps = sum("memfd:wsync" in line for line in file)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": maps,
    }


def memory() -> int:
    """Bytes of this process's own memory and of shared memory files, those whole: neither other
    processes that end nor code that is run for the first time change it, as they do Pss."""
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as file:
        parts = [line.split()[1] for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(map(int, parts)) * 1024


def allowed(found: dict[str, int]) -> dict[str, int]:
    """The limits of a process that was found to hold so much."""
    return {**found, "memory": found["memory"] + SLACK_NBYTES}


def settled(limits: dict[str, int] | None, patience: float = 60.0) -> dict[str, int]:
    """What this process holds, memory too, once that is within limits, or after a while."""
    end = time.monotonic() + patience
    while True:
        found = {**census(), "memory": memory()}
        if limits is None or all(found[name] <= limits[name] for name in limits):
            return found
        if time.monotonic() > end:
            return found
        time.sleep(0.05)
