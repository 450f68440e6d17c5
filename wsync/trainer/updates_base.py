"""What updates have in common, whichever way the bytes go: ranks that act together."""

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
from wsync.machine.host import host_identity
from wsync.module_tensors.names import listed
from wsync.options import Options
from wsync.report import Report, counted
from wsync.trainer.quantise_option import quantise_rules
from wsync.trainer.quantised_image import Image
from wsync.trainer.requests import EngineRequests

if TYPE_CHECKING:
    Source = TrainerLayout | Mapping[str, torch.Tensor]
    Weights = Mapping[str, torch.Tensor]

with warnings.catch_warnings():  # nobody has asked for bars, which ipywidgets makes nicer
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm as progress_bar

_log = logging.getLogger("wsync")
_SHARED_OPTIONS = (  # by which ranks plan and meet
    *("exchange", "broadcast", "backend", "quantise", "park"),
    *("round_nbytes", "ring_nbytes", "bucket_nbytes"),
)
_MOST_THREADS = 16  # more than memory can feed
_VERSION = re.compile(r"[ -~]{1,128}")


class Updates(abc.ABC):
    """One update after another of all trainer ranks, which call its methods together."""

    def __init__(self, source: Source, options: Options | None) -> None:
        self.version = 0
        self.options = Options.of(options)
        timeout = self.options.exchange_deadline
        if not isinstance(source, TrainerLayout):
            made_of = source
            source = together(lambda: from_tensors(made_of), timeout=timeout)
        self._source = source
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
        arguments |= {name: getattr(self.options, name) for name in _SHARED_OPTIONS}
        mine = f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in arguments.items())})"
        said = self._group.gather_json(mine)
        if other := next((rank for rank, text in enumerate(said) if text != said[0]), 0):
            raise _core.InvalidArgumentError(
                "trainer ranks have to make the same thing together: rank 0 makes "
                f"{said[0]}, rank {other} {said[other]}"
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
        if not callable(weights) or isinstance(weights, torch.nn.Module):
            return cast("Weights | None", weights)  # a module is refused as what is no mapping
        try:
            given: Weights | None = weights()
        except StopIteration as error:  # which a generator of contextlib's would let pass as it is
            raise _core.RemoteError(error_text(error)) from error
        if given is None:
            raise _core.InvalidArgumentError(
                "weights: the function returned None, where tensors by global name are wanted"
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
        model = self._merged()
        if not model.nbytes:
            raise _core.InvalidArgumentError(
                f"no trainer rank has an element to send: {counted(model.tensor_count, 'tensor')}"
            )
        if rank == 0:
            self._check_engines(model)
        quantised = None
        if self.options.quantise is not None:  # as rank 0 says, which sees the checkpoint
            told = quantise_rules(model, self.options) if rank == 0 else None
            quantised = self._group.gather_json(told)[0]
        if quantised is None:
            return model
        hosts = self._group.gather_json(host_identity())
        # before an update begins nothing else wants this rank's share of the host's cores
        share = len(os.sched_getaffinity(0)) // hosts.count(hosts[rank])
        threads = max(self.options.threads, 1, min(share, _MOST_THREADS))
        rules: list[_core.QuantiseRule] = [tuple(rule) for rule in quantised]
        self._image = Image(model, rank, len(source.names), rules, threads)
        self._layout = self._image.layout
        return self._merged()

    def _merged(self) -> _core.Layout:
        """All ranks' layouts in one."""
        parts = self._group.all_gather(self._layout.to_bytes())
        return _core.Layout.merge([_core.Layout.from_bytes(part) for part in parts])

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
                text = self._agree(version, given)
                report = Report(version=text)
                self._next_version = int(text) if text.isdecimal() else self.version + 1
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

    def _agree(self, version: object, given: bool | None) -> str:
        """The version that all ranks mean.  Where they leave it open it is one more than any has
        counted: a rank may have missed the very end of an update that the others have seen.

        given: whether this rank was given weights, None where it has none.

        Raises:
            InvalidArgumentError: ranks mean different versions, or only some were given weights:
                the others would send weights of another time.
            StateError: ranks have called update() different numbers of times, and not all say
                which version they mean: one of them is in another step than the others.
        """
        text = None if version is None else version_text(version)
        told = self._group.gather_json([self.version, text, given, self._updates])
        counts, texts, givens, called = zip(*told, strict=True)
        if None in texts and len(set(called)) > 1:
            raise _core.StateError(
                f"trainer ranks have called update() {list(called)} times: one has failed alone, "
                "and their weights may be of different steps; say version= on all ranks, or "
                "connect anew"
            )
        meant = [str(max(counts) + 1) if text is None else text for text in texts]
        if len(set(meant)) > 1:
            raise _core.InvalidArgumentError(f"trainer ranks want different versions: {meant}")
        if True in givens and False in givens:
            raise _core.InvalidArgumentError(
                f"trainer rank {givens.index(True)} gives weights to update(), and rank "
                f"{givens.index(False)} does not"
            )
        self._updates = max(called)
        return meant[0]

    def _log_update(self, report: Report) -> None:
        """One line an update; and once, what made it slower and could be changed."""
        _log.info("wsync: %s", "; ".join(filter(None, [str(report), self.reached])))
        if report.unused:
            names = listed(report.unused)
            self._warn(
                f"no engine makes use of {names}: what the trainer has there is not delivered"
            )
        for engine, reason in report.own_loading.items():
            self._warn(
                f"engine {engine} gets every weight, but by its own load_weights, which takes "
                f"longer than wsync's copies: {reason} (what it only copies, as slices, transposes "
                "and casts, is learnt)"
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
        wanted, where = self.options.progress, sys.stderr
        # a daemon may have none, and a logger may take its place
        can = hasattr(where, "write") and not getattr(where, "closed", False)
        hidden = not can or self._group.rank != 0 or wanted is False
        text = f"weights v{report.version}{doing}"
        disable = hidden or (None if wanted is None else False)
        return progress_bar(total=total, desc=text, leave=False, disable=disable, **unit)


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
