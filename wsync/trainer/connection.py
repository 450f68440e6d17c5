"""A trainer rank's connection with engines: the sessions, the plan and the exchange."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from wsync import _core
from wsync.exchange.choose_exchange import ExchangeSetup
from wsync.exchange.group_exchange import Exchange
from wsync.exchange.remote_plan import PlanInput, RemotePlan
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.deadline import PUNCTUAL, Deadline
from wsync.machine.device import settle, threads_for
from wsync.machine.host import own_address
from wsync.messages.control import BEGIN, LEARN, NOTHING, PIECES, ROUNDS, WHOLE, Control
from wsync.module_tensors.names import is_note
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.lending import Lending
from wsync.trainer.planning import Planning, Session, whole
from wsync.trainer.requests import UnderWay
from wsync.trainer.roster import Delivery, PlanWorker, Roster
from wsync.trainer.sessions.broadcast import BroadcastSession
from wsync.trainer.sessions.stock import StockSession
from wsync.trainer.sessions.worker import RemoteSession, WorkerSession

_log = logging.getLogger(__name__)


class Connection:
    """The state that consecutive updates of one rank share.  It listens for the rank's workers,
    agrees on a plan, and runs the rounds of each update.

    Args:
        engines: the handles, on rank 0.
        gpu: the UUID of the GPU of this rank's weights; "" if they are on the host.
        lending: the memory that workers on the ranks' hosts can read in place; its `pattern` does
            not change while this connection is used.

    Attributes:
        plan: the plan of all that is delivered; None until the workers have said what they keep.
        reading: by number of each worker that reads lent memory in place: whether it also gets
        rounds.
        staged: whether engines take all rounds of further updates before they pause.
    """

    # once there is a plan: the plan of what is sent through rings, and the stream that copies it
    _rounds_plan: _core.Plan
    _stream: _core.Stream

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
        self._lending = lending
        self.reading: dict[int, bool] = {}
        self.staged = False
        self._group = group
        self._check = group.check
        self._roster = roster
        self._exchange_setup = ExchangeSetup(group, roster.hosts, options)
        self._exchange: Exchange | None = None
        self._options = options
        self._gpu = gpu
        self._sessions: list[Session] = []
        self._taking = self._sessions  # those that take the current rounds
        self._answers: dict[int, str] = {}  # the addresses for what workers find, if they compare
        self._rings = _core.BufferTable([])
        self._own_loading: dict[str, str] = {}  # by engine, see Report
        self._learning_seconds = 0.0  # since the last report
        try:
            for number, worker in enumerate(roster.workers):
                if worker.served_by == group.rank:
                    self._sessions.append(self._session(number, worker, engines))
            self._receivers = [s for s in self._sessions if isinstance(s, WorkerSession)]
            self._addresses = self._meet()
        except BaseException as error:
            self.abort(str(error))
            raise

    def _session(
        self, number: int, worker: PlanWorker, engines: Sequence[CheckedEngine]
    ) -> Session:
        options, roster = self._options, self._roster
        if worker.delivery is Delivery.BROADCAST:
            known = zip(engines, roster.engines, strict=True)
            taking = [handle for handle, engine in known if engine.delivery is worker.delivery]
            return BroadcastSession(number, taking, options=options)
        engine = roster.engines[worker.engine]
        if worker.delivery is Delivery.STOCK:
            # a worker that does not see the GPU ends when it is sent memory of this GPU; if there
            # are several workers, each would need a context on it
            its_own = engine.workers == 1 and engine.first_gpu == self._group.rank
            wanted = options.stock_memory == "gpu" or (options.stock_memory == "auto" and its_own)
            handle, timeout = engines[worker.engine], options.request_deadline
            return StockSession(number, handle, timeout=timeout, on_gpu=wanted and self._gpu != "")
        facts: Any = {"engine": engine.name, "index": worker.index}
        if worker.delivery is Delivery.REMOTE:
            return RemoteSession(number, host=own_address([engine.name]), **facts)
        directory, lending = options.directory, self._lending
        return WorkerSession(number, directory=directory, lending=lending, **facts)

    @property
    def under_way(self) -> UnderWay:
        """Requests to engines that have not been answered."""
        taking = [s for s in self._sessions if not isinstance(s, WorkerSession)]
        return [asked for session in taking for asked in session.under_way]

    @property
    def ahead(self) -> str:
        """What workers get of an update before its opening requests, except in the first update."""
        if self.staged:
            return ROUNDS
        return BEGIN if self.reading and not self._roster.taking(Delivery.REMOTE) else NOTHING

    @property
    def packs_ahead(self) -> bool:
        """Whether an update may begin before its engines have paused.  This needs a plan.  If
        workers begin before the pause, too (see `ahead`), the update may.  Otherwise it may not if
        a worker reads in place, because that worker must be told addresses first.  It also may not
        if a remote worker takes part in an NCCL exchange, because the exchange would wait for that
        worker."""
        if self.plan is None:
            return False
        if self.ahead or self.reading:
            return bool(self.ahead)
        by_nccl = self._exchange is not None and self._exchange.name == "nccl"
        return not (by_nccl and self._roster.taking(Delivery.REMOTE))

    def openings(self, update: int) -> dict[int, list[Control]]:
        """The control messages that make workers join an update, by engine."""
        found = defaultdict[int, list[Control]](list)
        for number, told in sorted(self._addresses.items()):
            engine = self._roster.workers[number].engine
            common = {"drafts": self._roster.engines[engine].drafts, **told}
            if number in self._answers:
                common |= {"answer": self._answers[number], "ahead": self.ahead}
            found[engine].append(Control(update=update, deadline=self._options.deadline, **common))
        return found

    def _meet(self) -> dict[int, dict[str, Any]]:
        """The facts that workers with wsync's receiver need to join, by worker number."""
        mine = {
            s.worker: {"op": "open", "session": s.id, "address": s.address} for s in self._receivers
        }
        everyone = self._group.gather_json(mine)
        return {int(number): told for found in everyone for number, told in found.items()}

    def compare(self) -> None:
        """Makes workers with wsync's receiver compare the next rounds with their weights, instead
        of loading them.  Other workers do not get these rounds."""
        found = self._group.gather_json({s.worker: s.ask() for s in self._receivers})
        self._answers = {int(number): at for rank in found for number, at in rank.items()}
        self._taking = [*self._receivers]

    def compared(self) -> list[dict[str, Any]]:
        """Waits for what the workers of all ranks have found; returns it by worker (see
        WorkerSession.answer), with "engine" and "worker"."""
        deadline = Deadline(self._options.deadline)
        mine = {s.worker: s.answer(deadline.left, self._check) for s in self._receivers}
        self._answers, self._taking = {}, self._sessions
        said = {int(n): found for r in self._group.gather_json(mine) for n, found in r.items()}
        workers, engines = self._roster.workers, self._roster.engines
        return [
            {"engine": engines[workers[n].engine].name, "worker": workers[n].index, **said[n]}
            for n in sorted(said)
        ]

    def attach(self, show: Callable[[int], tqdm[None]]) -> None:
        """Waits for the workers, makes a plan of what they keep, and hands them their rings.

        show: makes a progress bar for a number of tensors, shown while workers learn where weights
        go.
        """
        deadline = Deadline(PUNCTUAL * self._options.deadline)
        blobs = {s.worker: s.accept(deadline.left, self._check) for s in self._sessions}
        self._send_model(blobs, deadline, show)
        planning = Planning(self._group, self._roster, self._sessions, self._options)
        layouts, device, told = planning.gather(blobs, self._gpu, self._told())
        self._learning_seconds = max(each["seconds"] for each in told)
        for number, reason in (each for rank in told for each in rank["learnt"].items()):
            engine = self._roster.engines[self._roster.workers[int(number)].engine].name
            self._own_loading.setdefault(engine, reason)
        reaching = {int(n): reached for rank in told for n, reached in rank["reaching"].items()}
        free = {int(n): known for rank in told for n, known in rank["free"].items()}
        with planning.naming(layouts):
            left = self._split(layouts, reaching)
            staged = planning.may_stage(left, free, bool(self.reading))
            given, self._rounds_plan = planning.fit(left, device, staged)
        # workers read in place during round 0
        self._round_count = max(self._rounds_plan.round_count, 1 if self.reading else 0)
        self._make_ready(given, device)
        plan = planning.plan(layouts, device) if self.reading else self._rounds_plan
        # last: without a plan, there is no stream to close
        self._stream = _core.Stream(self._options.threads or threads_for(device), device)
        self.plan, self.staged = plan, staged

    def _make_ready(self, given: PlanInput, device: _core.Device) -> None:
        """Tells the workers about the plan, and opens the exchange with the other ranks."""
        workers, rounds = self._roster.workers, self._rounds_plan
        by_rounds = len(self.reading) < len(workers) or rounds.round_count > 0
        if by_rounds:
            remote = [s for s in self._receivers if isinstance(s, RemoteSession)]
            said = {
                workers[s.worker].serving_rank: (s.name, s.exporter.introduction) for s in remote
            }
            self._exchange_setup.choose(device, said)
            names = [engine.name for engine in self._roster.taking(Delivery.REMOTE)]
            meeting = self._exchange_setup.meet(rounds, names)
            for far in remote:
                rank, fingerprint = workers[far.worker].serving_rank, rounds.fingerprint
                far.remote_plan = RemotePlan(far.worker, rank, fingerprint, meeting, given)
        spans = [(0, 0)] * len(workers)
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            spans[session.worker] = session.attach(rounds, device, deadline.left, self._check)
        self._rings = _core.BufferTable(spans, owner=list(self._sessions))
        if by_rounds:
            self._exchange = self._exchange_setup.open(self._check)

    def _split(self, layouts: list[bytes], reaching: dict[int, list[str]]) -> list[bytes]:
        """Makes workers read in place what they can; returns, for each worker, the layout of what
        rounds must still deliver."""
        lending, model = self._lending, self._roster.model
        if lending is None:
            return layouts
        counts = [model.buffer_count(rank) for rank in range(self._group.size)]

        @functools.cache
        def readable(layout: bytes, host: int, *reached: str) -> tuple[_core.Layout, _core.Layout]:
            wanted = None if layout == PIECES else _core.Layout.from_bytes(layout)
            joined = model.join(wanted, lending.lent(host, reached[:1], counts))
            rest = (wanted or whole(model, range(model.tensor_count))).without(joined)
            if reached[1:]:  # the worker reads from its own GPU first
                far = model.join(rest, lending.lent(host, reached, counts))
                joined, rest = joined.beside(far, 0), rest.without(far)
            return joined, rest

        left = list(layouts)
        sessions = {session.worker: session for session in self._receivers}
        for number, reached in sorted(reaching.items()):
            host = self._roster.hosts[self._roster.workers[number].served_by]
            if layouts[number] == WHOLE:
                continue
            joined, rest = readable(layouts[number], host, *reached)
            if joined.shard_count:
                left[number] = rest.to_bytes()
                self.reading[number] = rest.shard_count > 0
                if number in sessions:
                    sessions[number].serve(joined, list(accumulate(counts, initial=0)))
        return left

    def _send_model(
        self, blobs: dict[int, bytes], deadline: Deadline, show: Callable[[int], tqdm[None]]
    ) -> None:
        """Sends the list of the model's tensors to all workers that asked to learn, so that they
        learn at the same time."""
        learning = [s for s in self._receivers if blobs[s.worker] == LEARN]
        if not learning:
            return
        start = time.perf_counter()
        model = names_of(self._roster.model).to_bytes()
        with show(self._roster.model.tensor_count) as bar:

            def look() -> None:
                self._check()
                bar.update(0)  # draws the seconds that have passed

            for session in learning:
                session.send_model(model, deadline.left, self._check)
            for session in learning:
                blobs[session.worker] = session.accept_layout(deadline.left, look)
        self._learning_seconds = time.perf_counter() - start

    def _told(self) -> dict[str, Any]:
        """What this rank tells other ranks about its workers: how long they took to learn where
        weights go, what they load by the engine's own load_weights, the places of lent memory that
        they can read, and remote workers' free memory."""
        pieces = 0 if self._lending is None else self._lending.pieces
        for each in self._receivers:
            if self._options.delivery == "direct" and each.reaches and pieces > each.most_segments:
                _log.warning(
                    "wsync: %s does not read weights in place, but gets a ring: the weights are in "
                    "%d pieces of shared memory, and the worker may open only %d (half of its "
                    "`ulimit -Hn`)",
                    each.name,
                    pieces,
                    each.most_segments,
                )
        able = [s for s in self._receivers if s.reaches and 0 < pieces <= s.most_segments]
        return {
            "seconds": self._learning_seconds,
            "learnt": {s.worker: s.own_loading for s in self._receivers if s.own_loading},
            "reaching": {s.worker: s.reaches for s in able},
            "free": {
                s.worker: (said.host, said.gpu, said.free_nbytes)
                for s in self._receivers
                if isinstance(s, RemoteSession) and (said := s.exporter.introduction)
            },
        }

    def start(
        self, update: int, sources: _core.BufferTable, report: Report
    ) -> _core.BufferTable | None:
        """Begins an update: sends BEGIN to the workers; packs round 0, posts it to the exchange and
        copies it, but does not yet announce it to workers.  `run` takes the returned value."""
        plan, stream, timeout = self._rounds_plan, self._stream, self._options.deadline
        report.trace.watch(stream, 3 * plan.round_count)
        for session in self._taking:
            session.begin(update, report.version, timeout, self._check)
        for session in self._receivers:
            if session.worker in self.reading:
                session.begun(timeout, self._check)
        # some stream may still be writing the weights; if it does not end, this fails before
        # workers miss round 0
        settle(stream.device, PUNCTUAL * timeout, self._check)
        if self._exchange is not None:
            self._exchange.begin(plan)
        messages = self._pack_and_post(0, sources, report)
        self._copy_local(0, sources, report)
        return messages

    def run(
        self,
        sources: _core.BufferTable,
        messages: _core.BufferTable | None,
        report: Report,
        bar: tqdm[None],
    ) -> None:
        """Moves all rounds into the rings of this rank's workers.  Waits until the workers have
        taken all rounds and have finished reading in place."""
        stream, timeout = self._stream, self._options.deadline
        for number in range(self._round_count):
            if number > 0:
                self._copy_local(number, sources, report)
            following = self._pack_and_post(number + 1, sources, report)
            if messages is not None:
                self._wait_and_unpack(number, messages, report)
            messages = following
            with report.phase("copy"):  # a bucket can be sent when its copies have run
                for session in self._taking:
                    if number < session.round_count:
                        session.post(number, stream, timeout, self._check)
            report.trace.mark("post", number)
            self._show(number + 1, bar)
        with report.phase("engine"):
            for number in range(self._round_count):
                for session in self._taking:
                    if number < session.round_count:
                        session.wait(number, timeout, self._check)
                self._show(number + 1, bar)
        with report.phase("copy"):
            stream.synchronize(timeout, self._check)
        if self._exchange is not None:
            self._exchange.check()
            report.staging_nbytes = self._exchange.nbytes
        report.trace.take(stream)

    def describe(self, report: Report) -> None:
        """Reports what an update by this plan moves."""
        plan, rounds, model = self.plan, self._rounds_plan, self._roster.model
        assert plan is not None
        stats = plan.stats
        report.tensors = model.tensor_count
        report.model_nbytes = model.nbytes
        # in the plan, one worker stands for all that receive broadcasts
        broadcast = sum(engine.workers for engine in self._roster.taking(Delivery.BROADCAST))
        more = max(broadcast - 1, 0) * model.nbytes
        report.delivered_nbytes = stats["delivered_nbytes"] + more
        report.needed_nbytes = stats["needed_nbytes"] + more
        report.sent_nbytes = rounds.stats["sent_nbytes"]
        report.rounds, report.round_nbytes = self._round_count, rounds.round_nbytes
        names = (model.tensor(index).name for index in plan.unused)
        report.unused = tuple(name for name in names if not is_note(name))
        report.own_loading = dict(self._own_loading)
        report.learning_seconds, self._learning_seconds = self._learning_seconds, 0.0
        report.workers = len(self._roster.workers) + max(broadcast - 1, 0)
        report.ring_nbytes = sum(self._rings[number][1] for number in range(len(self._rings)))
        if self._exchange is not None:
            report.exchange = self._exchange.name
        report.paths = {
            engine.name: self._path(number) or report.exchange
            for number, engine in enumerate(self._roster.engines)
        }

    def _path(self, engine: int) -> str:
        """What carries the weights of an engine, given by number; "" means the exchange."""
        workers = [n for n, worker in enumerate(self._roster.workers) if worker.engine == engine]
        reading = [self.reading[number] for number in workers if number in self.reading]
        if not reading:
            return self._roster.engines[engine].delivery.path
        return "direct" if len(reading) == len(workers) and not any(reading) else "direct and ring"

    def _copy_local(self, number: int, sources: _core.BufferTable, report: Report) -> None:
        """Copies this rank's part of a round into the rings, once the slots are free."""
        plan, stream = self._rounds_plan, self._stream
        if number >= plan.round_count:
            return
        with report.phase("engine"):
            for session in self._taking:
                session.acquire(number, stream, self._options.deadline, self._check)
        stream.copy(plan, number, _core.LOCAL, sources, self._rings)

    def _show(self, posted: int, bar: tqdm[None]) -> None:
        """Shows how many rounds all workers of this rank have loaded."""
        if not bar.disable:
            loaded = min((session.loaded for session in self._taking), default=posted)
            bar.update(loaded - bar.n)

    def prepared(self, report: Report) -> None:
        """Waits until all workers of this rank hold every byte."""
        deadline = Deadline(self._options.deadline)
        for session in self._sessions:
            session.prepared(deadline.left, self._check)
        report.audit_seconds = max((s.audit_seconds for s in self._receivers), default=0.0)

    def commit(self, *, park: bool = True) -> None:
        """Ends the update for workers.  park: whether to do what Options.park asks for."""
        deadline, park = Deadline(self._options.deadline), park and self._options.park
        for session in self._receivers:
            session.commit(deadline.left, self._check, park)
        if not park:
            return
        for session in self._receivers:
            session.park(deadline.left, self._check)
        if self._exchange is not None:
            self._exchange.park()
        if self._lending is not None:
            self._lending.release()

    def look(self) -> None:
        """Raises a failure of this rank's GPU, of its workers, of a remote engine or of the
        exchange; does not wait."""
        if self.plan is not None:
            self._stream.look()  # otherwise all ranks would wait after a fault
        for session in self._sessions:
            session.look()
        if self._exchange is not None:
            self._exchange.check()

    def abort(self, text: str) -> None:
        """Stops copying, tells the workers why, and closes everything."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.close)
            for session in reversed(self._sessions):
                last_first.callback(session.abort, text)
            if self.plan is not None:
                last_first.callback(self._stream.abandon)

    def close(self) -> None:
        """Closes every part, even if closing one of them raises an error."""
        # work stuck on a GPU ends only when its process group is closed; until then freeing GPU
        # memory blocks
        with contextlib.ExitStack() as last_first:
            if self.plan is not None:
                last_first.callback(self._stream.close)
            for session in reversed(self._sessions):
                last_first.callback(session.close)
            last_first.callback(self._exchange_setup.close)

    def _pack_and_post(
        self, number: int, sources: _core.BufferTable, report: Report
    ) -> _core.BufferTable | None:
        """Packs and posts what this rank sends in a round; returns the memory of the messages."""
        exchange, plan, stream = self._exchange, self._rounds_plan, self._stream
        if exchange is None or number >= plan.round_count:
            return None
        with report.phase("staging"):
            exchange.acquire(number, self._options.exchange_deadline, self._check)
        messages = exchange.spans(number)
        stream.copy(plan, number, _core.PACK, sources, messages)
        exchange.post(number, stream)
        return messages

    def _wait_and_unpack(self, number: int, messages: _core.BufferTable, report: Report) -> None:
        """Waits for what other ranks send in a round, and unpacks it into the rings."""
        exchange, plan, stream = self._exchange, self._rounds_plan, self._stream
        assert exchange is not None
        with report.phase("gather"):
            exchange.wait(number, stream, self._options.exchange_deadline, self._check)
        stream.copy(plan, number, _core.UNPACK, messages, self._rings)
        exchange.release(number, stream)


def names_of(model: _core.Layout) -> _core.Layout:
    """A layout with the tensors of a model, but without their places."""
    builder = _core.LayoutBuilder()
    for index in range(model.tensor_count):
        builder.add_tensor(*model.tensor(index))
    return builder.build()
