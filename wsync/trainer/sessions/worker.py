"""Sessions with workers that run wsync's receiver.

A session with a remote worker carries only control messages, over TCP.  The worker is a rank of the
plan's exchange, which carries its rounds: see wsync.exchange.remote_plan.
"""

from __future__ import annotations

import json
import logging
import secrets
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from wsync import _core
from wsync.exchange.remote_plan import RemotePlan
from wsync.exchange.remote_session import RemoteExporter
from wsync.machine.deadline import Check, Deadline, seconds
from wsync.machine.device import find
from wsync.messages.control import BORROWS, Learnt
from wsync.trainer.lending import Lending, Segment, buffers_of
from wsync.trainer.sessions.bucket_session import Span, WorkerRounds

_log = logging.getLogger(__name__)
_BINDING: Final = struct.Struct("=QQQ")  # wsync_binding_t of csrc/ipc/session.h
_UNBOUND: Final = _BINDING.pack(2**64 - 1, 0, 0)

# the origins of errors of csrc/ipc; their text speaks of the worker, and needs the engine's name
_SESSIONS = ("session", "channel", "frame", "listener", "blob")
_GONE = "; its engine has ended or was restarted: call update again when the engine answers"


class _Naming:
    """Wraps calls of a session, some in every round; adds the engine and the worker to errors.  The
    core, which raises the errors of sessions on this host, knows a worker only as a process."""

    __slots__ = ("_engine", "_worker")

    def __init__(self, engine: str, worker: int) -> None:
        self._engine, self._worker = engine, worker

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, _core.WsyncError) or error.origin not in _SESSIONS:
            return
        where, worker, text = f"engine {self._engine}: ", f"worker {self._worker}", str(error)
        named = text.replace("worker (pid ", f"{worker} (pid ", 1)
        whole = where + named if named != text else f"{where}{worker}: {text}"
        if isinstance(error, _core.PeerClosedError):
            whole += _GONE
        said = type(error)(whole)
        said.origin = "engine"
        raise said from error


