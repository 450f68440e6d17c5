"""One weight update after another, from the ranks of a trainer into its engines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.handles.base import EngineHandle, handles_of
from wsync.machine.device import of
from wsync.machine.host import host_identity
from wsync.machine.trace import Trace
from wsync.options import Options, numbers
from wsync.report import Report
from wsync.trainer.checkpoint_check import EngineCheck, check_scales
from wsync.trainer.connection import Connection
from wsync.trainer.lending import Lending
from wsync.trainer.quantise_option import config_of, tell_rearranged
from wsync.trainer.requests import EngineRequests
from wsync.trainer.roster import Delivery, RolloutEngine, Roster
from wsync.trainer.updates_base import Updates

if TYPE_CHECKING:
    from wsync.trainer.updates_base import Source, Weights


class Sync(Updates):
    """Keeps a set of engines up to date with a trainer.

    Every trainer rank makes one, and all ranks call its methods together.  Several with the same
    ranks have to be made one after another, in the same order on all ranks.  Rank 0 talks to the
    engines' APIs.

    Args:
        source: what this rank holds: a layout, or whole tensors by Hugging Face name.
        engines: the engines as `handle` takes them, or a function that returns them; used only on
            rank 0.
        engine_gpu_offsets: index of the first trainer rank whose GPU each engine shares; an engine
            beyond the trainer's ranks is remote.
        options: see `Options`.

    Raises:
        LayoutError: the ranks' layouts disagree.
        InvalidArgumentError: an engine says that it holds weights in another form than it is sent.
        WsyncError: the engines' handles could not be made; the same on all ranks.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[Any] | Callable[[], Sequence[Any]],
        *,
        engine_gpu_offsets: Sequence[int] | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(source, options)
        self._receivers: list[EngineHandle] = []  # engines with wsync's receiver, on rank 0
        self._connection: Connection | None = None
        self._lending: Lending | None = None  # by whom workers may read in place
        self._lends = False  # whether a connection is kept, or about to be made, that does
        self._trace = Trace.wanted("trainer", self._group.rank)
        with self._one_error():
            self._same_call()
            found = list[RolloutEngine]()
            if self._group.rank == 0:
                found = self._find(engines, engine_gpu_offsets)
            self._roster = self._meet(found)
        if self._delivery in ("auto", "direct") and self._roster.taking(Delivery.WSYNC):
            known = self._layout, self._group.rank, self._roster, self.options
            self._lending = Lending(*known, wholly=self._delivery == "auto")

    def update(
        self,
        weights: Weights | Callable[[], Weights] | None = None,
        *,
        version: int | str | None = None,
    ) -> Report:
        """Replaces every weight of every engine; all trainer ranks call it together.

        Args:
            weights: the parameters' current storage by global name, or a function that returns it;
                None for the tensors that the layout was made from.  They must not change until this
                returns.
            version: the weight version that engines report afterwards, a number from 0 or a
                short text, the same on all ranks; None counts up, from 1 on
                with each connection.

        Returns:
            What happened, as this rank saw it.

        Raises:
            StateError: after close, or while another update runs; or ranks have called this
                different numbers of times, and not all say a version: their weights may be of two
                steps.
            WsyncError: the same on all ranks.  An error that is not a WsyncError is raised as a
                RemoteError; on the rank where it happened, its `__cause__` is the original (Ctrl-C
                is raised there as it is).  Engines that the update had sent nothing go
                on.  Others stay paused, and may hold a part of the update; the next call connects
                anew and updates them again.
        """
        with self._updating(version, weights) as report:
            report.trace = self._trace.anew()
            self._update(self._given(weights), report)
        report.trace.write(self._updates)
        return report

    @property
    def ways(self) -> dict[str, list[str]]:
        found = {delivery.words: self._roster.taking(delivery) for delivery in Delivery}
        return {way: [e.name for e in taking] for way, taking in found.items() if taking}

    def _close(self) -> None:
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
            self._connection = None  # not before: what is interrupted here can be called again

    def _let_go(self) -> None:
        """Gives up all memory that is lent, until another connection is made."""
        self._lends = False
        if self._lending is not None:
            self._lending.release()

    def _find(
        self,
        engines: Sequence[Any] | Callable[[], Sequence[Any]],
        offsets: Sequence[int] | None,
    ) -> list[RolloutEngine]:
        """Makes the engines' handles, and returns what each engine is."""
        handles = handles_of(engines, timeout=self.options.deadline)
        self._requests = EngineRequests(handles, self.options)
        gpus = [None] * len(handles) if offsets is None else numbers("engine_gpu_offsets", offsets)
        if len(gpus) != len(handles):
            raise _core.InvalidArgumentError(
                f"{len(gpus)} engine_gpu_offsets for {len(handles)} engines"
            )
        ranks = self._group.size
        pairs = zip(handles, gpus, strict=True)
        found = [RolloutEngine.of(engine, gpu, self.options, ranks) for engine, gpu in pairs]
        self._receivers = [
            engine
            for engine, known in zip(handles, found, strict=True)
            if known.delivery not in (Delivery.STOCK, Delivery.BROADCAST)
        ]
        return found

    def _check_engines(self, model: _core.Layout) -> None:
        options = self.options
        check = EngineCheck(options, config_of(options), model, receivers=self._receivers)
        for name in check.check_engines(self._requests.handles, options.deadline):
            self._requests.effect.watch(name)
        self._requests.compare = check.check_engine
        tell_rearranged(self._requests.handles, options, model)

    def _meet(self, engines: list[RolloutEngine]) -> Roster:
        """Gathers all ranks' hosts and layouts, and rank 0's engines and delivery."""
        mine = [host_identity(), [dataclasses.astuple(engine) for engine in engines]]
        told = self._group.gather_json([*mine, self.options.delivery])
        names, found, (self._delivery, *_) = zip(*told, strict=True)
        roster = Roster(
            [names.index(name) for name in names],
            self._gather(),
            [RolloutEngine(name, n, Delivery(how), gpu) for name, n, how, gpu in found[0]],
        )
        roster.check(self.options)
        if roster.taking(Delivery.STOCK) or roster.taking(Delivery.BROADCAST):
            check_scales(roster.model)
        return roster

    def _update(self, weights: Weights | None, report: Report) -> None:
        with self._group.watching(self._watch):
            connection = self._deliver(weights, report)
        with report.phase("prepare"), self._group.watching(self._watch_failures):
            self._group.barrier()
        with report.phase("commit"):
            connection.commit()
            self._use_up_version()
            self._close_requests(connection, report.version)
            self._group.confirm()

    def _deliver(self, weights: Weights | None, report: Report) -> Connection:
        """Runs an update until the workers of this rank hold every byte."""
        table = self._bind(weights, report)
        sources = _core.BufferTable.of(table)
        with report.phase("open"):
            self._lend(sources, of(table))  # before engines are asked for anything
        self._requests.pause()
        connection = self._connect(of(table))
        # A plan is made of what the workers say when they have joined, so that a first update opens
        # before it can pack; a later one packs its first round while the engines pause.
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
            self._use_up_version()  # the last bucket says it
        with self._progress(report, report.rounds, unit="round") as bar:
            messages = connection.start(self._updates, sources, report)
            if ahead:
                self._open(connection, report)
            connection.run(sources, messages, report, bar)
        with report.phase("prepare"):
            connection.prepared(report)
        return connection

    def _lend(self, sources: _core.BufferTable, gpu: str) -> None:
        """Tells all ranks which weights workers can read in place, and where these lie now.  Ends
        the connection if its plan was made for other ones.  With delivery="auto", if nothing can be
        read in place when a connection is made, it is not checked again during that connection."""
        lending, connection = self._lending, self._connection
        if connection is None and lending is not None:
            lending.reset(self._group)
            self._lends = True
        if lending is None or not self._lends:
            return
        if lending.share(sources, gpu) and connection is not None:
            self._connection = None
            connection.close()
        lent = any(any(buffers) for _, buffers in lending.pattern)
        if not lent and self._delivery == "auto":
            self._let_go()
        if self._group.rank == 0:
            for text in filter(None, lending.obstacles):
                self._warn(f"{text}; what engines do not read in place goes through rings")

    def _connect(self, gpu: str) -> Connection:
        if self._connection is None:
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
        """Waits until all engines have paused, and has their workers join."""
        with report.phase("pause"):
            self._requests.paused(self._group.check)
            self._requests.measure(report)
            self._group.barrier()  # before engines are told anything
        with report.phase("open"):
            if self._group.rank == 0:
                self._requests.open(connection.openings(self._updates))

    def _watch(self) -> None:
        """Raises what has gone wrong with an engine or a worker of this rank; called in every wait
        until the workers hold everything."""
        self._requests.look()
        if self._connection is not None:
            self._connection.look()

    def _watch_failures(self) -> None:
        """The same while ranks agree to commit: the first ranks to know already commit, so opening
        requests may end."""
        self._requests.look(committing=True)
        if self._connection is not None:
            self._connection.look()

    def _close_requests(self, connection: Connection, version: str) -> None:
        """Ends the opening requests, records the version, and lets generation go on."""

        def still_there() -> None:
            # an engine is not told what its workers refuse after the commit, and may have been
            # restarted: look before it is given the version, and before any engine continues
            self._group.barrier()
            connection.look()
            self._group.barrier()

        self._requests.close(version, self._group.check, still_there)

    def _abandon(self, error: _core.WsyncError) -> None:
        connection, self._connection = self._connection, None
        under_way = [] if connection is None else connection.under_way
        try:
            if connection is not None:
                connection.abort(str(error))
        except Exception as failure:  # the next update connects anew, whatever is left of this
            error.add_note(f"Letting go of the engines failed, too: {failure!r}")
        finally:
            self._let_go()
            self._requests.abandon(error, under_way)


