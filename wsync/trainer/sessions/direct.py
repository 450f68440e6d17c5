"""Sessions with workers that read the memory of trainer ranks in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from wsync import _core
from wsync.machine.deadline import Check, Deadline
from wsync.trainer.lending import Lending, Segment, buffers_of
from wsync.trainer.sessions.base import Span
from wsync.trainer.sessions.worker import WorkerSession

_BINDING: Final = struct.Struct("=QQQ")  # wsync_binding_t of csrc/ipc/session.h
_UNBOUND: Final = _BINDING.pack(2**64 - 1, 0, 0)


class DirectSession(WorkerSession):
    """A worker on this host that may map what the ranks lend and copy out of it.

    What it cannot read there comes through its ring, which may carry no data.  Round 0 says that
    the weights may be read, and its end that they have been.
    """

    def __init__(self, worker: int, *, lending: Lending, **known: Any) -> None:
        super().__init__(worker, **known)
        self._lending = lending
        self._told = -1  # `Lending.news` when the worker was last told
        self._joined: _core.Layout | None = None  # what it reads in place
        self._buffers: list[tuple[int, int, int]] = []  # of that: the rank, and the number there
        self._count = 0  # of all ranks' buffers
        self._lent: dict[Segment, int] = {}  # the worker's numbers for them
        self._manifest: _core.Layout | None = None

    def serve(self, joined: _core.Layout, offsets: Sequence[int]) -> None:
        """Sets what the worker reads in place (`Layout.join`); called before `attach`.  offsets:
        the number of the first buffer of each rank there, and their end."""
        self._joined, self._count, used = joined, offsets[-1], buffers_of(joined)
        self._buffers = [
            (number, rank, number - first)
            for rank, (first, end) in enumerate(pairwise(offsets))
            for number in range(first, end)
            if number in used
        ]

    @property
    def round_count(self) -> int:
        return max(super().round_count, 0 if self._joined is None else 1)

    @property
    def manifest(self) -> _core.Layout:
        assert self._manifest is not None
        return self._manifest

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """The worker loads what it reads in place, and then what its rounds bring."""
        self._manifest = plan.manifest(self.worker)
        if self._joined is not None:
            self._manifest = self._joined.beside(self._manifest, self._count)
        span = super().attach(plan, device, timeout, check)
        return span if plan.ring_nbytes(self.worker) else (0, 0)

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        """Also tells the worker where the weights lie, if that has changed since it was told."""
        with self._naming():
            if self._joined is not None and self._told != self._lending.news:
                self._lend(timeout, check)
                self._told = self._lending.news
            self._exporter.begin(update, self.round_count, timeout, check)

    def _lend(self, timeout: float, check: Check) -> None:
        """Has the worker map what is new, and let go of what it no longer reads."""
        assert isinstance(self._exporter, _core.Exporter)
        deadline = Deadline(timeout)
        table, used = [_UNBOUND] * self._count, dict[Segment, int]()
        for number, rank, buffer in self._buffers:
            place = self._lending.places[rank][buffer]
            if place is None:
                continue
            segment = (rank, place.segment)
            if segment not in used:
                known = self._lent.get(segment)
                if known is None:
                    memory = self._lending.segments[segment]
                    known = self._exporter.lend(memory, deadline.left, check)
                used[segment] = known
            table[number] = _BINDING.pack(used[segment], place.offset, place.nbytes)
        self._exporter.bind(b"".join(table), deadline.left, check)
        self._lent = used

    def park(self, timeout: float, check: Check) -> None:
        """Waits, too, until the worker has let go of all that was lent to it."""
        super().park(timeout, check)
        if self._park and self._joined is not None:
            self._lent, self._told = {}, -1
