"""Sessions with workers on this host that run wsync's receiver."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, TypeAlias

from wsync import _core
from wsync.machine.deadline import Check, seconds
from wsync.machine.device import find
from wsync.messages.control import BORROWS, Learnt
from wsync.trainer.round_contents import WorkerRounds
from wsync.trainer.sessions.base import Session, Span

if TYPE_CHECKING:
    from wsync.trainer.sessions.remote import RemoteExporter

    Exporter: TypeAlias = "_core.Exporter | RemoteExporter"

_log = logging.getLogger(__name__)

# origins of errors of csrc/ipc, and not of checks or streams: their text speaks of the worker, and
# needs the engine's name
_SESSIONS = ("session", "channel", "frame", "listener", "blob")
_GONE = (
    "; the worker has ended, or its engine was restarted: call update again when the engine "
    "answers, which connects anew"
)


class _Naming:
    """Around calls of a session, some of them in every round: adds the engine and the worker to its
    errors.  The core, which writes those of a session on this host, knows its peer only as a
    process."""

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
        said.origin, said.native = "engine", error.native
        raise said from error


class WorkerSession(Session):
    """A worker that runs wsync's receiver: it maps the ring once and loads round by round.

    Args:
        worker: its number in the plan.
        engine, index: what errors call it: the engine's name, and its number there.
        park: whether the ring's memory is given back between updates.
    """

    def __init__(
        self,
        worker: int,
        *,
        engine: str,
        index: int,
        directory: str | None = None,
        park: bool = False,
    ) -> None:
        super().__init__(worker)
        self.name = f"engine {engine}: worker {index}"
        self._engine, self._worker = engine, index
        self._park = park
        self.id = secrets.token_hex(8)
        # once accepted: the places of lent memory that the worker can read, its own device first;
        # empty if it reads none
        self.reaches: list[str] = []
        self.most_segments = 0  # that such a worker may hold with delivery="auto"
        self._directory = directory
        # the last is the current one; while the worker learns, the one that it learns in comes
        # before
        self._exporters: list[Exporter] = [self._listen()]
        self._ring: _core.Memory | None = None

    def _listen(self) -> Exporter:
        return _core.Exporter(self._directory)

    def _naming(self) -> _Naming:
        return _Naming(self._engine, self._worker)

    @property
    def _exporter(self) -> Exporter:
        return self._exporters[-1]

    @property
    def address(self) -> str:
        """Where the worker is to connect, with the token that lets it in."""
        return self._exporter.address

    def accept(self, timeout: float, check: Check) -> bytes:
        try:
            with self._naming():
                return self._hear(self._exporter.accept(timeout, check))
        except _core.DeadlineError as error:
            raise _core.DeadlineError(
                f"{self.name} did not join the update within {seconds(timeout)}: its engine has "
                "not carried out the request that opens it (update_weights_from_tensor, "
                "collective_rpc of vLLM)"
            ) from error

    def _hear(self, said: bytes) -> bytes:
        """What a worker asks for; notes what else it says when it joins."""
        if not said.startswith(BORROWS):
            return said
        facts, _, asked = said.removeprefix(BORROWS).partition(b"\n")
        most, *self.reaches = facts.decode("ascii", "replace").split(",")
        self.most_segments = int(most) if most.isdecimal() else 0
        return asked

    @property
    def gpu(self) -> str | None:
        """The GPU that the worker is on."""
        return self._exporter.worker_uuid

    def send_model(self, model: bytes, timeout: float, check: Check) -> None:
        """Tells a worker that asked to LEARN what tensors there are (a layout without shards),
        and where to come back to."""
        learning = self._exporter
        self._exporters.append(self._listen())
        content = self.address.encode() + b"\n" + model
        with self._naming():
            ring = _core.Memory(1, find(learning.worker_uuid))
            learning.attach(ring, content, timeout, check)
            learning.begin(0, 0, timeout, check)

    def accept_layout(self, timeout: float, check: Check) -> bytes:
        """Waits until the worker has learnt and is back; what `accept` returns.

        Raises:
            RemoteError: it failed to learn.
            DeadlineError: it has not learnt in time.
        """
        learning, following = self._exporters

        def alive() -> None:
            check()
            learning.look()

        try:
            with self._naming():
                learnt = Learnt.from_bytes(self._hear(following.accept(timeout, alive)))
        except _core.DeadlineError as error:
            raise _core.DeadlineError(
                f"{self.name} did not learn within {seconds(timeout)} what its load_weights does; "
                "Options(deadline=) gives more"
            ) from error
        self._exporters = [following]
        learning.close()
        self.own_loading = learnt.own_loading
        return learnt.blob

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        self._ring = _core.Memory(max(plan.ring_nbytes(self.worker), 1), device)

    def drop_ring(self) -> None:
        self._ring = None

    @property
    def manifest(self) -> _core.Layout:
        """What the worker is to load."""
        return self.rounds.manifest

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Hands over ring and manifest; returns where the ring lies."""
        assert self._ring is not None
        self.rounds = WorkerRounds(plan, self.worker)
        with self._naming():
            self._exporter.attach(self._ring, self.manifest.to_bytes(), timeout, check)
        return self._ring.address, self._ring.nbytes

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        with self._naming():
            self._exporter.begin(update, len(self.rounds.slots), timeout, check)

    @property
    def loaded(self) -> int:
        return self._exporter.loaded

    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        with self._naming():
            self._exporter.acquire(self.rounds.slots[round].wait_round, stream, timeout, check)

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        with self._naming():
            self._exporter.post(round, stream, timeout, check)

    def look(self) -> None:
        with self._naming():
            for exporter in self._exporters:
                exporter.look()

    def wait(self, round: int, timeout: float, check: Check) -> None:
        if isinstance(self._exporter, _core.Exporter) and self._exporter.loaded > round:
            return  # by its word in shared memory, without a system call
        with self._naming():
            self._exporter.acquire(round, None, timeout, check)

    def prepared(self, timeout: float, check: Check) -> None:
        """Waits until the worker has loaded everything, and compares its count with ours.

        Raises:
            ProtocolError: the worker loaded another number of tensors or bytes.
        """
        with self._naming():
            tensors, nbytes, audit_ns = self._exporter.prepared(timeout, check)
        self.audit_seconds = 1e-9 * audit_ns
        layout = self.manifest
        if (tensors, nbytes) != (layout.tensor_count, layout.shard_nbytes):
            raise _core.ProtocolError(
                f"{self.name} loaded {tensors} tensors of {nbytes} bytes instead of "
                f"{layout.tensor_count} of {layout.shard_nbytes}"
            )

    def commit(self, timeout: float, check: Check) -> None:
        with self._naming():
            self._exporter.commit(timeout, check, self._park)

    def park(self, timeout: float, check: Check) -> None:
        """Gives the ring's memory back unless a view of it is in use.  The update is committed
        whatever comes of it."""
        if not self._park:
            return
        try:
            self._exporter.park(timeout, check)
        except (_core.PeerRefusedError, _core.PeerClosedError) as error:
            _log.warning("%s: the ring is not parked: %s", self.name, error)

    def abort(self, text: str) -> None:
        # an engine's words: they may hold what a C string cannot
        said = text.replace("\0", " ").encode("utf-8", "replace").decode()
        for exporter in self._exporters:
            exporter.abort(said)

    def close(self) -> None:
        for exporter in self._exporters:
            exporter.close()
