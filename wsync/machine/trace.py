"""When each process of a host did what during updates: the raw material of a timeline.

Where the environment variable WSYNC_TRACE names a folder as a trainer connects or an engine
worker starts, that process appends a line to <folder>/<pid>.jsonl after every update:
{"role", "rank", "pid", "update", "spans": [[lane, what, round or -1, begin, end], ...]}, in
nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from wsync import _core

_log = logging.getLogger(__name__)

VARIABLE = "WSYNC_TRACE"
PHASES = {_core.PACK: "pack", _core.LOCAL: "local", _core.UNPACK: "unpack"}
Span = tuple[str, str, int, int, int]


class Stretch:
    """A stretch of this thread's time, for `with`; there are some in every round."""

    __slots__ = ("_begin", "_end")

    def __init__(self, end: Callable[[int, int], object]) -> None:
        """end: called at the end with the times of both, in ns of CLOCK_MONOTONIC."""
        self._end = end

    def __enter__(self) -> None:
        self._begin = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._end(self._begin, time.monotonic_ns())


class Trace:
    """What one process does in one update; without a folder, nobody is told.  Lanes are "thread",
    whose spans are waits, and "stream"."""

    def __init__(self, folder: str = "", role: str = "", rank: int = 0) -> None:
        self.role = role
        self.rank = rank
        self.spans: list[Span] = []
        self._folder = folder

    @classmethod
    def wanted(cls, role: str, rank: int) -> Trace:
        return cls(os.environ.get(VARIABLE, ""), role, rank)

    def anew(self) -> Trace:
        """An empty one, for the next update."""
        return Trace(self._folder, self.role, self.rank)

    def span(self, what: str, round: int = -1) -> Stretch:
        """Around what is to be a span."""
        return Stretch(lambda begin, end: self.spans.append(("thread", what, round, begin, end)))

    def mark(self, what: str, round: int) -> None:
        """Something that takes no time."""
        now = time.monotonic_ns()
        self.spans.append(("thread", what, round, now, now))

    def watch(self, stream: _core.Stream, copies: int) -> None:
        """Has the stream note so many copies: for a folder, and for a trainer's report where that
        costs next to nothing, which is on the host."""
        if self._folder or (self.role == "trainer" and stream.device.name == "host"):
            stream.trace(copies)

    def take(self, stream: _core.Stream) -> None:
        """Takes what the stream has noted; copies of a route are loads."""
        for index, phase, begin, end in stream.trace(0):
            what = "load" if self.role == "engine" else PHASES[phase]
            self.spans.append(("stream", what, index, begin, end))

    def write(self, update: int) -> None:
        """Appends an update; where that fails a warning says so, for the weights are there."""
        if not self._folder:
            return
        pid = os.getpid()
        facts = {
            "role": self.role,
            "rank": self.rank,
            "pid": pid,
            "update": update,
            "spans": self.spans,
        }
        try:
            with open(Path(self._folder, f"{pid}.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:
            _log.warning("update %d of this connection is not traced: %s", update, error)
