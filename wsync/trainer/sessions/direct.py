"""Sessions with workers that read the memory of trainer ranks in place."""

from __future__ import annotations

from typing import Any

from wsync import _core
from wsync.machine.deadline import Check
from wsync.trainer.lending import Borrower, Lending
from wsync.trainer.sessions.local import WorkerSession


class DirectSession(WorkerSession):
    """A worker on this host that maps what the ranks lend and copies out of it.

    Its ring is one byte, and an update one round: it says when the weights may be read, and its end
    that they have been.
    """

    def __init__(self, worker: int, **known: Any) -> None:
        super().__init__(worker, **known)
        self._borrower: Borrower | None = None
        self._bound = False

    def serve(self, borrower: Borrower) -> None:
        """What the worker reads; comes before `attach`."""
        self._borrower, self._bound = borrower, False
        self._ring = _core.Memory(1)

    @property
    def manifest(self) -> _core.Layout:
        assert self._borrower is not None
        return self._borrower.manifest

    def _follow(self, plan: _core.Plan) -> None:
        """The plan's rounds are not for it."""

    def lend(self, lending: Lending, news: bool, timeout: float, check: Check) -> None:
        """Tells the worker where the weights lie, if that has changed since it was told."""
        assert self._borrower is not None and isinstance(self._exporter, _core.Exporter)
        if news or not self._bound:
            with self._naming():
                self._borrower.lend(self._exporter, lending, timeout, check)
            self._bound = True

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        with self._naming():
            self._exporter.begin(update, 1, timeout, check)
