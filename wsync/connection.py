"""Sessions, plan and exchange that consecutive updates share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from wsync import _core
from wsync.control import LEARN, PIECES, WHOLE, Control
from wsync.crossing import Blueprint, Crossing, Orders
from wsync.device import default, find, follow_torch, has_nccl
from wsync.exchange import Exchange, GroupExchange
from wsync.group import TrainerGroup
from wsync.handles import EngineHandle
from wsync.options import Options
from wsync.remote import BroadcastSession, Meeting, Remote, RemoteEngines, own_address
from wsync.remote_session import RemoteSession
from wsync.report import Report
from wsync.sessions import Session, Trainer, Worker, WorkerSession, sweep
from wsync.stock import StockSession
from wsync.update_group import Store, UpdateGroup

if TYPE_CHECKING:
    from tqdm import tqdm

Check = Callable[[], object]

_log = logging.getLogger(__name__)

_GPU_ROUND_NBYTES = 256 << 20
_LEAST_RING_NBYTES = 16 << 10  # a machine that has less has other worries
_DEFAULT_ROUND_NBYTES = 32 << 20  # the planner's, which may be exceeded for one large tensor
_PUNCTUAL = 0.9  # of the deadline, which those who have come wait from then on


class _Part(Protocol):
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Placement:
    """Who is to get weights, and from which rank; the same on all ranks."""

    workers: list[Worker]
    names: tuple[str, ...]  # of all engines
    remote: Remote = dataclasses.field(default_factory=Remote)


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
        self._store: Store | None = None
        self._crossing: Crossing | None = None
        self._everyone: UpdateGroup | None = None
        self._options = options
        self._exchange: Exchange | None = None
        self._source = source
        self._device = _core.host()
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
            self._doors, self._meetings = self._meet(placement.names)
        except BaseException as error:
            self.abort(str(error))
            raise

    def _session(
        self, number: int, placement: Placement, engines: Sequence[EngineHandle]
    ) -> Session:
        worker, options = self._workers[number], self._options
        if worker.stage is not None:
            return BroadcastSession(number, worker.stage, placement.remote, options=options)
        if worker.rank is not None:
            engine_name = placement.names[worker.engine]
            name = f"engine {engine_name}: worker {worker.index}"
            return RemoteSession(number, host=own_address([engine_name]), name=name)
        if worker.stock:
            engine = engines[worker.engine]
            # of several workers, the others would each need a context on this GPU
            on_gpu = self._source != "" and engine.workers == 1
            return StockSession(number, engine, timeout=options.request_deadline, on_gpu=on_gpu)
        return WorkerSession(number, directory=options.directory, park=options.park)

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

    def _meet(self, names: Sequence[str]) -> tuple[dict[int, tuple[str, str]], dict[int, Meeting]]:
        """Session and address of every worker that runs wsync's receiver, and where the engines
        meet each source, by the worker's number; and where all ranks of the exchange meet."""
        doors = {
            session.worker: (session.id, session.address)
            for session in self._sessions
            if isinstance(session, WorkerSession)
        }
        meetings = {
            session.worker: dataclasses.asdict(session.meeting)
            for session in self._sessions
            if isinstance(session, BroadcastSession)
        }
        crossing = None
        if self._beyond and self._group.rank == 0:
            self._store = Store(self._options.deadline)
            host = own_address([names[worker.engine] for worker in self._beyond])
            crossing = Crossing.at(host, self._store.port, self._group.size + len(self._beyond))
        # new each time: an engine may be left in groups of a trainer that is gone
        mine = [doors, meetings, crossing and dataclasses.asdict(crossing), secrets.token_hex(8)]
        parts = self._group.all_gather(json.dumps(mine).encode())
        everyone = [json.loads(part) for part in parts]
        if self._beyond:
            self._crossing = Crossing(**everyone[0][2])
        met = {
            int(n): Meeting(**{**m, "connection": everyone[0][3]})
            for _, meetings, *_ in everyone
            for n, m in meetings.items()
        }
        for session in self._sessions:
            if isinstance(session, BroadcastSession):
                session.meeting = met[session.worker]
        known = {int(n): (i, where) for doors, *_ in everyone for n, (i, where) in doors.items()}
        return known, met

    def attach(self, check: Check) -> None:
        """Waits for the workers, plans with what they keep, and hands them their rings."""
        # who does not come is named before those who have come give up
        left = _countdown(_PUNCTUAL * self._options.deadline)
        blobs = {s.worker: s.accept(left(), check) for s in self._sessions}
        self._teach(blobs, left, check)
        layouts, gpus = self._gather_layouts(blobs)
        self._device = find(self._settle(gpus))
        self._stream = _core.Stream(self._options.threads, self._device)
        if self._crossing is not None and has_nccl(self._device):
            self._crossing = dataclasses.replace(self._crossing, backend="nccl")
        blueprint, plan = self._fit(layouts)
        self._order(blueprint, plan)
        numbers = sorted(self._meetings)
        if self._remote is not None:
            # not before all this: an engine that joins does not wait for workers that learn
            self._remote.join([self._meetings[number] for number in numbers])
        spans = [(0, 0)] * len(self._workers)
        left = _countdown(self._options.deadline)
        for session in self._sessions:
            spans[session.worker] = session.attach(plan, self._device, left(), check)
        if self._remote is not None:
            self._remote.attach(plan, numbers, left(), check)
        self._rings = _core.BufferTable(spans, owner=list(self._sessions))
        self._exchange = self._make_exchange(plan, check)
        self.plan = plan

    def _choose(self) -> str | None:
        """The UUID of the GPU of this rank's workers, "" for the host; without workers that of
        its weights, None where these lie in host memory."""
        found: dict[str, int] = {}
        for session in self._sessions:
            if isinstance(session, WorkerSession) and not isinstance(session, RemoteSession):
                found.setdefault(session.worker_uuid, session.worker)
        for uuid, number in found.items():
            if len(found) > 1 or (self._source and uuid != self._source):
                other = self._source or next(other for other in found if other != uuid)
                worker = self._workers[number]
                raise _core.InvalidArgumentError(
                    f"rank {self._group.rank} serves worker {worker.index} of engine "
                    f"{worker.engine} on {uuid or 'the host'}, but "
                    f"{'its weights are' if self._source else 'another of its workers is'} on "
                    f"{other or 'the host'}: engine_gpu_offsets says whose GPU an engine shares"
                )
        return next(iter(found), self._source or None)

    def _settle(self, gpus: list[str | None]) -> str:
        """What this rank uses, given what all ranks have chosen: GPUs, or all the host."""
        hosts = [rank for rank, gpu in enumerate(gpus) if gpu == ""]
        others = [rank for rank, gpu in enumerate(gpus) if gpu]
        if hosts and others:
            raise _core.InvalidArgumentError(
                f"rank {hosts[0]} serves a worker on the host, rank {others[0]} is on "
                f"{gpus[others[0]]}: one update uses one kind of device"
            )
        mine = gpus[self._group.rank]
        return (default() if others else "") if mine is None else mine

    def _teach(self, blobs: dict[int, bytes], left: Callable[[], float], check: Check) -> None:
        """Has the workers that asked for it learn, all at once."""
        pupils = [
            session
            for session in self._sessions
            if isinstance(session, WorkerSession) and blobs[session.worker] == LEARN
        ]
        if pupils:
            model = names_of(self._trainer.model).to_bytes()
            for session in pupils:
                session.teach(model, left(), check)
            for session in pupils:
                blobs[session.worker] = session.learnt(left(), check)

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

    def _look(self) -> None:
        """Raises what a rank has published, or what ails a worker: the stream may be waiting for
        that one's rounds."""
        self._group.check()
        for session in self._sessions:
            if isinstance(session, WorkerSession):
                session.look()

    def _show(self, posted: int, bar: tqdm[None]) -> None:
        """Progress counts what all of this rank's workers have loaded."""
        if not bar.disable:
            loaded = min((session.loaded for session in self._sessions), default=posted)
            bar.update(loaded - bar.n)

    def prepared(self, check: Check) -> None:
        """Waits until all workers of this rank hold every byte."""
        left = _countdown(self._options.deadline)
        for session in self._sessions:
            session.prepared(left(), check)
        if self._remote is not None:
            self._remote.prepared(left(), check)

    def commit(self, check: Check) -> None:
        left = _countdown(self._options.deadline)
        for session in self._sessions:
            session.commit(left(), check)
        for session in self._sessions:
            if isinstance(session, WorkerSession):
                session.park(left(), check)

    def check(self) -> None:
        """Raises what a remote engine has found wrong."""
        if self._remote is not None:
            self._remote.check()

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
        parts: list[_Part | None] = [*self._sessions, self._remote, self._exchange]
        parts += [self._everyone, self._store, self._stream]
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

    def _gather_layouts(self, blobs: dict[int, bytes]) -> tuple[list[bytes], list[str | None]]:
        """What every worker keeps, by its number, and the GPU of every rank; layouts that are
        equal travel once a rank."""
        texts = list(dict.fromkeys(blobs.values()))
        index = {number: texts.index(blob) for number, blob in blobs.items()}
        sizes = [len(text) for text in texts]
        header = json.dumps({"index": index, "sizes": sizes, "gpu": self._choose()}).encode()
        parts = self._group.all_gather(header + b"\n" + b"".join(texts))
        layouts: dict[int, bytes] = {}
        gpus = []
        for part in parts:
            head, _, body = part.partition(b"\n")
            facts = json.loads(head)
            gpus.append(facts["gpu"])
            found, at = [], 0
            for size in facts["sizes"]:
                found.append(body[at : at + size])
                at += size
            layouts |= {int(number): found[i] for number, i in facts["index"].items()}
        return [layouts[number] for number in range(len(self._workers))], gpus

    def _order(self, blueprint: Blueprint, plan: _core.Plan) -> None:
        """Writes what remote workers are to do."""
        for session in self._sessions:
            if isinstance(session, RemoteSession):
                rank = blueprint.workers[session.worker][1]
                assert self._crossing is not None
                session.orders = Orders(
                    session.worker, rank, plan.fingerprint, self._crossing, blueprint
                )

    def _draw(self, layouts: list[bytes], ring_nbytes: int) -> Blueprint:
        wanted = [
            (layout, worker.stage) for layout, worker in zip(layouts, self._workers, strict=True)
        ]
        kinds = list(dict.fromkeys(wanted))
        hosts = self._trainer.hosts
        elsewhere = max(hosts) + 1
        return Blueprint(
            self._trainer.model,
            [self._destination(*kind) for kind in kinds],
            [
                (kinds.index(kind), worker.home if worker.rank is None else worker.rank)
                for kind, worker in zip(wanted, self._workers, strict=True)
            ],
            # no trainer rank is nearer to a remote worker than another
            [*hosts, *range(elsewhere, elsewhere + len(self._beyond))],
            round_nbytes=self._round_nbytes(ring_nbytes),
            ring_nbytes=ring_nbytes,
        )

    def _destination(self, layout: bytes, stage: int | None) -> tuple[_core.Layout, bool]:
        if layout not in (WHOLE, PIECES):
            return _core.Layout.from_bytes(layout), False
        model = self._trainer.model
        tensors = range(model.tensor_count) if stage is None else self._trainer.holds(stage)
        return whole(model, tensors), layout == WHOLE

    def _round_nbytes(self, ring_nbytes: int) -> int:
        """Small rounds overlap better; stock engines take one request each, so theirs are large,
        but not where a broadcast costs much more than a request.  A GPU copies a round in less
        time than its message takes."""
        stock = any(worker.stock for worker in self._workers)
        remote = any(worker.stage is not None for worker in self._workers)
        most = self._options.bucket_nbytes
        if self._options.round_nbytes or not stock or (remote and most >= _DEFAULT_ROUND_NBYTES):
            chosen = self._options.round_nbytes
            if chosen or self._device.ordinal < 0 or ring_nbytes:
                return chosen
            return _GPU_ROUND_NBYTES
        return max(most, uncut_nbytes(self._trainer.model))

    def _fit(self, layouts: list[bytes]) -> tuple[Blueprint, _core.Plan]:
        """Plans, and makes the rings: smaller ones where some rank has no memory for them."""
        limit, missing = self._options.ring_nbytes, ""
        while True:
            blueprint = self._draw(layouts, limit)
            try:
                plan = blueprint.plan(self._group.rank)
            except _core.InvalidArgumentError as error:
                if not missing:
                    raise
                text = f"{missing}, and a smaller ring cannot work: {error}"
                raise _core.NoMemoryError(text) from error
            missing = self._agree(plan, self._make_rings(plan))
            if not missing:
                return blueprint, plan
            limit = max(plan.ring_nbytes(number) for number in range(len(self._workers))) // 2
            if self._options.ring_nbytes or limit < _LEAST_RING_NBYTES:
                raise _core.NoMemoryError(missing)
            _log.warning("%s; rings of %d bytes are tried", missing, limit)

    def _make_rings(self, plan: _core.Plan) -> str:
        """Makes the rings of this rank's workers; says what there is no memory for."""
        own = [session for session in self._sessions if isinstance(session, WorkerSession)]
        for session in own:
            session.drop_ring()
        try:
            for session in own:
                session.make_ring(plan, self._device)
        except _core.NoMemoryError as error:
            return f"rank {self._group.rank}: {error}"
        return ""

    def _agree(self, plan: _core.Plan, missing: str) -> str:
        """Compares all ranks' plans; what the first rank that lacks memory says, or ""."""
        mine = [f"{plan.fingerprint:016x}", missing]
        parts = self._group.all_gather(json.dumps(mine).encode())
        prints, lacks = zip(*(json.loads(part) for part in parts), strict=True)
        if len(set(prints)) > 1:
            raise _core.LayoutError(
                f"trainer ranks made different plans: fingerprints {list(prints)}"
            )
        return next(filter(None, lacks), "")

    def _make_exchange(self, plan: _core.Plan, check: Check) -> Exchange | None:
        how = self._transport()
        if how == "none":
            return None
        if how == "shared":
            return self._share(plan, check)
        if self._crossing is None and how == "nccl":
            self._crossing = self._cross()
        if self._crossing is None:
            return GroupExchange(self._group, how, self._device, self._look)

        def look() -> None:
            check()
            self._look()

        timeout = self._options.exchange_deadline
        self._everyone = self._crossing.join(self._group.rank, self._device, timeout, look)
        return GroupExchange(self._everyone, how, self._device, self._look)

    def _transport(self) -> str:
        """What rounds are exchanged by: "none", "shared", "gloo" or "nccl"."""
        if self._crossing is not None:
            return self._crossing.backend
        if self._group.size == 1:
            return "none"
        hosts = len(set(self._trainer.hosts))
        wanted = self._options.exchange
        if wanted == "shared" and hosts > 1:
            raise _core.InvalidArgumentError(
                f"exchange='shared', but the trainer ranks are on {hosts} hosts"
            )
        if wanted == "nccl" and not has_nccl(self._device):
            raise _core.InvalidArgumentError(
                f"exchange='nccl', but rank {self._group.rank} is on {self._device!r}, or this "
                "torch has no NCCL"
            )
        if wanted != "auto":
            return wanted
        if has_nccl(self._device):
            return "nccl"
        return "shared" if hosts == 1 else "gloo"

    def _share(self, plan: _core.Plan, check: Check) -> Exchange:
        group, options = self._group, self._options
        exchange = _core.SharedExchange(
            group.rank, group.size, max(plan.send_nbytes, 1), options.directory, self._device
        )
        try:
            addresses = group.all_gather(exchange.address.encode())
            exchange.connect([a.decode() for a in addresses], options.exchange_deadline, check)
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _cross(self) -> Crossing:
        """Where the trainer ranks meet on their GPUs."""
        mine = b"null"
        if self._group.rank == 0:
            self._store = Store(self._options.deadline)
            crossing = Crossing.at(own_address([]), self._store.port, self._group.size, "nccl")
            mine = json.dumps(dataclasses.asdict(crossing)).encode()
        return Crossing(**json.loads(self._group.all_gather(mine)[0]))


