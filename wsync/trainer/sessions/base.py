"""A trainer rank's session with one worker of a plan."""

from __future__ import annotations

import abc
import functools
import threading
from concurrent.futures import Future

from wsync import _core
from wsync.machine.daemon_threads import Lane
from wsync.machine.deadline import Check, Deadline
from wsync.messages.control import WHOLE
from wsync.trainer.requests import UnderWay
from wsync.trainer.round_contents import WorkerRounds

Span = tuple[int, int]


class Session(abc.ABC):
    """One worker's session.  The methods are called in the order of csrc/ipc/session.h.

    worker: its number in the plan (see PlanWorker).
    """

    rounds: WorkerRounds  # once attached
    own_loading = ""  # which tensors go through a load_weights of the engine's own, and why
    audit_seconds = 0.0  # of the update, once prepared

    def __init__(self, worker: int) -> None:
        self.worker = worker

    @property
    def round_count(self) -> int:
        """Once attached: the rounds that its worker is told of."""
        return len(self.rounds.slots)

    @property
    def gpu(self) -> str | None:
        """Once accepted: the UUID of the GPU that the ring has to be on, "" for the host; None
        where rings may be anywhere."""
        return None

    @property
    def under_way(self) -> UnderWay:
        """Requests to engines that have not been answered."""
        return []

    @property
    @abc.abstractmethod
    def loaded(self) -> int:
        """Rounds that have been taken, as far as is known."""

    @abc.abstractmethod
    def accept(self, timeout: float, check: Check) -> bytes:
        """Waits for the worker; the layout it keeps, or control.WHOLE, PIECES or LEARN."""

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        """Makes the ring, if `attach` does not.  Raises NoMemoryError where there is none."""
        return

    def drop_ring(self) -> None:
        """Undoes that."""
        return

    @abc.abstractmethod
    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Takes on a plan; returns where the worker's ring lies."""

    @abc.abstractmethod
    def begin(self, update: int, version: str, timeout: float, check: Check) -> None: ...

    @abc.abstractmethod
    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        """Has the stream wait, or waits here, until the slot of a round may be written."""

    @abc.abstractmethod
    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        """Announces a round that is ready once the stream has filled its slot.  If the worker
        cannot wait for that, this call does."""

    @abc.abstractmethod
    def wait(self, round: int, timeout: float, check: Check) -> None:
        """Waits until a round has been taken."""

    @abc.abstractmethod
    def look(self) -> None:
        """Raises if the worker has failed or is gone; does not wait."""

    @abc.abstractmethod
    def prepared(self, timeout: float, check: Check) -> None:
        """Waits until the worker holds every byte."""

    def commit(self, timeout: float, check: Check) -> None:
        """Ends the update; nothing to do where the last request has carried the version."""
        return

    def park(self, timeout: float, check: Check) -> None:
        """After the commit: gives the ring's memory back until the next update, where wanted."""
        return

    @abc.abstractmethod
    def abort(self, text: str) -> None:
        """Tells the worker why the update ends."""

    @abc.abstractmethod
    def close(self) -> None: ...


class BucketSession(Session):
    """A worker that takes whole tensors: every round goes to it as a bucket, from a thread.  A
    slot is free again when its bucket has gone."""

    def __init__(self, worker: int, lane: str) -> None:
        super().__init__(worker)
        self._sent: list[Future[None]] = []  # they end in this order
        self._seen = 0  # how many of them were seen to have ended well
        self._given_up = threading.Event()
        self._lane = Lane(lane)

    @property
    def loaded(self) -> int:
        return sum(sent.done() for sent in self._sent)

    def accept(self, timeout: float, check: Check) -> bytes:
        return WHOLE

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        self._sent, self._seen = [], 0

    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        former = self.rounds.slots[round].wait_round
        if former >= 0:
            self.wait(former, timeout, check)

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        stream.synchronize(timeout, check)
        check()  # after an exchange has failed, streams go on and may have copied anything
        self._sent.append(self._lane.submit(functools.partial(self._send, round)))

    def look(self) -> None:
        while self._seen < len(self._sent) and self._sent[self._seen].done():
            self._sent[self._seen].result()
            self._seen += 1

    def prepared(self, timeout: float, check: Check) -> None:
        deadline = Deadline(timeout)
        for round in range(len(self._sent)):
            self.wait(round, deadline.left, check)

    def abort(self, text: str) -> None:
        self._given_up.set()

    def close(self) -> None:
        self._given_up.set()
        self._lane.close()

    @abc.abstractmethod
    def _send(self, round: int) -> None:
        """Sends a bucket; called from the thread."""