def connect(
    source: Source,
    engines: Sequence[Any],
    *,
    engine_gpu_offsets: Sequence[int] | None = None,
    api_key: str | None = None,
    options: Options | None = None,
) -> Sync:
    """Connects a trainer's weights to running engines.

    Args:
        source: this rank's layout (`wsync.megatron.layout`, `wsync.fsdp.layout`), or whole tensors
            by Hugging Face name.
        engines: a list of URLs, Ray actors, local engines or handles; read only on rank 0.
        engine_gpu_offsets: see `Sync`; without it, workers are spread over the ranks of the first
            rank's host.
        api_key: bearer key of engines that are given as URLs.
        options: deadlines, ways of delivery, round size, pause mode.

    Returns:
        A `Sync`; `update(version=...)` replaces every weight of every engine.

    Raises:
        InvalidArgumentError, UnsupportedError: something that is no engine or is given twice, or a
            tensor that cannot be sent.
        PeerClosedError, DeadlineError: an engine does not answer; the same on every rank.
        LayoutError: the trainer ranks' layouts disagree.
        InvalidArgumentError: an engine says that it holds weights in another form than it is sent.
    """
    chosen = Options.of(options)
    handles = functools.partial(handles_of, engines, timeout=chosen.deadline, api_key=api_key)
    return Sync(source, handles, engine_gpu_offsets=engine_gpu_offsets, options=chosen)
