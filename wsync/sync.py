"""One weight update after another, from the ranks of a trainer into its engines."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.exchange.roster import Trainer, Worker, assign_homes
from wsync.exchange.trainers import host_identity
from wsync.handles.base import EngineHandle, handles_of, send_control
from wsync.machine.deadline import left
from wsync.machine.device import of
from wsync.machine.trace import Trace
from wsync.messages.control import LOAD_FORMAT, Control
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.checked_engine import CheckedEngine, checked_engines
from wsync.trainer.loop import Updates, numbers
from wsync.trainer.requests import Calls, Handover
from wsync.trainer.rounds import Connection, Placement
from wsync.trainer.sessions.broadcast import Remote

if TYPE_CHECKING:
    from wsync.trainer.loop import Source, Weights


class Sync(Updates):
    """Keeps a set of engines up to date with a trainer.

    Every trainer rank makes one, and all ranks call its methods together.  Rank 0 talks to the
    engines' APIs.

    Args:
        source: what this rank holds: a layout, or whole tensors by Hugging Face name.
        engines: the engines as `handle` takes them, or what returns them; read or called on rank
            0 alone.
        engine_gpu_offsets: index of the first trainer rank whose GPU each engine shares; an engine
            beyond the trainer's ranks is remote.
        lock: slime's rollout_engine_lock, held while buckets are broadcast to remote engines.
        options: see `Options`.

    Raises:
        LayoutError: the ranks' layouts disagree.
        WsyncError: the engines' handles could not be made; the same on all ranks.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[Any] | Callable[[], Sequence[Any]],
        *,
        engine_gpu_offsets: Sequence[int] | None = None,
        lock: Any = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(source, options)
        self._lock = lock
        self._engines: list[EngineHandle] = []
        self._visits: list[CheckedEngine] = []
        self._connection: Connection | None = None
        self._pausing: Calls | None = None
        self._opened: Calls | None = None
        self._handover = Handover()
        self._closing: dict[int, list[Control]] = {}
        self._paused = False  # the engines, by the last update
        self._trace = Trace.wanted("trainer", self._group.rank)
        with self._one_error():
            self._same_call()
            if self._group.rank == 0:
                self._engines = handles_of(engines, timeout=self.options.deadline)
                wanted = [name for name in ("acquire", "release") if not hasattr(lock, name)]
                if lock is not None and wanted:
                    raise _core.InvalidArgumentError(
                        f"rollout_engine_lock={lock!r} has no {' and no '.join(wanted)}"
                    )
            self._trainer = self._meet()
            self._placement = self._place(engine_gpu_offsets)

    def update(
        self,
        weights: Weights | Callable[[], Weights] | None = None,
        *,
        version: int | str | None = None,
    ) -> Report:
        """Replaces every weight of every engine; all trainer ranks call it together.

        Args:
            weights: the parameters' current storage by global name, or what returns it; None
                for the tensors that the layout was made from.
            version: the weight version that engines report afterwards, a number from 0 or a
                short text, the same on all ranks; None counts up.

        Returns:
            What happened, as this rank saw it.

        Raises:
            StateError: after close, or while another thread's update runs.
            WsyncError: the same on all ranks; a RemoteError stands for what is none, which is its
                cause on the rank that it comes from (Ctrl-C is raised there as it is).  The
                engines stay paused, and inconsistent where an update had begun; the next call
                connects anew and updates them again.
        """
        with self._updating(version) as report:
            if self._trace is not None:
                self._trace.start()
            report.trace = self._trace
            self._update(self._given(weights), report)
        if self._trace is not None:
            self._trace.write(self._updates)
        return report

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
        finally:
            super()._close()

    def _meet(self) -> Trainer:
        """Everybody's host, pipeline stage and layout."""
        mine = json.dumps([host_identity(), self._source.stage]).encode()
        known = [json.loads(data) for data in self._group.all_gather(mine)]
        names = [name for name, _ in known]
        return Trainer(
            [names.index(name) for name in names],
            [stage for _, stage in known],
            self._gather(),
        )

    def _place(self, offsets: Sequence[int] | None) -> Placement:
        """Which rank serves which worker, as rank 0's engines have it."""
        first_gpus = numbers("engine_gpu_offsets", offsets) if offsets is not None else None
        found = [
            [e.name, e.workers, self._kind(i, e, first_gpus)] for i, e in enumerate(self._engines)
        ]
        mine = json.dumps([found, first_gpus]).encode()
        found, first_gpus = json.loads(self._group.all_gather(mine)[0])
        if not found:
            raise _core.InvalidArgumentError("no engines to connect to")
        self._refuse_options({kind for _, _, kind in found})
        counts = [{"wsync": n, "stock": 0}.get(kind) for _, n, kind in found]
        workers = assign_homes(counts, self._trainer.hosts, first_gpus)
        beyond = [
            (i, k) for i, (_, n, kind) in enumerate(found) if kind == "rank" for k in range(n)
        ]
        if beyond and self.options.exchange == "shared":
            distant = ", ".join(name for name, _, kind in found if kind == "rank")
            raise _core.InvalidArgumentError(
                f"exchange='shared', but workers of remote engines take part in it: {distant}"
            )
        for number, (engine, index) in enumerate(beyond):
            home, rank = number % self._group.size, self._group.size + number
            workers.append(Worker(engine, index, home, rank=rank))
        names = tuple(name for name, _, _ in found)
        away = [(i, name, n) for i, (name, n, kind) in enumerate(found) if kind == "remote"]
        if not away:
            return Placement(workers, names, gpus=first_gpus)
        for stage in sorted(set(self._trainer.stages)):
            source = self._trainer.source(stage)
            workers.append(Worker(-1, 0, source, stock=True, stage=stage))
        remote = Remote(*map(tuple, zip(*away, strict=True)))
        return Placement(workers, names, remote, first_gpus)

    def _refuse_options(self, kinds: set[str]) -> None:
        """Raises InvalidArgumentError for options that none of these kinds of engines takes."""
        idle = {}
        if not kinds & {"rank", "remote"}:
            idle["broadcast"] = "remote engines (delivery='distributed')"
        if "remote" not in kinds:
            idle["backend"] = (
                "remote engines (delivery='distributed') that take broadcasts of buckets or tensors"
            )
        if self._group.size == 1 and "rank" not in kinds:
            idle["exchange"] = "several trainer ranks, and this trainer has one"
            if "wsync" not in kinds:
                idle["park"] = "engines that run wsync (delivery='wsync'), or several trainer ranks"
        self.options.refuse(idle)

    def _kind(self, index: int, engine: EngineHandle, offsets: Sequence[int] | None) -> str:
        """How an engine gets its weights; one whose GPUs are not the trainer's is remote, and its
        workers are ranks of the exchange or take broadcasts."""
        if self.options.delivery == "distributed" or (
            offsets is not None
            and index < len(offsets)
            and offsets[index] + engine.workers > self._group.size
        ):
            how = self.options.broadcast
            if how == "auto":
                how = "wsync" if LOAD_FORMAT in engine.load_formats else "bucket"
            return "rank" if how == "wsync" else "remote"
        return "stock" if self._is_stock(engine) else "wsync"

    def _is_stock(self, engine: EngineHandle) -> bool:
        """Whether an engine takes flattened buckets instead of running wsync's receiver."""
        if self.options.delivery != "auto":
            return self.options.delivery == "stock"
        return LOAD_FORMAT not in engine.load_formats

    def _update(self, weights: Weights | None, report: Report) -> None:
        with self._group.watching(self._watch):
            connection = self._deliver(weights, report)
        with report.phase("prepare"), self._group.watching(self._watch_failures):
            self._group.barrier()
        with report.phase("commit"):
            connection.commit(self._group.check)
            self._count()
            self._close_requests(connection, report.version)
            self._group.confirm()
        self._paused = False

    def _deliver(self, weights: Weights | None, report: Report) -> Connection:
        """Up to the point where the workers of this rank hold every byte."""
        table = self._source.bind(weights)
        sources = _core.BufferTable.of(table)
        check = self._group.check
        self._pause()
        connection = self._connect(of(table))
        if connection.plan is None:
            self._open(connection, report)
            with report.phase("open"):
                connection.attach(check)
            opened = _nothing
        else:
            # the first round is packed while the engines pause
            opened = functools.partial(self._open, connection, report)
        self._describe(connection, report)
        if any(worker.stock for worker in self._placement.workers):
            self._count()  # the last bucket says it
        with self._progress(report, report.rounds, unit="round") as bar:
            connection.run(self._updates, sources, opened, check, report, bar)
        report.staging_nbytes = connection.staging_nbytes
        with report.phase("prepare"):
            connection.prepared(check)
        return connection

    def _pause(self) -> None:
        """Has the engines stop; `_open` waits until they have."""
        self._paused = True
        options, end = self.options, time.monotonic() + self.options.deadline
        if self._group.rank != 0:
            return
        if self._connection is None:  # what a failed update has left under way keeps its own
            self._visits = checked_engines(self._engines)

        def pause(index: int, engine: EngineHandle) -> None:
            engine.pause(options.pause_mode, options.deadline)
            if options.flush_cache:
                engine.flush(left(end))

        self._pausing = Calls(list(enumerate(self._visits)), pause)

    def _connect(self, gpu: str) -> Connection:
        if self._connection is None:
            self._connection = Connection(
                self._group,
                self._trainer,
                self._placement,
                self._visits,
                self.options,
                gpu,
                self._lock,
            )
        return self._connection

    def _open(self, connection: Connection, report: Report) -> None:
        """Waits until all engines have paused, and has their workers join."""
        with report.phase("pause"):
            requests = self._requests(connection) if self._group.rank == 0 else {}
            if self._pausing is not None:
                # a handle's own error, at the deadline, says more than ours
                self._pausing.join(self.options.deadline + 2.0, self._group.check)
                self._pausing = None
            self._group.barrier()  # before engines are told anything
        with report.phase("open"):
            if self._group.rank == 0:
                self._request(requests)

    def _requests(self, connection: Connection) -> dict[int, list[Control]]:
        """What the opening request carries for each worker, by engine; and the closing one's."""
        by_engine: dict[int, list[Control]] = {}
        self._closing = {}
        for number, worker in enumerate(self._placement.workers):
            if not worker.stock:
                opening = connection.opening(number, self._updates)
                closing = dataclasses.replace(opening, op="close", address="")
                for told, message in ((by_engine, opening), (self._closing, closing)):
                    told.setdefault(worker.engine, []).append(message)
        return by_engine

    def _request(self, requests: dict[int, list[Control]]) -> None:
        def open_engine(index: int, engine: EngineHandle) -> None:
            timeout = self.options.request_deadline
            send_control(engine, requests[index], weight_version=None, timeout=timeout)

        numbered = [item for item in enumerate(self._visits) if item[0] in requests]
        self._opened = Calls(numbered, open_engine)

    def _watch(self) -> None:
        """Raises what has gone wrong with an engine or a worker of this rank; called in every wait
        until these hold everything."""
        if self._pausing is not None:
            self._pausing.check()
        if self._opened is not None:
            self._opened.check_pending()
        if self._connection is not None:
            self._connection.look()

    def _watch_failures(self) -> None:
        """The same while ranks agree to commit: those that know it first do, and opening requests
        may end."""
        if self._opened is not None:
            self._opened.check()
        if self._connection is not None:
            self._connection.look()

    def _close_requests(self, connection: Connection, version: str) -> None:
        """Ends the opening requests, records the version, and lets generation go on."""

        def still_there() -> None:
            # an engine does not hear what its workers refuse after the commit, or may have been
            # started again: before it is given the version, and before any engine continues
            self._group.barrier()
            connection.look()
            self._group.barrier()

        if self._group.rank != 0 or self._opened is None:
            still_there()
            still_there()
            return
        timeout = self.options.deadline
        end = time.monotonic() + timeout
        self._opened.join(timeout, self._group.check)
        self._opened = None
        still_there()
        closing = self._closing
        stock = {worker.engine for worker in self._placement.workers if worker.stock}
        stock.update(self._placement.remote.engines)

        def close(index: int, engine: EngineHandle, remaining: Callable[[], float]) -> None:
            if index not in stock:
                send_control(engine, closing[index], weight_version=version, timeout=remaining())

        self._handover.take_on(
            version,
            self._visits,
            close,
            timeout=left(end),
            check=self._group.check,
            between=still_there,
        )

    def _describe(self, connection: Connection, report: Report) -> None:
        plan = connection.plan
        assert plan is not None
        stats = plan.stats
        report.tensors = self._trainer.model.tensor_count
        report.model_nbytes = self._trainer.model.nbytes
        # a stage's source is one worker to the plan, for all those who hear its broadcasts
        remote = sum(self._placement.remote.workers)
        more = max(remote - 1, 0) * self._trainer.model.nbytes
        report.delivered_nbytes = stats["delivered_nbytes"] + more
        report.needed_nbytes = stats["needed_nbytes"] + more
        report.sent_nbytes = stats["sent_nbytes"]
        report.rounds = plan.round_count
        own = [worker for worker in self._placement.workers if worker.stage is None]
        report.workers = len(own) + remote
        report.ring_nbytes = connection.ring_nbytes
        report.exchange = connection.exchange_name

    def _abandon(self, error: _core.WsyncError) -> None:
        if self._paused:
            error.add_note("The engines stay paused until an update succeeds.")
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.abort(str(error))
        except Exception as failure:  # the next update connects anew, whatever is left of this
            error.add_note(f"Letting go of the engines failed, too: {failure!r}")
        try:
            for calls in (self._pausing, self._opened, self._handover):
                # what the engines answer is their side of the failure that is being raised
                if calls is not None:
                    calls.settle(min(2.0, self.options.deadline))
        finally:
            self._pausing = self._opened = None


def _nothing() -> None:
    """What is left to do where everything is open."""
