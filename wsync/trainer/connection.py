"""A trainer rank's connection with engines: the sessions, the plan and the exchange."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.exchange.choose_exchange import Transport
from wsync.exchange.group_exchange import Exchange
from wsync.exchange.introductions import Introduction
from wsync.exchange.remote_plan import PlanInput, RemotePlan
from wsync.exchange.trainer_group import TrainerGroup
from wsync.exchange.update_group import Rendezvous, group_name
from wsync.machine.deadline import PUNCTUAL, Check, Deadline
from wsync.machine.device import settle, threads_for
from wsync.machine.host import own_address
from wsync.messages.control import LEARN, PIECES, WHOLE, Control
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.broadcast_requests import BroadcastRequests
from wsync.trainer.engine_identity import CheckedEngine
from wsync.trainer.lending import Lending
from wsync.trainer.planning import Planning, whole
from wsync.trainer.requests import UnderWay
from wsync.trainer.roster import Delivery, PlanWorker, Roster
from wsync.trainer.sessions.base import Session
from wsync.trainer.sessions.broadcast import BroadcastSession
from wsync.trainer.sessions.direct import DirectSession
from wsync.trainer.sessions.remote import RemoteSession
from wsync.trainer.sessions.stock import StockSession
from wsync.trainer.sessions.worker import WorkerSession

if TYPE_CHECKING:
    from tqdm import tqdm

_log = logging.getLogger(__name__)


class Connection:
    """What consecutive updates of one rank share.  It listens for the rank's workers, agrees on a
    plan, and runs the rounds of each update.

    Args:
        engines: the handles, on rank 0.
        gpu: the UUID of the GPU of this rank's weights, "" for the host.
        lending: what workers on the ranks' hosts can read in place; its `pattern` holds for as long
            as this is used.

    Attributes:
        plan: of all that is delivered, once the workers have said what they keep.
    """

    def __init__(
        self,
        group: TrainerGroup,
        roster: Roster,
        engines: Sequence[CheckedEngine],
        options: Options,
        gpu: str,
        *,
        lending: Lending | None = None,
    ) -> None:
        self.plan: _core.Plan | None = None
        # the plan for tensors sent through rings: those that no worker reads in place
        self._rounds_plan: _core.Plan | None = None
        self._lending = lending
        self._borrowing: dict[int, list[str]] = {}  # workers that can read what is lent, and where
        self._reading: dict[int, bool] = {}  # those that do; True: they also get rounds
        self._group = group
        self._roster = roster
        self._transport = Transport(group, roster.hosts, options)
        self._exchange: Exchange | None = None
        self._options = options
        self._gpu = gpu
        self._stream: _core.Stream | None = None
        self._sessions: list[Session] = []
        self._rings = _core.BufferTable([])
        self._own_loading: dict[str, str] = {}  # by engine, see Report
        self._learning_seconds = 0.0  # before the next report
        try:
            for number, worker in enumerate(roster.workers):
                if worker.served_by == group.rank:
                    self._sessions.append(self._session(number, worker, engines))
            self._addresses = self._meet(engines)
        except BaseException as error:
            self.abort(str(error))
            raise

    def _session(
        self, number: int, worker: PlanWorker, engines: Sequence[CheckedEngine]
    ) -> Session:
        options, roster = self._options, self._roster
        if worker.stage is not None:
            taking = roster.taking(Delivery.BROADCAST)
            name = group_name(self._group.name, worker.stage)
            return BroadcastSession(number, taking, name=name, options=options)
        engine = roster.engines[worker.engine]
        if worker.delivery is Delivery.REMOTE:
            host = own_address([engine.name])
            return RemoteSession(
                number, engine=engine.name, index=worker.index, host=host, park=options.park
            )
        if worker.delivery is Delivery.STOCK:
            on_gpu = options.stock_memory == "gpu"
            if options.stock_memory == "auto":
                # a worker that does not see the GPU ends when it is sent memory of it; of several
                # workers, each of the others would need a context on it
                on_gpu = engine.workers == 1 and engine.first_gpu == self._group.rank
            on_gpu = on_gpu and self._gpu != ""
            handle, timeout = engines[worker.engine], options.request_deadline
            return StockSession(number, handle, timeout=timeout, on_gpu=on_gpu)
        known: dict[str, Any] = {
            "engine": engine.name,
            "index": worker.index,
            "directory": options.directory,
            "park": options.park,
        }
        if self._lending is None:
            return WorkerSession(number, **known)
        return DirectSession(number, lending=self._lending, **known)

    @property
    def under_way(self) -> UnderWay:
        """Requests to engines that have not been answered."""
        return [item for session in self._sessions for item in session.under_way]

    @property
    def packs_ahead(self) -> bool:
        """Whether an update may begin before its engines have paused: there is a plan, no worker
        reads in place (it would have to be told addresses first), and no remote workers take part
        in an NCCL exchange (it would wait for them)."""
        if self.plan is None or self._reading:
            return False
        by_nccl = self._exchange is not None and self._exchange.name == "nccl"
        return not (by_nccl and self._roster.taking(Delivery.REMOTE))

    def openings(self, update: int) -> dict[int, list[Control]]:
        """The control messages that make workers join an update, by engine."""
        found = defaultdict[int, list[Control]](list)
        for number, (session, address) in sorted(self._addresses.items()):
            found[self._roster.workers[number].engine].append(
                Control(
                    op="open",
                    session=session,
                    update=update,
                    deadline=self._options.deadline,
                    address=address,
                )
            )
        return found

    def _meet(self, engines: Sequence[CheckedEngine]) -> dict[int, tuple[str, str]]:
        """Session and address of every worker that runs wsync's receiver, by its number; and tells
        rank 0 where engines meet the sources of broadcasts."""
        addresses = {
            session.worker: (session.id, session.address)
            for session in self._sessions
            if isinstance(session, WorkerSession)
        }
        sources = [s for s in self._sessions if isinstance(s, BroadcastSession)]
        places = {source.worker: dataclasses.asdict(source.rendezvous) for source in sources}
        everyone = self._group.gather_json([addresses, places])
        if sources and self._group.rank == 0:
            each = {int(n): Rendezvous(**p) for _, places in everyone for n, p in places.items()}
            taking = [
                engine
                for engine, known in zip(engines, self._roster.engines, strict=True)
                if known.delivery is Delivery.BROADCAST
            ]
            sources[0].requests = BroadcastRequests(taking, each, self._options)
        return {int(n): (i, where) for found, _ in everyone for n, (i, where) in found.items()}

    def attach(self, check: Check, show: Callable[[int], tqdm[None]]) -> None:
        """Waits for the workers, makes a plan of what they keep, and hands them their rings.

        show: makes a bar of so many tensors, for workers that learn.
        """
        deadline = Deadline(PUNCTUAL * self._options.deadline)
        blobs = {s.worker: s.accept(deadline.left, check) for s in self._sessions}
        self._send_model(blobs, deadline, check, show)
        self._compare_workers()
        planning = Planning(self._group, self._roster, self._sessions, self._options)
        layouts, device = planning.gather(blobs, self._gpu)
        self._stream = _core.Stream(self._options.threads or threads_for(device), device)
        self.plan = self._arrange(planning, layouts, device, check)

    def _arrange(
        self, planning: Planning, layouts: list[bytes], device: _core.Device, check: Check
    ) -> _core.Plan:
        """Makes a plan of what the workers keep, and all that its rounds need.

        layouts: by the worker's number in the plan.
        """
        planning.name_cut(layouts)
        given, rounds = planning.fit(self._split(layouts), device)
        self._rounds_plan = rounds
        by_rounds = len(self._reading) < len(layouts) or rounds.round_count > 0
        if by_rounds:
            self._transport.choose(device, self._remote_introductions())
            self._tell_remote(given, rounds)
        spans = [(0, 0)] * len(self._roster.workers)
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            spans[session.worker] = session.attach(rounds, device, deadline.left, check)
        self._rings = _core.BufferTable(spans, owner=list(self._sessions))
        if by_rounds:
            self._exchange = self._transport.open(check)
        plan = planning.plan(layouts, device) if self._reading else rounds
        planning.name_unused(plan)
        planning.name_uncut(rounds)
        return plan

    @property
    def reads_in_place(self) -> bool:
        """Once attached: whether some worker reads what is lent to it."""
        return bool(self._reading)

    def _split(self, layouts: list[bytes]) -> list[bytes]:
        """Has workers read in place what they can; returns what rounds still have to bring to
        each."""
        lending, model = self._lending, self._roster.model
        if lending is None:
            return layouts
        counts = [model.buffer_count(rank) for rank in range(self._group.size)]
        offsets = list(accumulate(counts, initial=0))
        sessions = {s.worker: s for s in self._sessions if isinstance(s, DirectSession)}
        known: dict[tuple[bytes, int, str], tuple[_core.Layout, _core.Layout]] = {}
        left = list(layouts)
        for number, reached in sorted(self._borrowing.items()):
            layout, worker = layouts[number], self._roster.workers[number]
            if layout == WHOLE:
                continue
            host = self._roster.hosts[worker.served_by]
            place = layout, host, ",".join(reached)
            if place not in known:
                wanted = None if layout == PIECES else _core.Layout.from_bytes(layout)
                joined = model.join(wanted, lending.lent(host, reached[:1], counts))
                rest = (wanted or whole(model, range(model.tensor_count))).without(joined)
                if reached[1:]:  # what lies on the worker's own GPU is read there
                    far = model.join(rest, lending.lent(host, reached, counts))
                    joined, rest = joined.beside(far, 0), rest.without(far)
                known[place] = joined, rest
            joined, rest = known[place]
            if joined.shard_count:
                left[number] = rest.to_bytes()
                self._reading[number] = rest.shard_count > 0
                if number in sessions:
                    sessions[number].serve(joined, offsets)
        return left

    def _send_model(
        self,
        blobs: dict[int, bytes],
        deadline: Deadline,
        check: Check,
        show: Callable[[int], tqdm[None]],
    ) -> None:
        """Has the workers that asked for it learn, all at once."""
        learning = [
            session
            for session in self._sessions
            if isinstance(session, WorkerSession) and blobs[session.worker] == LEARN
        ]
        if not learning:
            return
        start = time.perf_counter()
        model = names_of(self._roster.model).to_bytes()
        with show(self._roster.model.tensor_count) as bar:

            def look() -> None:
                check()
                for session in learning:
                    session.look()
                bar.update(0)  # which draws the seconds that have passed

            for session in learning:
                session.send_model(model, deadline.left, check)
            for session in learning:
                blobs[session.worker] = session.accept_layout(deadline.left, look)
        self._learning_seconds = time.perf_counter() - start

    def _compare_workers(self) -> None:
        """Tells all ranks what each one's workers have learnt, and which of them borrow."""
        learnt = [[s.worker, s.own_loading] for s in self._sessions if s.own_loading]
        borrowing = [
            [s.worker, s.reaches]
            for s in self._sessions
            if isinstance(s, DirectSession) and self._borrows(s)
        ]
        mine = [self._learning_seconds, learnt, borrowing]
        seconds, found, able = zip(*self._group.gather_json(mine), strict=True)
        self._learning_seconds = max(seconds)
        self._borrowing = {number: reached for rank in able for number, reached in rank}
        for number, reason in (each for rank in found for each in rank):
            engine = self._roster.engines[self._roster.workers[number].engine].name
            self._own_loading.setdefault(engine, reason)

    def _borrows(self, session: WorkerSession) -> bool:
        """Whether a worker can read what is lent to it."""
        if self._lending is None or not session.reaches:
            return False
        pieces, most = self._lending.pieces, self._lending.quarters * session.most_segments
        if pieces > most:
            _log.warning(
                "wsync: %s gets a ring: the trainer's weights lie in %d pieces of shared memory, "
                "and this worker may open %d (%d/4 of its `ulimit -Hn`)",
                session.name,
                pieces,
                most,
                self._lending.quarters,
            )
        return pieces <= most

    def _remote_introductions(self) -> dict[int, tuple[str, Introduction]]:
        """What the remote workers of this rank have said of themselves, by their rank in the
        exchange."""
        workers = self._roster.workers
        return {
            workers[session.worker].home: (session.name, session.introduction)
            for session in self._sessions
            if isinstance(session, RemoteSession)
        }

    def _tell_remote(self, given: PlanInput, plan: _core.Plan) -> None:
        """Writes what remote workers are told of the plan."""
        engines = [engine.name for engine in self._roster.taking(Delivery.REMOTE)]
        meeting = self._transport.meet(plan, engines)
        for session in self._sessions:
            if isinstance(session, RemoteSession):
                number, fingerprint = session.worker, plan.fingerprint
                rank = given.workers[number][1]
                session.remote_plan = RemotePlan(number, rank, fingerprint, meeting, given)

    def start(
        self, update: int, sources: _core.BufferTable, check: Check, report: Report
    ) -> _core.BufferTable | None:
        """Begins an update: workers are sent BEGIN, and round 0 is packed, posted to the exchange
        and copied, but not yet announced to workers.  `run` takes what this returns."""
        plan, stream, timeout = self._rounds_plan, self._stream, self._options.deadline
        assert plan is not None and stream is not None
        report.trace.watch(stream, 3 * plan.round_count)
        for session in self._sessions:
            session.begin(update, report.version, timeout, check)
        # some stream may still be writing the weights; if it comes to no end, this is said before
        # workers miss round 0
        settle(stream.device, PUNCTUAL * timeout, check)
        if self._exchange is not None:
            self._exchange.begin(plan)
        messages = self._pack_and_post(0, sources, check, report)
        self._copy_local(0, sources, check, report)
        return messages

    def run(
        self,
        sources: _core.BufferTable,
        messages: _core.BufferTable | None,
        check: Check,
        report: Report,
        bar: tqdm[None],
    ) -> None:
        """Moves all rounds into the rings of this rank's workers, and waits until they have taken
        them and what they read in place."""
        stream, timeout = self._stream, self._options.deadline
        assert stream is not None
        for number in range(self._round_count):
            if number > 0:
                self._copy_local(number, sources, check, report)
            following = self._pack_and_post(number + 1, sources, check, report)
            if messages is not None:
                self._wait_and_unpack(number, messages, check, report)
            messages = following
            with report.phase("copy"):  # a bucket can be sent when its copies have run
                for session in self._sessions:
                    if number < session.round_count:
                        session.post(number, stream, timeout, check)
            report.trace.mark("post", number)
            self._show(number + 1, bar)
        with report.phase("engine"):
            for number in range(self._round_count):
                for session in self._sessions:
                    if number < session.round_count:
                        session.wait(number, timeout, check)
                self._show(number + 1, bar)
        with report.phase("copy"):
            stream.synchronize(timeout, check)
        if self._exchange is not None:
            self._exchange.check()
            report.staging_nbytes = self._exchange.nbytes
        report.trace.take(stream)

    @property
    def _round_count(self) -> int:
        """Round 0 is also that of what is read in place."""
        assert self._rounds_plan is not None
        return max(self._rounds_plan.round_count, 1 if self._reading else 0)

    def describe(self, report: Report) -> None:
        """Says what an update by this plan moves."""
        plan, rounds, model = self.plan, self._rounds_plan, self._roster.model
        assert plan is not None and rounds is not None
        stats = plan.stats
        report.tensors = model.tensor_count
        report.model_nbytes = model.nbytes
        # to the plan a stage's source is one worker, which stands for all that receive its
        # broadcasts
        broadcast = sum(engine.workers for engine in self._roster.taking(Delivery.BROADCAST))
        more = max(broadcast - 1, 0) * model.nbytes
        report.delivered_nbytes = stats["delivered_nbytes"] + more
        report.needed_nbytes = stats["needed_nbytes"] + more
        report.sent_nbytes = rounds.stats["sent_nbytes"]
        report.rounds, report.round_nbytes = self._round_count, rounds.round_nbytes
        report.unused = tuple(model.tensor(index)[0] for index in plan.unused)
        report.own_loading = dict(self._own_loading)
        report.learning_seconds, self._learning_seconds = self._learning_seconds, 0.0
        own = [worker for worker in self._roster.workers if worker.stage is None]
        report.workers = len(own) + broadcast
        report.ring_nbytes = sum(self._rings[number][1] for number in range(len(self._rings)))
        if self._exchange is not None:
            report.exchange = self._exchange.name
        report.paths = {
            engine.name: self._path(number) or report.exchange
            for number, engine in enumerate(self._roster.engines)
        }

    def _path(self, engine: int) -> str:
        """What carries the weights of an engine, by its number; "": the exchange."""
        workers = [n for n, worker in enumerate(self._roster.workers) if worker.engine == engine]
        reading = [self._reading[number] for number in workers if number in self._reading]
        if not reading:
            return self._roster.engines[engine].delivery.path
        return "direct" if len(reading) == len(workers) and not any(reading) else "direct and ring"

    def _copy_local(
        self, number: int, sources: _core.BufferTable, check: Check, report: Report
    ) -> None:
        """Copies what this rank has of a round into the rings, once their slots are free."""
        plan, stream = self._rounds_plan, self._stream
        assert plan is not None and stream is not None
        if number >= plan.round_count:
            return
        with report.phase("engine"):
            for session in self._sessions:
                session.acquire(number, stream, self._options.deadline, check)
        stream.copy(plan, number, _core.LOCAL, sources, self._rings)

    def _show(self, posted: int, bar: tqdm[None]) -> None:
        """Counts the rounds that all of this rank's workers have loaded."""
        if not bar.disable:
            loaded = min((session.loaded for session in self._sessions), default=posted)
            bar.update(loaded - bar.n)

    def prepared(self, check: Check, report: Report) -> None:
        """Waits until all workers of this rank hold every byte."""
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            session.prepared(deadline.left, check)
            report.audit_seconds = max(report.audit_seconds, session.audit_seconds)

    def commit(self, check: Check) -> None:
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            session.commit(deadline.left, check)
        for session in self._sessions:
            session.park(deadline.left, check)
        if self._options.park and self._exchange is not None:
            self._exchange.park()
        if self._options.park and self._lending is not None:
            self._lending.release()

    def look(self) -> None:
        """Raises a failure of this rank's GPU, of its workers, of a remote engine or of the
        exchange; does not wait."""
        if self._stream is not None:
            self._stream.look()  # after a fault all ranks would wait
        for session in self._sessions:
            session.look()
        if self._exchange is not None:
            self._exchange.check()

    def abort(self, text: str) -> None:
        """Stops copying, tells the workers why, and lets go of everything."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.close)
            for session in reversed(self._sessions):
                last_first.callback(session.abort, text)
            if self._stream is not None:
                last_first.callback(self._stream.abandon)

    def close(self) -> None:
        """Lets go of every part, whatever one of them raises."""
        # work stuck on a GPU ends only when its process group is closed; until then freeing GPU
        # memory blocks
        with contextlib.ExitStack() as last_first:
            if self._stream is not None:
                last_first.callback(self._stream.close)
            for session in reversed(self._sessions):
                last_first.callback(session.close)
            last_first.callback(self._transport.close)

    def _pack_and_post(
        self, number: int, sources: _core.BufferTable, check: Check, report: Report
    ) -> _core.BufferTable | None:
        """Packs and posts what this rank sends in a round; returns where its messages lie."""
        exchange, plan, stream = self._exchange, self._rounds_plan, self._stream
        assert plan is not None and stream is not None
        if exchange is None or number >= plan.round_count:
            return None
        with report.phase("staging"):
            exchange.acquire(number, self._options.exchange_deadline, check)
        messages = exchange.spans(number)
        stream.copy(plan, number, _core.PACK, sources, messages)
        exchange.post(number, stream)
        return messages

    def _wait_and_unpack(
        self, number: int, messages: _core.BufferTable, check: Check, report: Report
    ) -> None:
        """Waits for what others send to this rank in a round, and unpacks it into the rings."""
        exchange, plan, stream = self._exchange, self._rounds_plan, self._stream
        assert exchange is not None and plan is not None and stream is not None
        with report.phase("gather"):
            exchange.wait(number, stream, self._options.exchange_deadline, check)
        stream.copy(plan, number, _core.UNPACK, messages, self._rings)
        exchange.release(number, stream)


def names_of(model: _core.Layout) -> _core.Layout:
    """The tensors of a model, without saying where they lie."""
    builder = _core.LayoutBuilder()
    for index in range(model.tensor_count):
        builder.add_tensor(*model.tensor(index))
    return builder.build()
