"""What updates have in common, whichever way the bytes go: ranks that act together."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
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

from tqdm import TqdmWarning

from wsync import _core
from wsync.exchange.trainer_group import TrainerGroup, together
from wsync.layout import TrainerLayout, from_tensors
from wsync.machine.error_text import error_text
from wsync.machine.fork_guard import Owner
from wsync.machine.host import host_identity
from wsync.options import Options
from wsync.report import Report, counted
from wsync.trainer.quantise_option import quantise_rules
from wsync.trainer.quantised_image import Image
from wsync.trainer.requests import EngineRequests

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm

    Source = TrainerLayout | Mapping[str, torch.Tensor]
    Weights = Mapping[str, torch.Tensor]

_log = logging.getLogger("wsync")
_MOST_THREADS = 16  # more than memory can feed
_NOTABLE_SECONDS = 10.0
_VERSION = re.compile(r"[ -~]{1,128}")


class Updates(abc.ABC):
    """One update after another of all trainer ranks, which call its methods together."""

    def __init__(self, source: Source, options: Options | None) -> None:
        self.version = 0
        self.options = Options.of(options)
        timeout = self.options.exchange_deadline
        self._source = (
            source
            if isinstance(source, TrainerLayout)
            else together(lambda: from_tensors(source), timeout=timeout)
        )
        self._layout = self._source.layout  # of what this rank has to give
        self._image: Image | None = None  # of codes and scales, where weights are quantised
        self._updates = 0  # calls of update() since this was made; their number names each
        self._next_version = 1
        self._requests = EngineRequests([], self.options)
        self._warned: set[str] = set()
        self._owner = Owner()
        self._closed = False
        self._busy = threading.Lock()
        self._group = TrainerGroup(self._source.group, timeout=timeout)
        self._meeting = self._group.name

    def close(self) -> None:
        """Lets go of the other ranks, the trainer's weights, and all memory and sockets.  Engines
        keep the weights they have.  In a process that was forked from the one that made this,
        nothing happens.

        Raises:
            StateError: while an update runs, which goes on.
        """
        if not self._owner:
            return  # and what process groups there are stays: their ends wait for threads
        with self._turn("close"):
            self._close()

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """Around a call that has to run alone.  StateError while another is under way."""
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
        """Lets go of what the weights are read from, however long this object is kept."""
        self._source = dataclasses.replace(self._source, tensors=tuple, pick=None)

    def _same_call(self, **arguments: object) -> None:
        """Raises InvalidArgumentError if ranks make different objects at the same time, differ in
        arguments that have to be the same on all ranks, or have options that move bytes in
        different ways: they would not meet."""
        options, ways = self.options, ("exchange", "broadcast", "backend", "quantise", "park")
        arguments = {name: getattr(options, name) for name in ways} | arguments
        mine = [type(self).__name__, *(f"{name}={value!r}" for name, value in arguments.items())]
        for meant in zip(*self._group.gather_json(mine), strict=False):  # the type comes first
            if len(set(meant)) > 1:
                each = ", ".join(
                    f"{one} on ranks {[rank for rank, other in enumerate(meant) if other == one]}"
                    for one in dict.fromkeys(meant)
                )
                raise _core.InvalidArgumentError(
                    f"trainer ranks have to make the same thing together: {each}"
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
        """The engines' names, by the way that their weights take, in words; on rank 0."""

    @property
    def reached(self) -> str:
        """The same, for a person to read; "" without engines."""
        return "; ".join(f"{', '.join(names)} by {way}" for way, names in self.ways.items())

    @abc.abstractmethod
    def _abandon(self, error: _core.WsyncError) -> None:
        """Drops everything that an error leaves in doubt."""

    @abc.abstractmethod
    def _check_engines(self, model: _core.Layout) -> None:
        """Compares what all ranks hold with what engines hold, and with checkpoints, on rank 0."""

    def _given(self, weights: Weights | Callable[[], Weights] | None) -> Weights | None:
        """What a caller of update() means by `weights`."""
        import torch

        if not callable(weights) or isinstance(weights, torch.nn.Module):
            return cast("Weights | None", weights)  # a module is refused as what is no mapping
        try:
            given: Weights | None = weights()
        except StopIteration as error:  # which a generator of contextlib's would let pass as it is
            raise _core.RemoteError(error_text(error)) from error
        if given is None:
            raise _core.InvalidArgumentError(
                "weights: the function returned None, where tensors by global name are wanted; "
                "without a function, the tensors of the layout are sent"
            )
        return given

    def _gather(self) -> _core.Layout:
        """What all ranks have to deliver, in one layout.  Raises InvalidArgumentError if this
        rank's layout was made for another rank or another number of ranks: buffers would be looked
        for on others, or be left out.  Also if no rank has an element: an engine would be sent
        nothing, and be called updated."""
        source, rank, size = self._source, self._group.rank, self._group.size
        if (source.rank, source.ranks) != (rank, size):
            raise _core.InvalidArgumentError(
                f"the layout is of rank {source.rank} of {source.ranks}, but this is rank {rank} "
                f"of {size}: make it where torch.distributed runs, with the group of the updates"
            )
        for other in range(source.layout.rank_count):
            if other != rank and source.layout.buffer_count(other):
                raise _core.InvalidArgumentError(
                    f"the layout has tensors of rank {other}, but this is rank {rank} of {size}"
                )
        model = self._merged()
        if not model.nbytes:
            raise _core.InvalidArgumentError(
                f"no trainer rank has an element to send: {counted(model.tensor_count, 'tensor')}"
            )
        if rank == 0:
            self._check_engines(model)
        rules = self._rules(model)
        if rules is None:
            return model
        hosts = self._group.gather_json(host_identity())
        # before an update begins nothing else wants this rank's share of the host's cores
        share = len(os.sched_getaffinity(0)) // hosts.count(hosts[rank])
        threads = max(self.options.threads, 1, min(share, _MOST_THREADS))
        self._image = Image(model, rank, len(source.names), rules, threads)
        self._layout = self._image.layout
        return self._merged()

    def _merged(self) -> _core.Layout:
        """All ranks' layouts in one."""
        parts = self._group.all_gather(self._layout.to_bytes())
        return _core.Layout.merge([_core.Layout.from_bytes(part) for part in parts])

    def _rules(self, model: _core.Layout) -> list[_core.QuantiseRule] | None:
        """What is quantised of the tensors of all ranks, and into what; None where weights stay as
        they are.  Every rank gets the answer of rank 0, which sees the checkpoint."""
        if self.options.quantise is None:
            return None
        rules = quantise_rules(model, self.options) if self._group.rank == 0 else None
        found = self._group.gather_json(rules)[0]
        return None if found is None else [tuple(rule) for rule in found]

    def _bind(self, weights: Weights | None, report: Report) -> _core.TensorTable:
        """What the buffers of this rank stand for now; codes and scales are made anew."""
        table = self._source.bind(weights)
        if self._image is None:
            return table
        self._image.describe(report)
        with report.phase("quantise"):
            return self._image.fill(table, self._group, self.options.deadline)

    @contextlib.contextmanager
    def _updating(self, version: int | str | None, weights: object) -> Iterator[Report]:
        """One update at a time: the block fills in its report.  weights: what the caller gave."""
        self._owner.check("update")
        with self._turn("update"):
            if self._closed:
                raise _core.StateError("update after close: connect anew")
            self._updates += 1  # before anything can fail here that others do not hear of
            start = time.perf_counter()
            self._renew()
            with self._one_error():
                given = weights is not None if self._source.names else None
                text, self._updates = agree(
                    self._group, version, self.version, given, self._updates
                )
                report = Report(version=text)
                self._next_version = self.version + 1
                if report.version.isdecimal():
                    self._next_version = int(report.version)
                try:
                    yield report
                finally:
                    if self._image is not None and self.options.park:
                        self._image.park()
            report.seconds = time.perf_counter() - start
            self._use_up_version()
            report.ways = self.ways
            if self._group.rank == 0:
                with contextlib.suppress(Exception):  # a handler's: the update has succeeded
                    self._log_update(report)

    def _log_update(self, report: Report) -> None:
        """One line an update; and once, what made it slower and could be changed."""
        _log.info("wsync: %s", "; ".join(filter(None, [str(report), self.reached])))
        for engine, reason in report.own_loading.items():
            self._warn(
                f"engine {engine} gets every weight, but by its own load_weights, which takes "
                f"longer than wsync's copies: {reason} (what it only copies, as slices, transposes "
                "and casts, is learnt)"
            )
        if report.learning_seconds > _NOTABLE_SECONDS:
            self._warn(
                f"engines took {report.learning_seconds:.1f} s of this update to learn what they "
                "keep, as they do for each connection: keep one for all updates"
            )

    def _warn(self, text: str) -> None:
        """Says it unless this connection has said it before."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("wsync: %s", text)

    def _use_up_version(self) -> None:
        """Engines are about to be told of the version, or have been: whatever comes of it, no other
        weights are called the same."""
        self.version = self._next_version

    def _renew(self) -> None:
        """Makes a new group after a failure, even one that only another rank has met at the very
        end of an update: a collective of the old group may be stuck.  Only ranks of this connection
        meet in the new one: another connection of the same ranks may be renewed at the same
        time."""
        if not self._group.begin():
            self._group.close()
            self._abandon(_core.RemoteError("another trainer rank has given up the connection"))
            timeout = self.options.exchange_deadline
            self._group = TrainerGroup(self._source.group, timeout=timeout, meeting=self._meeting)
            self._group.begin()

    @contextlib.contextmanager
    def _one_error(self) -> Iterator[None]:
        """Raises on every rank what any rank raises in the block; the cause is this rank's."""
        try:
            yield
        except BaseException as error:
            first: _core.WsyncError = _core.RemoteError("given up before others were told why")
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
                del first  # its traceback holds this frame, and with it what the update held

    def _progress(self, report: Report, total: int, *, doing: str = "", **unit: Any) -> tqdm[None]:
        """A bar on rank 0, where it is wanted; `unit` says what it counts."""
        wanted = self.options.progress
        where = sys.stderr  # a daemon may have none, and a logger may take its place
        can = hasattr(where, "write") and not getattr(where, "closed", False)
        shown = can and self._group.rank == 0 and wanted is not False
        return _bars()(
            total=total,
            desc=f"weights v{report.version}{doing}",
            leave=False,
            disable=(None if wanted is None else False) if shown else True,
            **unit,
        )


