"""Records when each process of a host did what during updates: the data of a timeline.

If the environment variable WSYNC_TRACE names a folder when a trainer connects or an engine worker
starts, that process appends a line to <folder>/<pid>.jsonl after every update:
{"role", "rank", "pid", "update", "spans": [[lane, what, round or -1, begin, end], ...]}.  Times are
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
    """Measures the block.  end: called with the times of its begin and end, in ns of
    CLOCK_MONOTONIC."""
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        end(begin, time.monotonic_ns())


@dataclass
class Trace:
    """The activity of one process in one update.  Without a folder, nothing is written.  Lanes are
    "thread", whose spans are waits, and "stream"."""

    folder: str = ""
    role: str = ""
    rank: int = 0
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def wanted(cls, role: str, rank: int) -> Trace:
        return cls(os.environ.get(VARIABLE, ""), role, rank)

    def anew(self) -> Trace:
        """Returns an empty trace, for the next update."""
        return Trace(self.folder, self.role, self.rank)

    def span(self, what: str, round: int = -1) -> AbstractContextManager[None]:
        """Records the block as a span."""
        return stretch(lambda begin, end: self.spans.append(("thread", what, round, begin, end)))

    def mark(self, what: str, round: int) -> None:
        """Records an event without duration."""
        now = time.monotonic_ns()
        self.spans.append(("thread", what, round, now, now))

    def watch(self, stream: _core.Stream, copies: int) -> None:
        """Makes the stream record up to `copies` copies.  This is done if there is a folder,
        and on the host for a trainer's report, because it costs next to nothing there."""
        if self.folder or (self.role == "trainer" and stream.device.name == "host"):
            stream.trace(copies)

    def take(self, stream: _core.Stream) -> None:
        """Takes the stream's records; in an engine, copies are loads."""
        for index, phase, begin, end in stream.trace(0):
            what = "load" if self.role == "engine" else PHASES[phase]
            self.spans.append(("stream", what, index, begin, end))

    def write(self, update: int) -> None:
        """Appends an update.  An error is only logged, because the weights have been delivered."""
        if not self.folder:
            return
        facts = {**asdict(self), "pid": os.getpid(), "update": update}
        try:
            with open(f"{self.folder}/{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:
            _log.warning("update %d of this connection is not traced: %s", update, error)
