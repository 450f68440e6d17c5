"""The base class of all updates, however the bytes move: trainer ranks that act together."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import operator
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from tqdm import TqdmWarning, tqdm

from wsync import _core
from wsync.exchange.trainer_group import TrainerGroup, together
from wsync.layout import TrainerLayout, from_tensors
from wsync.machine.error_text import error_text
from wsync.machine.fork_guard import Owner
from wsync.module_tensors.names import listed
from wsync.options import Options
from wsync.report import Report, counted
from wsync.trainer.prometheus import Exporter
from wsync.trainer.quantise_option import quantise_rules
from wsync.trainer.quantised_image import Image
from wsync.trainer.requests import EngineRequests

if TYPE_CHECKING:
    Source = TrainerLayout | Mapping[str, torch.Tensor]
    Weights = Mapping[str, torch.Tensor]

with warnings.catch_warnings():  # it warns if ipywidgets is missing
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm as progress_bar

_log = logging.getLogger("wsync")
_SHARED_OPTIONS = (  # the same on all ranks, so that ranks plan alike and meet
    *("exchange", "broadcast", "backend", "quantise", "park", "stage", "lost", "verify"),
    *("round_nbytes", "ring_nbytes", "bucket_nbytes"),
)
_MEET_SECONDS = 30.0  # for all ranks to leave a failed update
_MOST_THREADS = 16  # more threads would only wait for memory
_VERSION = re.compile(r"[ -~]{1,128}")


class Updates(abc.ABC):
    """Runs one update after another.  All trainer ranks call its methods together."""

    def __init__(self, source: Source, options: Options | None) -> None:
        self.version = 0
        self.options = Options.of(options)
        timeout = self.options.exchange_deadline
        if not isinstance(source, TrainerLayout):
            made_of = source
            source = together(lambda: from_tensors(made_of), timeout=timeout)
        self._source = source
        self._layout = self._source.layout  # of what this rank delivers
        self._image: Image | None = None  # codes and scales, if weights are quantised
        self._updates = 0  # calls of update() so far; the number identifies an update
        self._next_version = 1
        self._requests = EngineRequests([], self.options)
        self._exporter: Exporter | None = None  # of metrics, on rank 0
        self._warned: set[str] = set()
        self._owner = Owner()
        self._closed = False
        self._busy = threading.Lock()
        self._group = TrainerGroup(self._source.group, timeout=timeout)
        self._meeting = self._group.name

    def close(self) -> None:
        """Releases the other ranks, the trainer's weights, and all memory and sockets.  Engines
        keep the weights they have.  In a process that was forked from the one that made this
        object, `close` does nothing.

        Raises:
            StateError: an update is running; it goes on.
        """
        if not self._owner:
            return  # process groups stay, too: to close them, it would need their threads
        with self._turn("close"):
            self._close()

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """Wraps a call that must run alone; raises StateError if another call is under way."""
        if not self._busy.acquire(blocking=False):
            raise _core.StateError(
                f"{what}: an update of this connection is under way, in another thread or around "
                "this call: wait until it has ended"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _close(self) -> None:
        self._closed = True
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._forget)
            if self._image is not None:
                last_first.callback(self._image.close)
            last_first.callback(self._group.close)

    def _forget(self) -> None:
        """Releases the trainer's weights, even if this object is kept."""
        self._source = dataclasses.replace(self._source, tensors=tuple, pick=None)

    def _same_call(self, **arguments: object) -> None:
        """Raises InvalidArgumentError if ranks make different objects at the same time, or differ
        in arguments or options that must be the same on all ranks, because they would not meet."""
        arguments |= {name: getattr(self.options, name) for name in _SHARED_OPTIONS}
        mine = f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in arguments.items())})"
        said = self._group.gather_json(mine)
        if other := next((rank for rank, text in enumerate(said) if text != said[0]), 0):
            raise _core.InvalidArgumentError(
                "trainer ranks must make the same thing together: rank 0 makes "
                f"{said[0]}, rank {other} makes {said[other]}"
            )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self.version}"
        tensors = counted(self._layout.tensor_count, "tensor")
        return (
            f"<{type(self).__name__} {state}: rank {self._group.rank} of {self._group.size} with "
            f"{tensors}; {self.reached or 'no engines'}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abc.abstractmethod
    def ways(self) -> dict[str, list[str]]:
        """The engines' names under each way of delivery, in words; on rank 0."""

    @property
    def reached(self) -> str:
        """`ways` as one text; "" if there are no engines."""
        return "; ".join(f"{', '.join(names)} by {way}" for way, names in self.ways.items())

    @abc.abstractmethod
    def _abandon(self, error: _core.WsyncError) -> None:
        """Drops all state that an error has left uncertain."""

    @abc.abstractmethod
    def _check_engines(self, model: _core.Layout) -> None:
        """Compares what all ranks hold with engines and checkpoints; called on rank 0."""

    def _given(self, weights: Weights | Callable[[], Weights] | None) -> Weights | None:
        """The `weights` of update(); if they are a function, what it returns."""
        if not callable(weights) or isinstance(weights, torch.nn.Module):
            return cast("Weights | None", weights)  # a module is refused later: it is no mapping
        try:
            given: Weights | None = weights()
        except StopIteration as error:  # contextlib would not convert it
            raise _core.RemoteError(error_text(error)) from error
        if given is None:
            raise _core.InvalidArgumentError(
                "weights: the function returned None; expected tensors by global name"
            )
        return given

    def _gather(self) -> _core.Layout:
        """Merges what all ranks deliver into one layout.

        Raises InvalidArgumentError if this rank's layout was made for another rank or another
        number of ranks, or if no rank has an element, because an update would send wrong bytes or
        none."""
        source, rank, size = self._source, self._group.rank, self._group.size
        if (source.rank, source.ranks) != (rank, size):
            raise _core.InvalidArgumentError(
                f"the layout is of rank {source.rank} of {source.ranks}, but this is rank {rank} "
                f"of {size}: make the layout where torch.distributed runs, with the updates' group"
            )
        model = self._merged()
        if not model.nbytes:
            raise _core.InvalidArgumentError(
                "there is nothing to send: the trainer ranks have "
                f"{counted(model.tensor_count, 'tensor')} with 0 elements in all"
            )
        if rank == 0:
            self._check_engines(model)
        quantised = None
        if self.options.quantise is not None:  # rank 0 sees the checkpoint
            told = quantise_rules(model, self.options) if rank == 0 else None
            quantised = self._group.gather_json(told)[0]
        if quantised is None:
            return model
        rules: list[_core.QuantiseRule] = [tuple(rule) for rule in quantised]
        # weights are quantised before anything else uses this rank's share of the host's cores
        self._image = Image(model, rank, len(source.names), rules, self._all_threads)
        self._layout = self._image.layout
        return self._merged()

    @property
    def _all_threads(self) -> int:
        """The threads of a step that uses this rank's whole share of the host's cores."""
        hosts = self._group.hosts
        share = len(os.sched_getaffinity(0)) // hosts.count(hosts[self._group.rank])
        return max(self.options.threads, 1, min(share, _MOST_THREADS))

    def _merged(self) -> _core.Layout:
        """All ranks' layouts in one."""
        parts = self._group.all_gather(self._layout.to_bytes())
        return _core.Layout.merge([_core.Layout.from_bytes(part) for part in parts])

    def _bind(
        self, weights: Weights | None, report: Report, former: _core.TensorTable | None = None
    ) -> _core.TensorTable:
        """The current tensors of this rank's buffers; `former` if they are those of this earlier
        table.  Codes and scales are made anew."""
        table = self._source.bind(weights, former if self._image is None else None)
        if self._image is None:
            return table
        self._image.describe(report)
        with report.phase("quantise"):
            return self._image.fill(table, self._group, self.options.deadline)

    @contextlib.contextmanager
    def _running(self, call: str) -> Iterator[None]:
        """Wraps a public call that updates engines."""
        self._owner.check(call)
        with self._turn(call):
            if self._closed:
                raise _core.StateError("this connection was closed: connect again")
            try:
                yield
            except BaseException:
                if self._exporter is not None:
                    self._exporter.fail(call)
                raise

    @contextlib.contextmanager
    def _attempt(
        self,
        report: Report,
        version: int | str | None,
        weights: object,
        look: Callable[[], tuple[int, int, dict[str, str]]] = lambda: (0, 0, {}),
    ) -> Iterator[bool]:
        """Wraps one attempt at an update, or its first part, in which ranks agree.  Yields whether
        all ranks know rank 0's engines.

        weights: what the caller gave.  look: returns a number of the engines that this rank knows;
        on rank 0 also the number of those that the update reaches, and the engines that it goes
        without, with reasons."""
        self._updates += 1  # first: what follows may fail on this rank only
        self._renew()
        with self._one_error(report):
            given = weights is not None if self._source.names else None
            text, same, lost = self._agree(version, given, *look())
            report.version, report.lost, report.staged = text, lost, False
            self._next_version = int(text) if text.isdecimal() else self.version + 1
            yield same

    def _end(self, report: Report) -> None:
        """Ends an update that has succeeded on all ranks."""
        self._use_up_version()
        report.ways = self.ways
        report.paused = self._requests.pauses
        if self._group.rank == 0:
            with contextlib.suppress(Exception):  # of a log handler: the update has succeeded
                self._log_update(report)
                if self._exporter is not None:
                    self._exporter.end(report)

    def _export(self) -> None:
        """Begins to keep metrics, if that is wanted; called on rank 0."""
        if self.options.prometheus:
            self._exporter = Exporter(self.options.prometheus)

    def _agree(
        self, version: object, given: bool | None, known: int, newest: int, lost: dict[str, str]
    ) -> tuple[str, bool, dict[str, str]]:
        """Returns the version of an update, whether all ranks know rank 0's engines, and rank 0's
        lost engines; the same on all ranks.  If a rank gives no version, it is one more than the
        last version of any rank, because some rank may have missed the end of the last update.

        given: whether the caller gave weights on this rank; None if this rank has no parameters.

        Raises:
            InvalidArgumentError: ranks give different versions; or only some ranks were given
                weights, and the others would send older ones.
            StateError: ranks have called update() different numbers of times and not all give a
                version, so that one of them may be in another step than the others.
        """
        text = None if version is None else version_text(version)
        mine = [self.version, text, given, self._updates, known, newest, lost]
        told = self._group.gather_json(mine)
        counts, texts, givens, called, fleets, (newest, *_), losts = zip(*told, strict=True)
        if None in texts and len(set(called)) > 1:
            raise _core.StateError(
                f"trainer ranks have called update() different numbers of times ({list(called)}, "
                "by rank): a call has failed on some ranks only, so their weights may come from "
                "different steps; give version= on all ranks, or connect anew"
            )
        meant = [str(max(counts) + 1) if text is None else text for text in texts]
        if len(set(meant)) > 1:
            raise _core.InvalidArgumentError(f"trainer ranks give different versions: {meant}")
        if True in givens and False in givens:
            raise _core.InvalidArgumentError(
                f"trainer rank {givens.index(True)} gives weights to update(), and rank "
                f"{givens.index(False)} does not"
            )
        self._updates = max(called)
        return meant[0], {*fleets} == {newest}, losts[0]

    def _log_update(self, report: Report) -> None:
        """Logs one line for each update.  Warns once of anything that makes updates slower."""
        _log.info("wsync: %s", "; ".join(filter(None, [str(report), self.reached])))
        if report.unused:
            names = listed(report.unused)
            self._warn(f"no engine uses {names}: these tensors are not delivered")
        for engine, reason in report.own_loading.items():
            self._warn(
                f"engine {engine} gets every weight, but some by its own load_weights, which takes "
                f"longer than wsync's copies: {reason} (wsync can replace slices, transposes, "
                "casts and other copies)"
            )

    def _warn(self, text: str) -> None:
        """Logs a warning, unless this connection has logged it before."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("wsync: %s", text)

    def _use_up_version(self) -> None:
        """Marks the version as used, because engines know it or are about to.  No later update may
        use it again."""
        self.version = self._next_version

    def _renew(self) -> None:
        """Makes a new group after a failure, because a collective of the old group may be stuck.
        The failure may have happened on another rank only, at the very end of an update.  Only
        ranks of this connection meet in the new group, because another connection of the same ranks
        may renew its group at the same time."""
        if not self._group.begin():
            self._group.close()
            self._abandon(_core.RemoteError("another trainer rank has given up the connection"))
            timeout = self.options.exchange_deadline
            self._group = TrainerGroup(self._source.group, timeout=timeout, meeting=self._meeting)
            self._group.begin()

    def _after_failure(self, decide: Callable[[], bool]) -> bool:
        """Returns what `decide` returns on rank 0, when the attempt has failed on all ranks.
        Returns False if a rank has ended, or if the attempt may have succeeded on some rank, whose
        next weights would meet this rank's old ones."""
        if self._group.ended():
            return False
        timeout = min(_MEET_SECONDS, self.options.exchange_deadline)
        meeting = f"{self._meeting}, after update {self._updates}"
        try:
            group = TrainerGroup(self._source.group, timeout=timeout, meeting=meeting)
            with contextlib.closing(group):
                return bool(group.gather_json(decide() if group.rank == 0 else None)[0])
        except _core.WsyncError:
            return False

    @contextlib.contextmanager
    def _one_error(self, report: Report | None = None) -> Iterator[None]:
        """If any rank raises an error in the block, raises it on every rank.  Its `__cause__` is
        this rank's own error.  The block's seconds are added to the report."""
        start = time.perf_counter()
        try:
            try:
                yield
            finally:
                if self._image is not None and self.options.park:
                    self._image.park()
                if report is not None:
                    report.seconds += time.perf_counter() - start
        except BaseException as error:
            first: _core.WsyncError = _core.RemoteError(
                "this rank gave up the call before it could tell the other ranks why"
            )
            try:
                try:
                    first = self._group.fail(error)
                finally:
                    try:
                        self._abandon(first)
                    finally:
                        self._group.close()
                if first is error:
                    raise
                if not isinstance(error, Exception):  # Ctrl-C
                    for note in getattr(first, "__notes__", ()):  # what stays paused
                        _log.warning("wsync: %s", note)
                    raise
                raise first from error
            finally:
                del first  # its traceback holds this frame, and so the update's objects

    def _progress(self, report: Report, total: int, *, doing: str = "", **unit: Any) -> tqdm[None]:
        """A progress bar, shown only on rank 0 and as options say; `unit` says what it counts."""
        wanted, where = self.options.progress, sys.stderr
        # a daemon may have no stderr, and a logger may replace it
        can = hasattr(where, "write") and not getattr(where, "closed", False)
        hidden = not can or self._group.rank != 0 or wanted is False
        text = f"weights v{report.version}{doing}"
        disable = hidden or (None if wanted is None else False)
        return progress_bar(total=total, desc=text, leave=False, disable=disable, **unit)


def version_text(version: object) -> str:
    """A weight version as engines record it."""
    if hasattr(version, "__index__") and not isinstance(version, bool):
        version = operator.index(version)  # also an enum's or numpy's
    if type(version) is int and 0 <= version < 10**128:
        return str(version)
    if isinstance(version, str) and _VERSION.fullmatch(version):
        return version
    raise _core.InvalidArgumentError(
        f"version={version!r}: neither a number from 0 nor 1 to 128 printable characters"
    )