@functools.cache
def _bars() -> type[tqdm[None]]:
    """A notebook's bars in a notebook that has ipywidgets, else a terminal's.  Without ipywidgets
    there is no warning: the user may not have asked for bars."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm import auto

    chosen: type[tqdm[None]] = auto.tqdm
    return chosen


def agree(
    group: TrainerGroup, version: object, counted: int, given: bool | None, calls: int
) -> tuple[str, int]:
    """The version that all ranks of a group mean, and the highest number of calls of any.  Where
    they leave the version open it is one more than any has counted: a rank may have missed the very
    end of an update that the others have seen.

    given: whether the rank was given weights, None where it has none.
    calls: of update() by this rank.

    Raises:
        InvalidArgumentError: ranks mean different versions, or only some were given weights: the
            others would send weights of another time.
        StateError: ranks have made different numbers of calls, and not all say which version they
            mean: one of them is in another step than the others.
    """
    text = None if version is None else version_text(version)
    counts, texts, givens, called = zip(
        *group.gather_json([counted, text, given, calls]), strict=True
    )
    if None in texts and len(set(called)) > 1:
        raise _core.StateError(
            f"trainer ranks have called update() {list(called)} times: one has failed alone, and "
            "their weights may be of different steps; say version= on all ranks, or connect anew"
        )
    meant = [str(max(counts) + 1) if text is None else text for text in texts]
    if len(set(meant)) > 1:
        raise _core.InvalidArgumentError(f"trainer ranks want different versions: {meant}")
    giving, lacking = (
        [rank for rank, given in enumerate(givens) if given is wanted] for wanted in (True, False)
    )
    if giving and lacking:
        raise _core.InvalidArgumentError(
            f"trainer ranks {giving} give weights to update(), and {lacking} do not"
        )
    return meant[0], max(called)


def version_text(version: object) -> str:
    """A weight version as engines record it."""
    if hasattr(version, "__index__") and not isinstance(version, bool):
        version = operator.index(version)  # also of an enum's, and numpy's
    if type(version) is int and 0 <= version < 10**128:
        return str(version)
    if isinstance(version, str) and _VERSION.fullmatch(version):
        return version
    raise _core.InvalidArgumentError(
        f"version={version!r}: neither a number from 0 nor 1 to 128 printable characters"
    )
