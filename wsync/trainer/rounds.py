"""Sessions, plan and exchange that consecutive updates share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from wsync import _core
from wsync.exchange.base import Exchange, GroupExchange
from wsync.exchange.choose import Transport
from wsync.exchange.groups import group_name
from wsync.exchange.orders import Blueprint, Orders
from wsync.exchange.rendezvous import Rendezvous
from wsync.exchange.roster import Trainer, Worker
from wsync.exchange.trainers import TrainerGroup
from wsync.handles.base import EngineHandle
from wsync.machine.addresses import own_address
from wsync.machine.deadline import Check, Deadline
from wsync.machine.device import follow_torch
from wsync.machine.sweep import sweep
from wsync.messages.control import LEARN, Control
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.planning import Planning
from wsync.trainer.sessions.base import Session
from wsync.trainer.sessions.broadcast import BroadcastSession, Remote, RemoteEngines
from wsync.trainer.sessions.local import WorkerSession
from wsync.trainer.sessions.remote import RemoteSession
from wsync.trainer.sessions.stock import StockSession

if TYPE_CHECKING:
    from tqdm import tqdm


_PUNCTUAL = 0.9  # of the deadline, which those who have come wait from then on


class _Part(Protocol):
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Placement:
    """Who is to get weights, and from which rank; the same on all ranks."""

    workers: list[Worker]
    names: tuple[str, ...]  # of all engines
    remote: Remote = dataclasses.field(default_factory=Remote)
    gpus: list[int] | None = None  # the rank whose GPU is each engine's first; None: not known


class Connection:
    """One rank's part: it listens for its workers, agrees on a plan and runs the rounds."""

    def __init__(
        self,
        group: TrainerGroup,
        trainer: Trainer,
        placement: Placement,
        engines: Sequence[EngineHandle],
        options: Options,
        source: str,
        lock: Any = None,
    ) -> None:
        self.plan: _core.Plan | None = None
        self._group = group
        self._trainer = trainer
        self._workers = placement.workers
        self._beyond = [worker for worker in placement.workers if worker.rank is not None]
        self._transport = Transport(group, trainer.hosts, options)
        self._names = placement.names
        self._exchange: Exchange | None = None
        self._options = options
        self._source = source
        self._stream: _core.Stream | None = None
        self._sessions: list[Session] = []
        self._remote: RemoteEngines | None = None
        self._rings = _core.BufferTable([])
        sweep(options.directory)
        try:
            if group.rank == 0 and placement.remote.engines:
                self._remote = RemoteEngines(engines, placement.remote, lock, options)
            for number, worker in enumerate(self._workers):
                if worker.home == group.rank:
                    self._sessions.append(self._session(number, placement, engines))
            self._doors, self._meetings = self._meet()
        except BaseException as error:
            self.abort(str(error))
            raise

    def _session(
        self, number: int, placement: Placement, engines: Sequence[EngineHandle]
    ) -> Session:
        worker, options = self._workers[number], self._options
        if worker.stage is not None:
            return BroadcastSession(
                number,
                placement.remote,
                name=group_name(self._group.name, worker.stage),
                options=options,
            )
        if worker.rank is not None:
            engine = placement.names[worker.engine]
            host = own_address([engine])
            return RemoteSession(number, engine=engine, index=worker.index, host=host)
        if worker.stock:
            handle = engines[worker.engine]
            on_gpu = options.stock_memory == "gpu"
            if options.stock_memory == "auto" and placement.gpus is not None:
                # who does not see a GPU dies of its memory; of several workers, the others would
                # each need a context on this one
                on_gpu = handle.workers == 1 and placement.gpus[worker.engine] == self._group.rank
            on_gpu = on_gpu and self._source != ""
            return StockSession(number, handle, timeout=options.request_deadline, on_gpu=on_gpu)
        return WorkerSession(
            number,
            engine=placement.names[worker.engine],
            index=worker.index,
            directory=options.directory,
            park=options.park,
        )

    @property
    def exchange_name(self) -> str:
        return "none" if self._exchange is None else self._exchange.name

    @property
    def staging_nbytes(self) -> int:
        return 0 if self._exchange is None else self._exchange.nbytes

    @property
    def ring_nbytes(self) -> int:
        return sum(self._rings[worker][1] for worker in range(len(self._rings)))

    def opening(self, worker: int, update: int) -> Control:
        """The control message that makes a worker join an update."""
        session, address = self._doors[worker]
        return Control(
            op="open",
            session=session,
            update=update,
            deadline=self._options.deadline,
            address=address,
        )

    def _meet(self) -> tuple[dict[int, tuple[str, str]], dict[int, Rendezvous]]:
        """Session and address of every worker that runs wsync's receiver, and where the engines
        meet each source, by the worker's number."""
        doors = {
            session.worker: (session.id, session.address)
            for session in self._sessions
            if isinstance(session, WorkerSession)
        }
        meetings = {
            session.worker: dataclasses.asdict(session.rendezvous)
            for session in self._sessions
            if isinstance(session, BroadcastSession)
        }
        parts = self._group.all_gather(json.dumps([doors, meetings]).encode())
        everyone = [json.loads(part) for part in parts]
        met = {int(n): Rendezvous(**m) for _, meetings in everyone for n, m in meetings.items()}
        known = {int(n): (i, where) for doors, _ in everyone for n, (i, where) in doors.items()}
        return known, met

    def attach(self, check: Check) -> None:
        """Waits for the workers, plans with what they keep, and hands them their rings."""
        # who does not come is named before those who have come give up
        deadline = Deadline(_PUNCTUAL * self._options.deadline)
        blobs = {s.worker: s.accept(deadline.left, check) for s in self._sessions}
        self._teach(blobs, deadline, check)
        planning = Planning(
            self._group, self._trainer, self._workers, self._sessions, self._options
        )
        layouts, device, crowded = planning.gather(blobs, self._source)
        self._stream = _core.Stream(self._options.threads, device)
        remote = [self._names[worker.engine] for worker in self._beyond]
        self._transport.choose(device, crowded, remote)
        blueprint, plan = planning.fit(layouts, device)
        self._order(blueprint, plan)
        numbers = sorted(self._meetings)
        if self._remote is not None:
            # not before all this: an engine that joins does not wait for workers that learn
            self._remote.join([self._meetings[number] for number in numbers])
        spans = [(0, 0)] * len(self._workers)
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            spans[session.worker] = session.attach(plan, device, deadline.left, check)
        if self._remote is not None:
            self._remote.attach(plan, numbers, deadline.left, check)
        self._rings = _core.BufferTable(spans, owner=list(self._sessions))
        self._exchange = self._transport.open(plan, check)
        self.plan = plan

    def _teach(self, blobs: dict[int, bytes], deadline: Deadline, check: Check) -> None:
        """Has the workers that asked for it learn, all at once."""
        pupils = [
            session
            for session in self._sessions
            if isinstance(session, WorkerSession) and blobs[session.worker] == LEARN
        ]
        if pupils:
            model = names_of(self._trainer.model).to_bytes()
            for session in pupils:
                session.teach(model, deadline.left, check)
            for session in pupils:
                blobs[session.worker] = session.learnt(deadline.left, check)

    def run(
        self,
        update: int,
        sources: _core.BufferTable,
        opened: Callable[[], None],
        check: Check,
        report: Report,
        bar: tqdm[None],
    ) -> None:
        """Moves all rounds into the rings of this rank's workers.

        `opened` returns when all engines have paused and their workers are on their way; it is
        called while the first round is being packed, and before that is announced.
        """
        plan, timeout, stream = self.plan, self._options.deadline, self._stream
        assert plan is not None and stream is not None
        trace = report.trace
        if trace is not None:
            stream.trace(3 * plan.round_count)
        follow_torch(stream)  # which may still be writing the weights
        for session in self._sessions:
            session.begin(update, report.version, timeout, check)
        if self._remote is not None:
            self._remote.begin(report.version, timeout, check)
        if self._exchange is not None:
            self._exchange.begin(plan)
        spans = self._send(0, sources, check, report)
        for number in range(plan.round_count):
            with report.phase("engine"):
                for session in self._sessions:
                    session.acquire(number, stream, timeout, check)
            stream.copy(plan, number, _core.LOCAL, sources, self._rings)
            if self._exchange is not None:
                following = self._send(number + 1, sources, check, report)
            if number == 0:
                opened()
            if self._exchange is not None:
                self._receive(number, spans, check, report)
                spans = following
            for session in self._sessions:
                session.post(number, stream, timeout, check)
            if self._remote is not None:
                self._remote.post(number)
            if trace is not None:
                trace.mark("post", number)
            self._show(number + 1, bar)
        if plan.round_count == 0:
            opened()
        with report.phase("engine"):
            for number in range(plan.round_count):
                for session in self._sessions:
                    session.wait(number, timeout, check)
                self._show(number + 1, bar)
        with report.phase("copy"):
            stream.synchronize(timeout, check)
        if trace is not None:
            trace.take(stream)

    def _show(self, posted: int, bar: tqdm[None]) -> None:
        """Progress counts what all of this rank's workers have loaded."""
        if not bar.disable:
            loaded = min((session.loaded for session in self._sessions), default=posted)
            bar.update(loaded - bar.n)

    def prepared(self, check: Check) -> None:
        """Waits until all workers of this rank hold every byte."""
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            session.prepared(deadline.left, check)
        if self._remote is not None:
            self._remote.prepared(deadline.left, check)

    def commit(self, check: Check) -> None:
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            session.commit(deadline.left, check)
        for session in self._sessions:
            if isinstance(session, WorkerSession):
                session.park(deadline.left, check)
        if self._options.park and isinstance(self._exchange, GroupExchange):
            self._exchange.park()

    def look(self) -> None:
        """Raises what ails a worker of this rank, or a remote engine; waits for nothing."""
        if self._remote is not None:
            self._remote.check()
        for session in self._sessions:
            session.look()

    def abort(self, text: str) -> None:
        """Stops copying, tells the workers why, and lets go of everything."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.close)
            if self._remote is not None:
                last_first.callback(self._remote.abort)
            for session in reversed(self._sessions):
                last_first.callback(session.abort, text)
            if self._stream is not None:
                last_first.callback(self._stream.abandon)

    def close(self) -> None:
        """Lets go of every part, whatever one of them raises."""
        # what is stuck on a GPU ends with its group, and keeps frees of GPU memory until then
        parts: list[_Part | None] = [self._transport, *self._sessions, self._remote, self._stream]
        with contextlib.ExitStack() as last_first:
            for part in reversed(parts):
                if part is not None:
                    last_first.callback(part.close)

    def _send(
        self, number: int, sources: _core.BufferTable, check: Check, report: Report
    ) -> _core.BufferTable | None:
        """Packs and posts what this rank sends in a round; returns where its messages lie."""
        exchange, plan, stream = self._exchange, self.plan, self._stream
        assert plan is not None and stream is not None
        if exchange is None or number >= plan.round_count:
            return None
        with report.phase("staging"):
            exchange.acquire(number, self._options.exchange_deadline, check)
        spans = exchange.spans(number)
        stream.copy(plan, number, _core.PACK, sources, spans)
        exchange.post(number, stream)
        return spans

    def _receive(
        self, number: int, spans: _core.BufferTable | None, check: Check, report: Report
    ) -> None:
        exchange, plan, stream = self._exchange, self.plan, self._stream
        assert exchange is not None and plan is not None
        assert stream is not None and spans is not None
        with report.phase("gather"):
            exchange.wait(number, self._options.exchange_deadline, check)
        stream.copy(plan, number, _core.UNPACK, spans, self._rings)
        exchange.release(number, stream)

    def _order(self, blueprint: Blueprint, plan: _core.Plan) -> None:
        """Writes what remote workers are to do."""
        for session in self._sessions:
            if isinstance(session, RemoteSession):
                rank = blueprint.workers[session.worker][1]
                place = self._transport.rendezvous
                assert place is not None
                session.orders = Orders(session.worker, rank, plan.fingerprint, place, blueprint)


def names_of(model: _core.Layout) -> _core.Layout:
    """The tensors of a model, without saying where they lie."""
    builder = _core.LayoutBuilder()
    for index in range(model.tensor_count):
        builder.add_tensor(*model.tensor(index))
    return builder.build()
