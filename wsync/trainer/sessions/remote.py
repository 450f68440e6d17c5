"""Sessions with remote workers that run wsync's receiver: only control, over TCP.

Their rounds travel in the plan's exchange, of which each is a rank: see
wsync.exchange.remote_plan.
"""

from __future__ import annotations

from wsync import _core
from wsync.exchange.introductions import Introduction
from wsync.exchange.remote_plan import RemotePlan
from wsync.machine.deadline import Check, Deadline
from wsync.messages.tcp_channel import COUNTS, PARK, UPDATE, Channel, Frame, Listener
from wsync.trainer.round_contents import WorkerRounds
from wsync.trainer.sessions.base import Span
from wsync.trainer.sessions.worker import WorkerSession


class RemoteExporter:
    """A trainer rank's end, with the methods of `_core.Exporter`; its rounds need no care."""

    def __init__(self, host: str, peer: str) -> None:
        self._listener = Listener(host, peer)
        self._channel: Channel | None = None
        self.introduction = Introduction()  # what the worker says of itself, once accepted
        self.loaded = 0  # rounds that have been exchanged: what is known here

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def worker_uuid(self) -> str:
        """That of the host: nothing is shared with the worker."""
        return ""

    @property
    def _peer(self) -> Channel:
        if self._channel is None:
            raise _core.StateError("the worker has not connected")
        return self._channel

    def accept(self, timeout: float, check: Check) -> bytes:
        deadline = Deadline(timeout)
        self._channel = self._listener.accept(timeout, check)
        self._listener.close()
        said = self._channel.wait((Frame.INTRODUCTION,), deadline.left, check)[1]
        self.introduction = Introduction.from_bytes(said)
        return self._channel.wait((Frame.BLOB,), deadline.left, check)[1]

    def attach(self, ring: _core.Memory, manifest: bytes, timeout: float, check: Check) -> None:
        """Says what tensors there are; the worker has a ring of its own."""
        self._peer.send(Frame.MODEL, manifest, timeout, check)

    def tell_plan(self, plan: bytes, timeout: float, check: Check) -> None:
        """Hands over the plan."""
        self._peer.send(Frame.PLAN, plan, timeout, check)

    def begin(self, update: int, rounds: int, timeout: float, check: Check) -> None:
        self.loaded = 0
        self._peer.send(Frame.BEGIN, UPDATE.pack(update, rounds), timeout, check)

    def acquire(
        self, wait_round: int, stream: _core.Stream | None, timeout: float, check: Check
    ) -> None:
        """Waits for nothing: the worker frees its own slots."""
        self._peer.look()

    def look(self) -> None:
        if self._channel is not None:
            self._channel.look()

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        self.loaded = round + 1

    def prepared(self, timeout: float, check: Check) -> tuple[int, int, int]:
        _, content = self._peer.wait((Frame.PREPARED,), timeout, check)
        tensors, nbytes, audit_ns = COUNTS.unpack(content)
        return tensors, nbytes, audit_ns

    def commit(self, timeout: float, check: Check, park: bool) -> None:
        self._peer.send(Frame.COMMIT, PARK if park else b"", timeout, check)

    def park(self, timeout: float, check: Check) -> None:
        """There is no ring here."""

    def abort(self, text: str) -> None:
        if self._channel is not None:
            self._channel.fail(text)

    def close(self) -> None:
        self._listener.close()
        if self._channel is not None:
            self._channel.close()


class RemoteSession(WorkerSession):
    """A remote worker that runs wsync's receiver: it takes part in the exchange itself.

    host: the address of this host that the worker can reach; park: whether the exchange gives its
    memory back between updates, which all its ranks do together.
    """

    def __init__(
        self, worker: int, *, engine: str, index: int, host: str, park: bool = False
    ) -> None:
        self._host = host
        self.remote_plan: RemotePlan | None = None  # once there is a plan
        super().__init__(worker, engine=engine, index=index, park=park)

    @property
    def gpu(self) -> str | None:
        return None

    @property
    def introduction(self) -> Introduction:
        """What the worker says of itself, once accepted."""
        assert isinstance(self._exporter, RemoteExporter)
        return self._exporter.introduction

    def _listen(self) -> RemoteExporter:
        return RemoteExporter(self._host, self.name)

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        """The ring is the worker's own."""

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Hands over the plan; the ring is the worker's own."""
        assert self.remote_plan is not None and isinstance(self._exporter, RemoteExporter)
        self.rounds = WorkerRounds(plan, self.worker)
        self._exporter.tell_plan(self.remote_plan.to_bytes(), timeout, check)
        self.remote_plan = None
        return 0, 0
