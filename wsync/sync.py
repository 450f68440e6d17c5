"""One weight update after another, from the ranks of a trainer into its engines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.handles.base import EngineHandle
from wsync.machine.deadline import Deadline
from wsync.machine.device import KnownMemory, of
from wsync.machine.trace import Trace
from wsync.messages.control import CHANGED
from wsync.options import Options
from wsync.report import Report, Verification
from wsync.trainer.checkpoint_check import EngineCheck, check_scales, is_untied
from wsync.trainer.connection import Connection
from wsync.trainer.fleet import Fleet, blames
from wsync.trainer.lending import Lending
from wsync.trainer.quantise_option import config_of, tell_rearranged
from wsync.trainer.requests import EngineRequests
from wsync.trainer.roster import Delivery, RolloutEngine, Roster
from wsync.trainer.updates_base import Updates

if TYPE_CHECKING:
    from wsync.trainer.updates_base import Source, Weights

_log = logging.getLogger("wsync")
_BROKEN = (_core.PeerClosedError, _core.DeadlineError)  # of a connection


class Sync(Updates):
    """Keeps a set of engines up to date with a trainer.

    Every trainer rank makes a `Sync`, and all ranks call its methods together.  If ranks make
    several, they make them one after another, in the same order on all ranks.  Only rank 0 talks
    to the engines' APIs.

    Args:
        source: this rank's weights: a layout, or whole tensors by Hugging Face name.
        engines: a list of engines, each as `handle` takes it, or a function that returns the list;
            used only on rank 0.  The function is called again in each update.  If an engine of its
            list does not answer or cannot be updated yet, `Report.lost` names it.
        engine_gpu_offsets: for each engine, the first trainer rank whose GPU the engine shares.  An
            engine with workers beyond the last rank is remote.
        api_key: bearer key of engines that are given as URLs.
        options: see `Options`.

    Raises:
        LayoutError: the ranks' layouts disagree.
        InvalidArgumentError: an engine holds weights in another form than the trainer delivers.
        WsyncError: the engines' handles could not be made; all ranks raise the same error.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[Any] | Callable[[], Sequence[Any]],
        *,
        engine_gpu_offsets: Sequence[int] | None = None,
        api_key: str | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(source, options)
        self._connection: Connection | None = None
        self._verified = False  # whether an update by this connection was
        # a staged update's report, its weights, and whether the engines hold its bytes
        self._staged: tuple[Report, Weights | None, bool] | None = None
        self._lending: Lending | None = None  # lets workers read in place
        self._lends = False  # whether the current or next connection uses it
        self._trace = Trace.wanted("trainer", self._group.rank)
        with self._one_error():
            self._same_call()
            known: Any = {"ranks": self._group.size, "api_key": api_key}
            self._fleet = Fleet(engines, engine_gpu_offsets, self.options, **known)  # on rank 0
            if self._group.rank == 0:
                self._export()
                self._fleet.connect()
            self._requests = EngineRequests(self._fleet.handles, self.options)
            self._roster = self._meet(self._fleet.engines)
        self._generation = 0  # of the fleet, as this rank knows it
        self._beginning = False  # whether an update is about to make its first attempt
        self._lost: dict[str, str] = {}  # engines that updates go without, each with the reason
        self.retries = False  # whether an update is tried once more if a connection breaks
        self._lending = self._make_lending()
        self._memory = KnownMemory()

    def update(
        self,
        weights: Weights | Callable[[], Weights] | None = None,
        *,
        version: int | str | None = None,
    ) -> Report:
        """Replaces every weight of every engine; all trainer ranks call it together.  If some
        engines are gone, do not answer or refuse the update, it reaches the others only (see
        `Options.lost`).  Later calls update lost engines that have come back.

        Args:
            weights: the current parameters by global name, or a function that returns them; None
                stands for the tensors that the layout was made from.  The tensors must not change
                until this returns.
            version: the weight version that engines report afterwards: a number from 0 or a short
                text, the same on all ranks.  None counts up; each connection starts at 1.

        Returns:
            What happened, as this rank saw it.

        Raises:
            StateError: `close` was called, or another update is running.  Also raised if ranks have
                called `update` different numbers of times and not all give a version, because their
                weights may come from different steps.  Also raised after an update whose weights
                differ (see Options.verify).
            WsyncError: an update has failed; all ranks raise the same error.  Other exceptions are
                raised as a RemoteError, with the original as its `__cause__` on the rank where it
                happened (Ctrl-C is raised there unchanged).  Engines that are known to hold no part
                of the update continue.  Other engines stay paused, and may hold a part of the
                update; the next call connects anew and updates them again.  If the only cause is
                that an engine's load_weights does something else than before, as after a
                rebalancing of experts, this call itself connects anew and tries once more.
        """
        with self._running("update"):
            report = self._repeat(self._update, version, weights)
            self._end(report)
        report.trace.write(self._updates)
        return report

    @contextlib.contextmanager
    def _reaching(
        self,
        report: Report,
        version: int | str | None,
        weights: Weights | Callable[[], Weights] | None,
    ) -> Iterator[None]:
        """Wraps an attempt, which reaches the engines that rank 0 knows, except lost ones."""
        with self._attempt(report, version, weights, self._look) as same:
            self._lost = report.lost
            if not same:
                fleet = self._fleet
                mine = [fleet.generation, [dataclasses.astuple(each) for each in fleet.engines]]
                number, engines = self._group.gather_json(mine)[0]
                self._reach(_described(engines))
                self._generation = number
            yield

    def _look(self) -> tuple[int, int, dict[str, str]]:
        """The number of the fleet's generation that this rank knows; on rank 0 the fleet's own, and
        lost engines."""
        if self._group.rank == 0 and self._beginning:
            self._fleet.begin()
        self._beginning = False
        return self._generation, self._fleet.generation, self._fleet.lost

    def _repeat(
        self,
        attempt: Callable[[Weights | None, Report], None],
        version: int | str | None,
        weights: Weights | Callable[[], Weights] | None,
    ) -> Report:
        """Makes attempts until one succeeds, or until another cannot help.  All ranks make the same
        attempts.  Returns the report, which all attempts fill in."""
        report, first, number, start = Report(), "", 1, time.perf_counter()
        self._beginning = True
        while True:
            try:
                with self._reaching(report, version, weights):
                    report.trace = self._trace.anew()
                    attempt(self._given(weights), report)
                report.seconds = time.perf_counter() - start  # of all attempts
                return report
            except _core.WsyncError as error:
                if not self._may_repeat(error, number):
                    self._fleet.forget()
                    if first:
                        error.add_note(f"This was attempt {number}.  The first had failed: {first}")
                    raise
                first = first or str(error)
            number += 1

    def _may_repeat(self, error: _core.WsyncError, number: int) -> bool:
        """Whether an attempt after this failed one may succeed; the same on all ranks."""
        engines, broken = self._roster.engines, isinstance(error, _BROKEN)
        once = number == 1 and (CHANGED in str(error) or (self.retries and broken))
        blamed = any(blames(error, engine.name) for engine in engines) or (self._grouped and broken)
        may_lose = self.options.lost == "continue" and len(engines) > 1 and blamed

        def decide() -> bool:
            known: Any = {"late": self._requests.late, "grouped": self._grouped}
            if may_lose and self._fleet.find(self._requests.engines, error, **known):
                return True
            if once:
                _log.warning("wsync: an update has failed, and is tried once more: %s", error)
            return once

        return (once or may_lose) and self._after_failure(decide)

    @property
    def _grouped(self) -> bool:
        """Whether workers of engines are members of process groups."""
        return any(map(self._roster.taking, (Delivery.REMOTE, Delivery.BROADCAST)))

    def _reach(self, engines: list[RolloutEngine]) -> None:
        """Makes updates reach other engines than before."""
        roster = dataclasses.replace(self._roster, engines=engines)
        roster.check(self.options)
        self._disconnect()
        self._roster = roster
        self._requests.use(self._fleet.handles, self._fleet.known)
        if self._lending is not None:
            self._lending.close()
        self._lending, self._lends = self._make_lending(), False

    def _make_lending(self) -> Lending | None:
        """Returns what lets workers read in place; None if no worker may."""
        in_place = self._delivery in ("auto", "direct") and self.options.stage != "on"
        if not (in_place and self._roster.taking(Delivery.WSYNC)):
            return None
        known = self._layout, self._group.rank, self._roster, self.options
        return Lending(*known, wholly=self._delivery == "auto")

    def stage(
        self,
        weights: Weights | Callable[[], Weights] | None = None,
        *,
        version: int | str | None = None,
    ) -> bool:
        """Brings the bytes of an update to engines that generate; `commit` then puts them in place.
        All trainer ranks call it together, with the arguments of `update`, which does both.  If an
        update is staged already, it is dropped, and `commit` brings the new one.

        Returns:
            Whether the bytes have been sent, so that the tensors may change.  False: `commit` sends
            them, and the tensors must not change until it returns.  This is the case in a
            connection's first update, in the first update after an error or a dropped update, and
            if Options.stage does not allow staging.

        Raises:
            StateError: as in `update`.
            WsyncError: as in `update`.  Engines continue with the weights that they have.
        """
        with self._running("stage"):
            self._repeat(self._stage, version, weights)
            assert self._staged is not None
            return self._staged[2]

    def _stage(self, weights: Weights | None, report: Report) -> None:
        if brought := self._stages:
            with self._group.watching(self._watch):
                self._bring(weights, report)
        self._staged = report, None if brought else weights, brought

    def commit(self) -> Report:
        """Puts a staged update in place: engines pause, copy it into their weights, and continue
        with its version.  All trainer ranks call it together.

        Returns:
            What happened in `stage` and here, as this rank saw it.

        Raises:
            StateError: nothing is staged; or as in `update`.
            WsyncError: as in `update`; also if only some engines are gone, because the weights with
                which the others would be updated again may have changed.  The next update goes
                without these engines.
        """
        with self._running("commit"):
            assert self._staged is not None
            (report, given, brought), self._staged = self._staged, None
            with self._one_error(report):
                self._update(given, report, brought=brought)
            self._end(report)
        report.trace.write(self._updates)
        return report

    @contextlib.contextmanager
    def _running(self, call: str) -> Iterator[None]:
        with super()._running(call):
            if self._staged is None and call == "commit":
                raise _core.StateError("commit: no update is staged; call stage first")
            if self._staged is not None and call == "verify":
                raise _core.StateError("verify: an update is staged; call commit first")
            if self._staged is not None and call != "commit":
                brought, self._staged = self._staged[2], None
                if brought:  # workers hold its rounds, and only a new connection drops them
                    self._disconnect()
            yield

    def verify(self, weights: Weights | Callable[[], Weights] | None = None) -> Verification:
        """Compares every weight that engines hold with what the trainer has, bit for bit; all
        trainer ranks call it together.

        The trainer sends what an update sends, and workers compare it with their parameters instead
        of loading it, with the same casts.  Engines pause meanwhile, and keep running requests;
        only SGLang's pipeline stages end them.  They continue, also if weights differ, with the
        weights and the version that they have.

        What an engine's own load_weights computes is not compared, nor engines without wsync's
        receiver: SGLang can read single tensors of only a few models back.

        Args:
            weights: as in `update`.  They must be those of the last update.

        Returns:
            What was found, the same on all ranks.  It is true if nothing differs and every engine
            was compared.

        Raises:
            StateError: no update has succeeded since the last error, or the weights have moved to
                memory that needs a new plan; or as in `update`.
            WsyncError: a worker has ended or does not answer; all ranks raise the same error.
                Engines that answer continue, and the next update connects anew.
        """
        report = Report()
        with self._running("verify"), self._attempt(report, None, weights):
            with self._group.watching(self._watch):
                _, sources = self._share(self._given(weights), report)
                connection = self._connection
                if connection is None and self._receiving:
                    raise _core.StateError(
                        "verify: call update first: no update has been made, or none since an "
                        "error or since the weights have moved to other memory"
                    )
                self._requests.hold({engine.name for engine in self._receiving})
            found = self._compare(connection, sources, report)
            self._resume()
        return dataclasses.replace(found, paused=self._requests.pauses)

    @property
    def _receiving(self) -> list[RolloutEngine]:
        """The engines with wsync's receiver."""
        return self._roster.taking(Delivery.WSYNC) + self._roster.taking(Delivery.REMOTE)

    def _compare(
        self, connection: Connection | None, sources: _core.BufferTable, report: Report
    ) -> Verification:
        """Makes workers of paused engines compare their weights."""
        begin, workers = time.perf_counter(), list[dict[str, Any]]()
        if connection is not None and self._receiving:
            with self._group.watching(self._watch):
                connection.describe(report)
                connection.compare()
                self._open(connection, report)
                with self._progress(
                    report, report.rounds, doing=": comparing", unit="round"
                ) as bar:
                    messages = connection.start(self._updates, sources, report)
                    connection.run(sources, messages, report, bar)
                workers = connection.compared()
                connection.prepared(report)
            with self._group.watching(self._watch_failures):
                self._group.barrier()
            connection.commit()
            self._requests.answered(self._group.check)
            self._still_there(connection)
        none = [found for found in workers if found["uncompared"] and not found["tensors"]]
        unread = {found["engine"]: found["uncompared"] for found in none}
        unread |= {name: f"lost: {why}" for name, why in self._lost.items()}
        for delivery in (Delivery.STOCK, Delivery.BROADCAST):
            unread |= {e.name: f"it takes {delivery.words}" for e in self._roster.taking(delivery)}
        return Verification(workers, unread, time.perf_counter() - begin)

    @property
    def ways(self) -> dict[str, list[str]]:
        found = {delivery.words: self._roster.taking(delivery) for delivery in Delivery}
        return {way: [e.name for e in taking] for way, taking in found.items() if taking}

    def _close(self) -> None:
        self._staged = None
        with contextlib.ExitStack() as last_first:
            last_first.callback(super()._close)
            if self._lending is not None:
                last_first.callback(self._lending.close)
            if self._connection is not None:
                last_first.callback(self._disconnect)

    def _disconnect(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.close()
            self._connection = None  # last, so that an interrupted close can be repeated

    def _let_go(self) -> None:
        """Lends no memory until the next connection."""
        self._lends = False
        if self._lending is not None:
            self._lending.release()

    def _check_engines(self, model: _core.Layout) -> None:
        options = self.options
        known: Any = {"receivers": self._fleet.receivers, "untied": is_untied(self._source)}
        check = EngineCheck(options, config_of(options), model, **known)

        def welcome(*engines: EngineHandle) -> None:
            for name in check.check_engines(engines, options.deadline):
                self._requests.effect.watch(name)
            tell_rearranged(engines, options, model)

        welcome(*self._fleet.handles)
        self._fleet.welcome, self._requests.compare = welcome, check.check_engine

    def _meet(self, engines: list[RolloutEngine]) -> Roster:
        """Gathers all ranks' layouts, and rank 0's engines and delivery."""
        mine = [dataclasses.astuple(engine) for engine in engines]
        found, self._delivery = self._group.gather_json([mine, self.options.delivery])[0]
        hosts = self._group.hosts
        roster = Roster(
            [hosts.index(host) for host in hosts],
            self._gather(),
            _described(found),
        )
        roster.check(self.options)
        if roster.taking(Delivery.STOCK) or roster.taking(Delivery.BROADCAST):
            check_scales(roster.model)
        return roster

    @property
    def _stages(self) -> bool:
        """Whether the connection's engines take an update's bytes before they pause."""
        return self._connection is not None and self._connection.staged

    @property
    def _verifies(self) -> bool:
        """Whether an update that this connection makes now is to be verified."""
        wanted = self.options.verify
        return bool(self._receiving) and (
            wanted == "always" or (wanted == "first" and not self._verified)
        )

    def _update(self, weights: Weights | None, report: Report, *, brought: bool = False) -> None:
        sources = None  # of what was staged: the trainer's weights may have changed since
        with self._group.watching(self._watch):
            if brought and self._connection is not None:
                self._connection.look()  # before anybody pauses
                self._group.confirm()
                connection = self._place(report)
            elif self._stages:
                sources = self._bring(weights, report)
                connection = self._place(report)
            else:
                connection, sources = self._deliver(weights, report)
            with report.phase("prepare"):
                connection.prepared(report)
        with report.phase("prepare"), self._group.watching(self._watch_failures):
            self._group.barrier()
        if not self._verifies:
            sources = None
        with report.phase("commit"):
            connection.commit(park=sources is None)
            self._requests.answered(self._group.check)
            # a worker may fail after the commit without its engine knowing
            self._still_there(connection)
        if sources is not None:
            self._verify_update(connection, sources, report)
        with report.phase("commit"):
            self._use_up_version()
            self._requests.close(report.version, self._group.check, ahead=connection.ahead)
            self._still_there(connection)
            self._resume()

    def _verify_update(
        self, connection: Connection, sources: _core.BufferTable, report: Report
    ) -> None:
        """Verifies an update before its engines get the version."""
        with report.phase("verify"):
            found = self._compare(connection, sources, Report(report.version))
        if found.differences:
            raise _core.StateError(
                f"after this update, {found.differences}; if an engine's own code changes weights "
                "after they are loaded, give Options(verify='never')"
            )
        self._verified, report.verification = True, found

    def _bring(self, weights: Weights | None, report: Report) -> _core.BufferTable:
        """Brings all rounds to workers that keep them beside their weights."""
        connection = self._connection
        assert connection is not None
        sources = self._memory.bind(self._bind(weights, report))
        connection.describe(report)
        report.staged = True
        with self._progress(report, report.rounds, unit="round") as bar:
            messages = connection.start(self._updates, sources, report)
            connection.run(sources, messages, report, bar)
        self._group.confirm()
        return sources

    def _place(self, report: Report) -> Connection:
        """Makes the workers copy these rounds into their weights."""
        assert self._connection is not None
        self._requests.pause()
        self._open(self._connection, report)
        return self._connection

    def _deliver(
        self, weights: Weights | None, report: Report
    ) -> tuple[Connection, _core.BufferTable]:
        """Brings the workers of this rank every byte while their engines are paused."""
        table, sources = self._share(weights, report)  # before engines are asked for anything
        former, messages = self._connection, None
        begun = former is not None and former.ahead  # workers map what is lent before they pause
        if former is not None and begun:
            messages = former.start(self._updates, sources, report)
        self._requests.pause()
        connection = self._connect(of(table))
        # The plan depends on what workers say when they join.  So a first update opens before it
        # packs; later updates pack their first round while the engines pause.
        ahead = connection.packs_ahead
        if not ahead:
            self._open(connection, report)
        if connection.plan is None:
            with report.phase("open"):
                learning = functools.partial(
                    self._progress, report, doing=": engines learn where weights go", unit="tensor"
                )
                connection.attach(learning)
            if self._delivery == "auto" and not connection.reading:
                self._let_go()
        connection.describe(report)
        if self._roster.takes_buckets:
            self._use_up_version()  # the last bucket carries it
        with self._progress(report, report.rounds, unit="round") as bar:
            if not begun:
                messages = connection.start(self._updates, sources, report)
            if ahead:
                self._open(connection, report)
            connection.run(sources, messages, report, bar)
        return connection, sources

    def _share(
        self, weights: Weights | None, report: Report
    ) -> tuple[_core.TensorTable, _core.BufferTable]:
        """Returns this rank's tensors and their places, of which all ranks are told."""
        lending = self._lending
        table = self._bind(weights, report, lending.table if lending else None)
        sources = (lending or self._memory).bind(table)
        with report.phase("open"):
            self._lend(sources, table)
        return table, sources

    def _lend(self, sources: _core.BufferTable, table: _core.TensorTable) -> None:
        """Tells all ranks which weights workers can read in place, and where these are now.  Closes
        the connection if its plan was made for other weights.  With delivery="auto", a connection
        that finds nothing to read in place does not look again."""
        lending, connection = self._lending, self._connection
        if connection is None and lending is not None:
            lending.reset(self._group)
            self._lends = True
        if lending is None or not self._lends:
            return
        if lending.share(sources, table) and connection is not None:
            self._connection = None
            connection.close()
        lent = any(any(buffers) for _, buffers in lending.pattern)
        if not lent and self._delivery == "auto":
            self._let_go()
        if self._group.rank == 0:
            for text in filter(None, lending.obstacles):
                self._warn(f"{text}; weights that engines do not read in place go through rings")

    def _connect(self, gpu: str) -> Connection:
        if self._connection is None:
            self._verified = False
            self._connection = Connection(
                self._group,
                self._roster,
                self._requests.engines,
                self.options,
                gpu,
                lending=self._lending if self._lends else None,
            )
        return self._connection

    def _open(self, connection: Connection, report: Report) -> None:
        """Waits until all engines have paused, then asks their workers to join."""
        with report.phase("pause"):
            self._requests.paused(self._group.check)
            self._requests.measure(report)
            self._group.barrier()  # before engines are told anything
        with report.phase("open"):
            if self._group.rank == 0:
                self._requests.open(connection.openings(self._updates))

    def _watch(self) -> None:
        """Raises the error of an engine or of this rank's worker, if there is one.  Called in every
        wait until the workers hold all bytes."""
        self._requests.look()
        if self._connection is not None:
            self._connection.look()

    def _watch_failures(self) -> None:
        """Raises the same errors as `_watch` while ranks agree to commit.  The first ranks to agree
        already commit, so opening requests may end."""
        self._requests.look(committing=True)
        if self._connection is not None:
            self._connection.look()

    def _still_there(self, connection: Connection) -> None:
        """Looks at all ranks' workers before engines get a version, and before any continues."""
        self._group.barrier()
        connection.look()
        self._group.barrier()

    def _resume(self) -> None:
        """Lets generation go on."""
        self._requests.resume(Deadline(self.options.deadline), self._group.check)
        self._group.confirm()

    def _abandon(self, error: _core.WsyncError) -> None:
        self._staged = None
        connection, self._connection = self._connection, None
        under_way = [] if connection is None else connection.under_way
        try:
            if connection is not None:
                connection.abort(str(error))
        except Exception as failure:  # the next update connects anew in any case
            error.add_note(f"Closing the connection to the engines failed, too: {failure!r}")
        finally:
            self._let_go()
            self._requests.abandon(error, under_way)


def _described(engines: Sequence[Sequence[Any]]) -> list[RolloutEngine]:
    return [RolloutEngine(name, n, Delivery(how), *rest) for name, n, how, *rest in engines]


def connect(
    source: Source,
    engines: Sequence[Any] | Callable[[], Sequence[Any]],
    *,
    engine_gpu_offsets: Sequence[int] | None = None,
    api_key: str | None = None,
    options: Options | None = None,
) -> Sync:
    """Connects a trainer's weights to running engines.

    Args:
        source: this rank's layout (`wsync.megatron.layout`, `wsync.fsdp.layout`), or whole tensors
            by Hugging Face name.
        engines: a list of URLs, Ray actors, local engines or handles, or a function that returns
            one; used only on rank 0.  `update` and `stage` call the function again: engines that
            have joined get the weights, too.
        engine_gpu_offsets: see `Sync`; without it, workers are spread over the ranks on rank 0's
            host.
        api_key: bearer key of engines that are given as URLs.
        options: deadlines, ways of delivery, round size, pause mode.

    Returns:
        A `Sync`; `update(version=...)` replaces every weight of every engine.

    Raises:
        InvalidArgumentError, UnsupportedError: an entry of `engines` is no engine or is given
            twice, a tensor cannot be sent, or an engine holds weights in another form.
        PeerClosedError, DeadlineError: an engine does not answer; every rank raises this.  With a
            function and Options(lost="continue"), this is raised only if no engine answers.
        LayoutError: the trainer ranks' layouts disagree.
    """
    chosen = Options.of(options)
    known: Any = {"engine_gpu_offsets": engine_gpu_offsets, "api_key": api_key}
    return Sync(source, engines, options=chosen, **known)