class WorkerSession:
    """A worker that runs wsync's receiver: it maps the ring once and loads round by round.  The
    methods are called in the order of csrc/ipc/session.h.

    The worker may also map memory that the ranks lend, and copy from it.  Weights that the worker
    cannot read in place come through its ring.  If the worker can read all weights in place, the
    ring carries no data.  Round 0 tells the worker to read; when the round has ended, the worker
    has read.

    Args:
        worker: the worker's number in the plan (see PlanWorker).
        engine, index: the engine's name and the worker's number there, for errors.
        lending: the memory that the worker may read in place.
        host: for a remote worker, the address of this host that it can reach.
    """

    rounds: WorkerRounds  # once attached
    manifest: _core.Layout  # once attached: what the worker is to load
    audit_seconds = 0.0  # of the update, once prepared
    own_loading = ""  # which tensors go through the engine's own load_weights, and why
    gpu: str | None = None  # once accepted: its UUID; "" on the host; None if the worker is remote

    def __init__(
        self,
        worker: int,
        *,
        engine: str,
        index: int,
        directory: str | None = None,
        lending: Lending | None = None,
        host: str = "",
    ) -> None:
        self.worker = worker
        self.name = f"engine {engine}: worker {index}"
        self._naming = _Naming(engine, index)
        self.id = secrets.token_hex(8)
        # once accepted: the places of lent memory that the worker can read, its own device first;
        # empty if it reads none
        self.reaches: list[str] = []
        self.most_segments = 0  # that this worker may hold
        self._directory, self._host = directory, host
        # the last is the current one; while the worker learns, the one before is for learning
        self._exporters: list[_core.Exporter | RemoteExporter] = [self._listen()]
        self._asking: _core.Exporter | RemoteExporter | None = None
        self._ring: _core.Memory | None = None
        self._lending = lending
        self._joined: _core.Layout | None = None  # what it reads in place

    def _listen(self) -> _core.Exporter | RemoteExporter:
        return _core.Exporter(self._directory)

    @property
    def _exporter(self) -> _core.Exporter | RemoteExporter:
        return self._exporters[-1]

    @property
    def address(self) -> str:
        """The address that the worker connects to, with the token that lets it in."""
        return self._exporter.address

    def accept(self, timeout: float, check: Check) -> bytes:
        """Waits for the worker; returns the layout it keeps, or control.WHOLE, PIECES or LEARN."""
        late = (
            f"join the update within {seconds(timeout)}: its engine has not carried out the "
            "request that opens the update (update_weights_from_tensor, or vLLM's collective_rpc)"
        )
        return self._hear(timeout, check, late)

    def _hear(self, timeout: float, check: Check, late: str) -> bytes:
        """Waits for a worker; returns what it asks for, and stores other facts that it sends."""
        try:
            with self._naming:
                said = self._exporter.accept(timeout, check)
        except _core.DeadlineError as error:
            raise _core.DeadlineError(f"{self.name} did not {late}") from error
        self.gpu = self._exporter.worker_uuid
        if not said.startswith(BORROWS):
            return said
        facts, _, asked = said.removeprefix(BORROWS).partition(b"\n")
        most, *self.reaches = facts.decode("ascii", "replace").split(",")
        self.most_segments = int(most) if most.isdecimal() else 0
        return asked

    def ask(self) -> str:
        """Returns the address at which the worker is to say what differs between the next rounds
        and its weights."""
        self._asking = self._listen()
        return self._asking.address

    def answer(self, timeout: float, check: Check) -> dict[str, Any]:
        """Waits for what the worker says after `ask`: see Comparison.facts; "uncompared" says what
        was not compared, and why."""
        assert self._asking is not None
        with self._naming:
            said: dict[str, Any] = json.loads(self._asking.accept(timeout, check))
        self._asking.close()
        return said

    def send_model(self, model: bytes, timeout: float, check: Check) -> None:
        """Sends the list of the model's tensors (a layout without shards), and the address to come
        back to.  The worker has asked to LEARN."""
        learning = self._exporter
        self._exporters.append(self._listen())
        content = self.address.encode() + b"\n" + model
        with self._naming:
            ring = _core.Memory(1, find(self.gpu or ""))
            learning.attach(ring, content, timeout, check)
            learning.begin(0, 0, timeout, check)

    def accept_layout(self, timeout: float, check: Check) -> bytes:
        """Waits until the worker has learnt where its load_weights puts the trainer's tensors, and
        has connected again; returns what `accept` returns.

        Raises:
            RemoteError: the worker could not learn these places.
            DeadlineError: the worker has not learnt them in time.
        """
        learning = self._exporters[0]

        def alive() -> None:
            check()
            learning.look()

        late = (
            f"learn within {seconds(timeout)} where its load_weights puts tensors; "
            "Options(deadline=) gives it more time"
        )
        learnt = Learnt.from_bytes(self._hear(timeout, alive, late))
        del self._exporters[0]
        learning.close()
        self.own_loading = learnt.own_loading
        return learnt.blob

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        self._ring = None  # frees an earlier ring first
        self._ring = _core.Memory(max(plan.ring_nbytes(self.worker), 1), device)

    def serve(self, joined: _core.Layout, offsets: Sequence[int]) -> None:
        """Sets what the worker reads in place (see `Layout.join`); called before `attach`.
        offsets: the number of each rank's first buffer in `joined`, and the number of buffers."""
        self._told = -1  # `Lending.news` when the worker was last told
        self._lent: dict[Segment, int] = {}  # the worker's number of each segment
        self._joined, self._count, used = joined, offsets[-1], buffers_of(joined)
        # of each buffer that it reads: the number in `joined`, the rank, and the number there
        self._buffers = [
            (number, rank, number - first)
            for rank, (first, end) in enumerate(pairwise(offsets))
            for number in range(first, end)
            if number in used
        ]

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Gives the worker its ring and manifest; returns the ring's address and size.  The worker
        loads what it reads in place first, and then its rounds."""
        assert self._ring is not None
        self.rounds = WorkerRounds(plan, self.worker)
        self.manifest = self.rounds.manifest
        if self._joined is not None:
            self.manifest = self._joined.beside(self.manifest, self._count)
        with self._naming:
            self._exporter.attach(self._ring, self.manifest.to_bytes(), timeout, check)
        return (self._ring.address, self._ring.nbytes) if plan.ring_nbytes(self.worker) else (0, 0)

    @property
    def round_count(self) -> int:
        """Once attached: the number of rounds that the worker is told to expect."""
        return max(len(self.rounds.slots), 0 if self._joined is None else 1)

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        """Begins an update; tells the worker where lent weights are, if that has changed."""
        lending = self._lending
        with self._naming:
            if self._joined is not None and lending is not None and lending.news != self._told:
                self._lend(lending, timeout, check)
            self._exporter.begin(update, self.round_count, timeout, check)

    def begun(self, timeout: float, check: Check) -> None:
        """Waits until the worker has mapped all memory that it was told of."""
        exporter = self._exporter
        assert isinstance(exporter, _core.Exporter)
        with self._naming:
            exporter.begun(timeout, check)

    def _lend(self, lending: Lending, timeout: float, check: Check) -> None:
        """Makes the worker map new segments, and unmap those that it no longer reads."""
        exporter = self._exporter
        assert isinstance(exporter, _core.Exporter)
        deadline = Deadline(timeout)
        table, used = [_UNBOUND] * self._count, dict[Segment, int]()
        for number, rank, buffer in self._buffers:
            if (place := lending.places[rank][buffer]) is None:
                continue
            segment = (rank, place.segment)
            if segment not in used:
                known = self._lent.get(segment)
                if known is None:
                    known = exporter.lend(lending.segments[segment], deadline.left, check)
                used[segment] = known
            table[number] = _BINDING.pack(used[segment], place.offset, place.nbytes)
        exporter.bind(b"".join(table), deadline.left, check)
        self._lent, self._told = used, lending.news

    @property
    def loaded(self) -> int:
        return self._exporter.loaded

    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        with self._naming:
            self._exporter.acquire(self.rounds.slots[round].wait_round, stream, timeout, check)

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        with self._naming:
            self._exporter.post(round, stream, timeout, check)

    def look(self) -> None:
        with self._naming:
            for exporter in self._exporters:
                exporter.look()

    def wait(self, round: int, timeout: float, check: Check) -> None:
        if self._exporter.loaded > round:
            return  # as shared memory says, without a system call
        with self._naming:
            self._exporter.acquire(round, None, timeout, check)

    def prepared(self, timeout: float, check: Check) -> None:
        """Waits until the worker has loaded everything, and compares its count with ours.

        Raises:
            ProtocolError: the worker loaded another number of tensors or bytes.
        """
        with self._naming:
            tensors, nbytes, audit_ns = self._exporter.prepared(timeout, check)
        self.audit_seconds = 1e-9 * audit_ns
        layout = self.manifest
        if (tensors, nbytes) != (layout.tensor_count, layout.shard_nbytes):
            raise _core.ProtocolError(
                f"{self.name} loaded {tensors} tensors of {nbytes} bytes instead of "
                f"{layout.tensor_count} of {layout.shard_nbytes}"
            )

    def commit(self, timeout: float, check: Check, park: bool) -> None:
        with self._naming:
            self._exporter.commit(timeout, check, park)

    def park(self, timeout: float, check: Check) -> None:
        """Gives the ring's memory back unless a view of it is in use, and waits until the worker
        has unmapped all lent memory.  The update stays committed even if this fails."""
        try:
            self._exporter.park(timeout, check)
        except (_core.PeerRefusedError, _core.PeerClosedError) as error:
            _log.warning("%s: the ring is not parked: %s", self.name, error)
        self._lent, self._told = {}, -1

    def abort(self, text: str) -> None:
        # an engine's text may hold what a C string cannot
        said = text.replace("\0", " ").encode("utf-8", "replace").decode()
        for exporter in self._exporters:
            exporter.abort(said)

    def close(self) -> None:
        for exporter in self._exporters:
            exporter.close()
        if self._asking is not None:
            self._asking.close()


class RemoteSession(WorkerSession):
    """A remote worker that runs wsync's receiver: it takes part in the exchange itself.

    host: the address of this host that the worker can reach.
    """

    remote_plan: RemotePlan  # once there is a plan

    def _listen(self) -> RemoteExporter:
        return RemoteExporter(self._host, self.name)

    @property
    def exporter(self) -> RemoteExporter:
        current = self._exporter
        assert isinstance(current, RemoteExporter)
        return current

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        """Does nothing, because the worker has a ring of its own."""

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Sends the plan.  Attaches no ring, because the worker has its own."""
        self.rounds = WorkerRounds(plan, self.worker)
        self.manifest = self.rounds.manifest
        self.exporter.tell_plan(self.remote_plan.to_bytes(), timeout, check)
        del self.remote_plan
        return 0, 0
