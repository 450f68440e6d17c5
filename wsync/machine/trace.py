"""When each process of a host did what during updates: the raw material of a timeline.

Where the environment variable WSYNC_TRACE names a folder as a trainer connects or an engine
worker starts, that process appends a line to <folder>/<pid>.jsonl after every update:
{"role", "rank", "pid", "update", "spans": [[lane, what, round or -1, begin, end], ...]}, in
nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field

from wsync import _core

_log = logging.getLogger(__name__)

VARIABLE = "WSYNC_TRACE"
PHASES = {_core.PACK: "pack", _core.LOCAL: "local", _core.UNPACK: "unpack"}
Span = tuple[str, str, int, int, int]


@contextlib.contextmanager
def stretch(end: Callable[[int, int], object]) -> Iterator[None]:
    """A stretch of this thread's time.  end: called at its end with the times of both, in ns of
    CLOCK_MONOTONIC."""
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        end(begin, time.monotonic_ns())


@dataclass
class Trace:
    """What one process does in one update; without a folder, nobody is told.  Lanes are "thread",
    whose spans are waits, and "stream"."""

    folder: str = ""
    role: str = ""
    rank: int = 0
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def wanted(cls, role: str, rank: int) -> Trace:
        return cls(os.environ.get(VARIABLE, ""), role, rank)

    def anew(self) -> Trace:
        """An empty one, for the next update."""
        return Trace(self.folder, self.role, self.rank)

    def span(self, what: str, round: int = -1) -> AbstractContextManager[None]:
        """Around what is to be a span."""
        return stretch(lambda begin, end: self.spans.append(("thread", what, round, begin, end)))

    def mark(self, what: str, round: int) -> None:
        """Something that takes no time."""
        now = time.monotonic_ns()
        self.spans.append(("thread", what, round, now, now))

    def watch(self, stream: _core.Stream, copies: int) -> None:
        """Has the stream note so many copies: for a folder, and for a trainer's report where that
        costs next to nothing, which is on the host."""
        if self.folder or (self.role == "trainer" and stream.device.name == "host"):
            stream.trace(copies)

    def take(self, stream: _core.Stream) -> None:
        """Takes what the stream has noted; copies of a route are loads."""
        for index, phase, begin, end in stream.trace(0):
            what = "load" if self.role == "engine" else PHASES[phase]
            self.spans.append(("stream", what, index, begin, end))

    def write(self, update: int) -> None:
        """Appends an update; where that fails a warning says so, for the weights are there."""
        if not self.folder:
            return
        facts = {**asdict(self), "pid": os.getpid(), "update": update}
        try:
            with open(f"{self.folder}/{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:
            _log.warning("update %d of this connection is not traced: %s", update, error)
