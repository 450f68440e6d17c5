"""Sessions with workers that read the memory of trainer ranks in place."""

from __future__ import annotations

from typing import Any

from wsync import _core
from wsync.machine.deadline import Check
from wsync.trainer.lending import Borrower, Lending
from wsync.trainer.sessions.base import Span
from wsync.trainer.sessions.worker import WorkerSession


class DirectSession(WorkerSession):
    """A worker on this host that may map what the ranks lend and copy out of it.

    What it cannot read there comes through its ring, which may carry no data.  Round 0 says that
    the weights may be read, and its end that they have been.
    """

    def __init__(self, worker: int, *, lending: Lending, **known: Any) -> None:
        super().__init__(worker, **known)
        self._lending = lending
        self._told = -1  # `Lending.news` when the worker was last told
        self._borrower: Borrower | None = None
        self._manifest: _core.Layout | None = None

    def serve(self, borrower: Borrower) -> None:
        """Sets what the worker reads in place; called before `attach`."""
        self._borrower = borrower

    @property
    def round_count(self) -> int:
        return max(super().round_count, 0 if self._borrower is None else 1)

    @property
    def manifest(self) -> _core.Layout:
        assert self._manifest is not None
        return self._manifest

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        self._manifest = plan.manifest(self.worker)
        if self._borrower is not None:
            self._manifest = self._borrower.manifest_with(self._manifest)
        span = super().attach(plan, device, timeout, check)
        return span if plan.ring_nbytes(self.worker) else (0, 0)

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        """Also tells the worker where the weights lie, if that has changed since it was told."""
        with self._naming():
            if self._borrower is not None and self._told != self._lending.news:
                assert isinstance(self._exporter, _core.Exporter)
                self._borrower.lend(self._exporter, self._lending, timeout, check)
                self._told = self._lending.news
            self._exporter.begin(update, self.round_count, timeout, check)

    def park(self, timeout: float, check: Check) -> None:
        """Waits, too, until the worker has let go of all that was lent to it."""
        super().park(timeout, check)
        if self._park and self._borrower is not None:
            self._borrower.forget()
            self._told = -1
