"""A connection whose workers copy out of the trainer's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.exchange.trainer_group import TrainerGroup
from wsync.handles.base import EngineHandle
from wsync.machine.deadline import Check, Deadline
from wsync.messages.control import PIECES, WHOLE
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.connection import Connection
from wsync.trainer.lending import Borrower, Lender, Lending
from wsync.trainer.planning import Planning
from wsync.trainer.roster import PlanWorker, Roster
from wsync.trainer.sessions.base import Session
from wsync.trainer.sessions.direct import DirectSession

if TYPE_CHECKING:
    from tqdm import tqdm


class DirectConnection(Connection):
    """No rank copies anything: a worker has one list of copies from the memory of all ranks of its
    host to its own parameters, and runs it when it is told to.  Until it has said that it is done,
    the ranks' weights have to stay as they are.

    lender: of this rank's memory.
    """

    def __init__(
        self,
        group: TrainerGroup,
        roster: Roster,
        engines: Sequence[EngineHandle],
        options: Options,
        gpu: str,
        lock: Any = None,
        *,
        lender: Lender,
    ) -> None:
        super().__init__(group, roster, engines, options, gpu, lock)
        homes = sorted({worker.served_by for worker in roster.workers})
        self._lending = Lending(group, lender, homes, options)
        self._update = 0

    def _session(self, number: int, worker: PlanWorker, engines: Sequence[EngineHandle]) -> Session:
        return DirectSession(
            number,
            engine=self._roster.engines[worker.engine].name,
            index=worker.index,
            directory=self._options.directory,
        )

    @property
    def _workers(self) -> list[DirectSession]:
        return [session for session in self._sessions if isinstance(session, DirectSession)]

    def _arrange(
        self, planning: Planning, layouts: list[bytes], device: _core.Device, check: Check
    ) -> _core.Plan:
        """The plan is what a ring would be filled by: it says what is delivered, and that every
        byte can be."""
        self._check(layouts, device)
        plan = planning.plan(layouts, device)
        model = self._roster.model
        counts = (model.buffer_count(rank) for rank in range(self._group.size))
        offsets = list(accumulate(counts, initial=0))
        deadline = Deadline(self._options.deadline)
        for session in self._workers:
            layout = layouts[session.worker]
            wanted = None if layout == PIECES else _core.Layout.from_bytes(layout)
            session.serve(Borrower(model.join(wanted), offsets))
            session.attach(plan, device, deadline.left, check)
        return plan

    def _check(self, layouts: list[bytes], device: _core.Device) -> None:
        """Raises UnsupportedError for a worker that cannot copy for itself."""
        if device.ordinal >= 0:
            raise _core.UnsupportedError(
                f"delivery='direct': workers are on {device!r}, and GPUs do not read what is lent "
                "yet; any other delivery brings them their weights"
            )
        for number, layout in enumerate(layouts):
            if layout == WHOLE:
                worker = self._roster.workers[number]
                raise _core.UnsupportedError(
                    f"delivery='direct': worker {worker.index} of engine "
                    f"{self._roster.engines[worker.engine].name} takes whole tensors, which its "
                    "load_weights loads; any other delivery brings them"
                )

    def start(
        self, update: int, sources: _core.BufferTable, check: Check, report: Report
    ) -> _core.BufferTable | None:
        """Nothing can be done before the workers have joined."""
        self._update = update
        return None

    def run(
        self,
        sources: _core.BufferTable,
        messages: _core.BufferTable | None,
        check: Check,
        report: Report,
        bar: tqdm[None],
    ) -> None:
        """Has the workers copy, and waits until they have."""
        stream, timeout = self._stream, self._options.deadline
        assert stream is not None
        with report.phase("open"):
            news = self._lending.share()
            for session in self._workers:
                session.lend(self._lending, news, timeout, check)
                session.begin(self._update, report.version, timeout, check)
        for session in self._workers:
            session.post(0, stream, timeout, check)
        with report.phase("engine"):
            for session in self._workers:
                session.wait(0, timeout, check)
        self._show(1, bar)

    def describe(self, report: Report) -> None:
        super().describe(report)
        report.rounds, report.sent_nbytes = 1, 0
        report.paths = dict.fromkeys(report.paths, "direct")