def _countdown(timeout: float) -> Callable[[], float]:
    """Seconds left of `timeout`: what waits for one session after another has one end."""
    end = time.monotonic() + timeout
    return lambda: max(end - time.monotonic(), 0.0)


def whole(model: _core.Layout, tensors: Iterable[int]) -> _core.Layout:
    """The layout of a worker that keeps these tensors of a model."""
    builder = _core.LayoutBuilder()
    for index in tensors:
        name, dtype, shape, group = model.tensor(index)
        zeros = [0] * len(shape)
        builder.add_shard(name, dtype, shape, zeros, shape, 0, 0, zeros, "", group)
    return builder.build()


def uncut_nbytes(model: _core.Layout) -> int:
    """Bytes of the largest tensor of a model, or of the largest ones that stay together."""
    groups: dict[int, int] = {}
    largest = 0
    for index in range(model.tensor_count):
        _, dtype, shape, group = model.tensor(index)
        nbytes = math.prod(shape) * int(getattr(torch, dtype).itemsize)
        padded = -(-nbytes // 64) * 64  # as the planner has it
        largest = max(largest, padded)
        if group != 0:
            groups[group] = groups.get(group, 0) + padded
    return max(largest, *groups.values()) if groups else largest


def names_of(model: _core.Layout) -> _core.Layout:
    """The tensors of a model, without saying where they lie."""
    builder = _core.LayoutBuilder()
    for index in range(model.tensor_count):
        builder.add_tensor(*model.tensor(index))
    return builder.build()
