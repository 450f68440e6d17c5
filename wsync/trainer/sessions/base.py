"""What sessions have in common whose rounds leave as buckets, one after another, from a thread."""

from __future__ import annotations

import abc
import functools
import threading
import time
from concurrent.futures import Future
from typing import Protocol

from wsync import _core
from wsync.machine.deadline import Check
from wsync.machine.lanes import Lane
from wsync.messages.control import WHOLE


class BucketSession(abc.ABC):
    """A receiver of whole tensors whose slot is free again when its bucket has gone.

    `attach` sets `_waits`: by round, the round whose bucket has to have gone before, or -1.
    """

    def __init__(self, worker: int, lane: str) -> None:
        self.worker = worker
        self._waits: list[int] = []
        self._sent: list[Future[None]] = []
        self._given_up = threading.Event()
        self._lane = Lane(lane)

    def accept(self, timeout: float, check: Check) -> bytes:
        """Such a receiver takes whole tensors."""
        return WHOLE

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        self._sent = []

    @property
    def loaded(self) -> int:
        """Rounds whose bucket has gone."""
        return sum(sent.done() for sent in self._sent)

    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        """Waits until the bucket of the slot's former round has gone."""
        if self._waits[round] >= 0:
            self.wait(self._waits[round], timeout, check)

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        """Has the bucket go once the stream has filled it."""
        stream.synchronize(timeout, check)
        self._sent.append(self._lane.submit(functools.partial(self._send, round)))

    @abc.abstractmethod
    def wait(self, round: int, timeout: float, check: Check) -> None:
        """Waits until the bucket of a round has gone."""

    def look(self) -> None:
        """Raises what has become of a bucket; waits for nothing."""
        for sent in self._sent:
            if sent.done():
                sent.result()

    def prepared(self, timeout: float, check: Check) -> None:
        end = time.monotonic() + timeout
        for round in range(len(self._sent)):
            self.wait(round, end - time.monotonic(), check)

    def commit(self, timeout: float, check: Check) -> None:
        """The last bucket's request has already carried the version."""
        return

    def abort(self, text: str) -> None:
        self._given_up.set()

    def close(self) -> None:
        self._given_up.set()
        self._lane.close()

    @abc.abstractmethod
    def _send(self, round: int) -> None:
        """Sends a bucket; called from the thread."""


Span = tuple[int, int]


class Session(Protocol):
    """One receiver of a plan's rounds, in the order of csrc/ipc/session.h."""

    worker: int

    @property
    def loaded(self) -> int: ...
    def accept(self, timeout: float, check: Check) -> bytes: ...
    def attach(
        self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check
    ) -> Span: ...
    def begin(self, update: int, version: str, timeout: float, check: Check) -> None: ...
    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None: ...
    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None: ...
    def wait(self, round: int, timeout: float, check: Check) -> None: ...
    def look(self) -> None: ...
    def prepared(self, timeout: float, check: Check) -> None: ...
    def commit(self, timeout: float, check: Check) -> None: ...
    def abort(self, text: str) -> None: ...
    def close(self) -> None: ...


class Exporter(Protocol):
    """A trainer rank's end of the connection to a worker, as `_core.Exporter` has it."""

    @property
    def address(self) -> str: ...
    @property
    def loaded(self) -> int: ...
    @property
    def worker_uuid(self) -> str: ...
    def accept(self, timeout: float, check: _core.Check = None) -> bytes: ...
    def attach(
        self, ring: _core.Memory, manifest: bytes, timeout: float, check: _core.Check = None
    ) -> None: ...
    def begin(
        self, update: int, rounds: int, timeout: float, check: _core.Check = None
    ) -> None: ...
    def acquire(
        self,
        wait_round: int,
        stream: _core.Stream | None,
        timeout: float,
        check: _core.Check = None,
    ) -> None: ...
    def look(self) -> None: ...
    def post(
        self, round: int, stream: _core.Stream, timeout: float, check: _core.Check = None
    ) -> None: ...
    def prepared(self, timeout: float, check: _core.Check = None) -> tuple[int, int, int]: ...
    def commit(self, timeout: float, check: _core.Check = None, park: bool = False) -> None: ...
    def park(self, timeout: float, check: _core.Check = None) -> None: ...
    def abort(self, text: str) -> None: ...
    def close(self) -> None: ...
