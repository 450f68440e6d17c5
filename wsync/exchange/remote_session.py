"""Both ends of a session with a remote worker: control over TCP, rounds by the plan's exchange."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

from wsync import _core
from wsync.exchange.group_exchange import Exchange, GroupExchange
from wsync.exchange.introductions import Introduction
from wsync.exchange.remote_plan import Meeting, RemotePlan
from wsync.exchange.update_group import Rendezvous, UpdateGroup
from wsync.machine.deadline import PUNCTUAL, Check, Deadline
from wsync.messages.tcp_channel import COUNTS, PARK, UPDATE, Channel, Frame, Listener

_log = logging.getLogger(__name__)


class RemoteExporter:
    """A trainer rank's end of a session with a remote worker, with the methods of `_core.Exporter`.
    The exchange moves the rounds."""

    worker_uuid: str | None = None  # nothing is shared with the worker

    def __init__(self, host: str, peer: str) -> None:
        self._listener = Listener(host, peer)
        self._channel: Channel | None = None
        self.introduction = Introduction()  # what the worker says of itself, once accepted
        self.loaded = 0  # rounds that have been exchanged; more is not known here

    @property
    def address(self) -> str:
        return self._listener.address

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
        """Sends the list of the model's tensors.  Attaches no ring, because the worker has its
        own."""
        self._peer.send(Frame.MODEL, manifest, timeout, check)

    def tell_plan(self, plan: bytes, timeout: float, check: Check) -> None:
        """Sends the plan."""
        self._peer.send(Frame.PLAN, plan, timeout, check)

    def begin(self, update: int, rounds: int, timeout: float, check: Check) -> None:
        self.loaded = 0
        self._peer.send(Frame.BEGIN, UPDATE.pack(update, rounds), timeout, check)

    def acquire(
        self, wait_round: int, stream: _core.Stream | None, timeout: float, check: Check
    ) -> None:
        """Does not wait, because the worker frees its own slots."""
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
        """Does nothing: there is no ring here."""

    def abort(self, text: str) -> None:
        if self._channel is not None:
            self._channel.fail(text)

    def close(self) -> None:
        self._listener.close()
        if self._channel is not None:
            self._channel.close()


class RemoteImporter:
    """The counterpart of `_core.Importer` for a trainer on another host, with the same methods.

    The worker is a rank of the plan's exchange.  `take` receives a round and unpacks it into this
    worker's own ring.  Meanwhile the next round is on its way, and the loader's stream may still
    load earlier rounds.
    """

    def __init__(self, address: str, blob: bytes, timeout: float, device: _core.Device) -> None:
        self.generation = 0
        self.manifest = b""
        self._device = device
        self.ring = _core.Memory(1, device)
        self._plan: _core.Plan | None = None
        self._worker = 0
        self._waits: list[int] = []
        self._group: UpdateGroup | None = None
        self._exchange: Exchange | None = None
        self._following: _core.BufferTable | None = None
        self._stream = _core.Stream(1, device)
        self._events = _core.Memory(64, device, control=True)
        self._loaded = _core.Event(self._events, 0)
        self._unpacked = _core.Event(self._events, 8)
        self._passed = 0  # rounds of former updates: events count on from there
        self._rounds = 0
        self._recorded: list[bool] = []
        self._channel = Channel.connect(address, timeout)
        try:
            self._channel.send(Frame.INTRODUCTION, Introduction.on(device).to_bytes(), timeout)
            self._channel.send(Frame.BLOB, blob, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def bound(self) -> None:
        """This is always None, because memory cannot be lent to another host."""
        return

    def begin(self, timeout: float, check: Check = bool) -> tuple[int, int]:
        """Waits for an update; returns (update, rounds).  A plan, or the list of the model's
        tensors, comes before the first update."""
        while True:
            wanted = (Frame.BEGIN,) if self.generation else (Frame.MODEL, Frame.PLAN)
            kind, content = self._channel.wait(wanted, timeout, check)
            if kind == Frame.BEGIN:
                break
            self.generation += 1
            if kind == Frame.MODEL:
                self.manifest = content
            else:
                self._take_plan(RemotePlan.from_bytes(content), timeout)
        update, rounds = UPDATE.unpack(content)
        if rounds != len(self._waits):
            raise _core.ProtocolError(
                f"the update has {rounds} rounds, but the plan has {len(self._waits)}"
            )
        self._passed += self._rounds
        self._rounds, self._recorded = rounds, []
        if self._exchange is not None and self._plan is not None and rounds:
            self._exchange.begin(self._plan)
            self._following = self._join_round(0, timeout, functools.partial(self._look, check))
        return update, rounds

    def take(
        self,
        round: int,
        stream: _core.Stream | None,
        timeout: float,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Makes the stream wait until a round is in the ring (None: waits here)."""
        look = functools.partial(self._look, check)
        exchange, plan, spans = self._exchange, self._plan, self._following
        if exchange is None or plan is None or spans is None:
            raise _core.StateError(f"round {round} was asked for before a plan came")
        if round + 1 < self._rounds:
            self._following = self._join_round(round + 1, timeout, look)
        exchange.wait(round, self._stream, timeout, look)
        former = self._waits[round]
        if former >= 0 and self._recorded[former]:
            self._loaded.wait(self._passed + former + 1, timeout, look)
        rings = [(0, 0)] * self._worker + [(self.ring.address, self.ring.nbytes)]
        ring = _core.BufferTable(rings, self.ring)
        self._stream.copy(plan, round, _core.UNPACK, spans, ring)
        exchange.release(round, self._stream)
        if stream is None:
            self._stream.synchronize(timeout, look)
            exchange.check()
        else:
            self._stream.record(self._unpacked, self._passed + round + 1)
            stream.wait(self._unpacked, self._passed + round + 1)

    def wait(self, round: int, timeout: float, check: Callable[[], object] | None = None) -> None:
        """Waits until a round that `take` gave to a stream is in the ring."""
        look = functools.partial(self._look, check)
        self._unpacked.wait(self._passed + round + 1, timeout, look)

    @property
    def arrived(self) -> int:
        """This is always 0, because only `wait` can tell that a round has arrived."""
        return 0

    def done(self, round: int, stream: _core.Stream | None, timeout: float) -> None:
        """Frees the slot of a round when the stream gets here (None: now)."""
        if stream is not None:
            stream.record(self._loaded, self._passed + round + 1)
        self._recorded.append(stream is not None)
        self._channel.look()

    def prepared(self, tensors: int, nbytes: int, audit_ns: int, timeout: float) -> None:
        if self._exchange is not None:
            self._exchange.check()
        self._channel.send(Frame.PREPARED, COUNTS.pack(tensors, nbytes, audit_ns), timeout)

    def verdict(self, timeout: float) -> None:
        _, said = self._channel.wait((Frame.COMMIT,), timeout)
        if said == PARK and self._exchange is not None:
            self._following = None
            try:
                self._exchange.park()
            except _core.WsyncError as error:  # the update is committed all the same
                _log.warning("the exchange of remote workers cannot free its memory: %s", error)

    def fail(self, text: str) -> None:
        self._channel.fail(text)

    def close(self) -> None:
        """Ends the session and closes every part of it, even if closing one raises."""
        exchange, group, self._following = self._exchange, self._group, None
        self._exchange = self._group = None
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._stream.close)
            last_first.callback(self._channel.close)
            for part in (group, exchange):
                if part is not None:
                    last_first.callback(part.close)

    def _look(self, check: Callable[[], object] | None = None) -> None:
        """Raises the error of `check`, of the trainer or of the exchange, if there is one."""
        if check is not None:
            check()
        self._channel.look()
        if self._exchange is not None:
            self._exchange.check()

    def _take_plan(self, told: RemotePlan, timeout: float) -> None:
        """Makes the same plan as the trainer ranks, and joins their exchange."""
        plan = told.input.plan(told.rank)
        if plan.fingerprint != told.fingerprint:
            raise _core.LayoutError(
                f"this worker made another plan than the trainer, {plan.fingerprint:016x} instead "
                f"of {told.fingerprint:016x}; use the same wsync on both sides"
            )
        self._worker = told.worker
        self.manifest = plan.manifest(told.worker).to_bytes()
        self.ring = _core.Memory(max(plan.ring_nbytes(told.worker), 1), self._device)
        self._waits = [plan.slot(told.worker, k).wait_round for k in range(plan.round_count)]
        self._meet(told.meeting, told.rank, plan, timeout)
        self._plan = plan

    def _meet(self, meeting: Meeting, rank: int, plan: _core.Plan, timeout: float) -> None:
        look = self._channel.look
        if isinstance(meeting, Rendezvous):
            self._group = meeting.join(rank, timeout, look)
            self._exchange = GroupExchange(self._group, self._device, look)
            return
        sizes = (plan.send_nbytes, plan.recv_nbytes)
        timeout *= PUNCTUAL  # for a round; it ends before the other ranks stop waiting
        exchange = _core.Exchange.nccl(rank, len(meeting), *sizes, timeout, self._device)
        self._exchange = exchange
        exchange.connect(meeting, PUNCTUAL * timeout, look)

    def _join_round(self, round: int, timeout: float, look: Check) -> _core.BufferTable:
        """Joins a round's collective, and sends nothing; returns where the round will be."""
        assert self._exchange is not None
        self._exchange.acquire(round, timeout, look)
        spans = self._exchange.spans(round)
        self._exchange.post(round, self._stream)
        return spans
