"""Records what each process of a host did during updates, and when: the data of a timeline.

If the environment variable WSYNC_TRACE names a folder when a trainer connects or an engine worker
starts, that process appends a line to <folder>/<pid>.jsonl after every update:
{"role", "rank", "pid", "update", "spans": [[lane, what, round or -1, begin, end], ...]}.  A time is
a number of nanoseconds of CLOCK_MONOTONIC, a clock that all processes of a host share.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from wsync import _core

_log = logging.getLogger(__name__)

VARIABLE = "WSYNC_TRACE"
PHASES = {_core.PACK: "pack", _core.LOCAL: "local", _core.UNPACK: "unpack"}
Span = tuple[str, str, int, int, int]


class Stretch:
    """Measures a block; there are several in every round.

    end: called with the times at which the block began and ended, in ns of CLOCK_MONOTONIC."""

    __slots__ = ("_begin", "_end")

    def __init__(self, end: Callable[[int, int], object]) -> None:
        self._end = end

    def __enter__(self) -> None:
        self._begin = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._end(self._begin, time.monotonic_ns())


@dataclass
class Trace:
    """The activity of one process in one update.  If there is no folder, nothing is written.

    There are two lanes: "thread", whose spans are waits, and "stream", whose spans are copies.
    """

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

    def span(self, what: str, round: int = -1) -> Stretch:
        """Records the block as a span."""
        return Stretch(lambda begin, end: self.spans.append(("thread", what, round, begin, end)))

    def mark(self, what: str, round: int) -> None:
        """Records an event without duration."""
        now = time.monotonic_ns()
        self.spans.append(("thread", what, round, now, now))

    def watch(self, stream: _core.Stream, copies: int) -> None:
        """Makes the stream record up to `copies` copies, if there is a folder.  A trainer's stream
        on the host always records them for the report, because this takes hardly any time."""
        if self.folder or (self.role == "trainer" and stream.device.name == "host"):
            stream.trace(copies)

    def take(self, stream: _core.Stream) -> None:
        """Appends what the stream has recorded.  In an engine, every copy is named "load"."""
        for index, phase, begin, end in stream.trace(0):
            what = "load" if self.role == "engine" else PHASES[phase]
            self.spans.append(("stream", what, index, begin, end))

    def write(self, update: int) -> None:
        """Appends a line to the file.  If that fails, the error is only logged, because the weights
        have been delivered."""
        if not self.folder:
            return
        facts = {**asdict(self), "pid": os.getpid(), "update": update}
        try:
            with open(f"{self.folder}/{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:
            _log.warning("update %d of this connection is not traced: %s", update, error)
