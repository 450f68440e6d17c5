"""Requests to all engines at once, which may never return: each is made from a daemon thread."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final

from wsync import _core
from wsync.handles.base import EngineHandle, send_control
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import (
    LATER_SECONDS,
    LEAVE_SECONDS,
    POLL_SECONDS,
    VERDICT_SECONDS,
    Check,
    Deadline,
)
from wsync.messages.control import Control
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.engine_identity import CheckedEngine
from wsync.trainer.first_effect import FirstEffect

_log = logging.getLogger(__name__)

Call = Callable[[int, EngineHandle], object]
UnderWay = list[tuple[str, Future[Any]]]
"""What has been asked of engines, by their names."""


class Calls:
    """One call per engine, each in a daemon thread.

    Args:
        engines: what to call.
        call: is given an engine's index and handle; what it raises is raised by `check`, `join`.
    """

    def __init__(self, engines: Sequence[tuple[int, EngineHandle]], call: Call) -> None:
        self.under_way: UnderWay = [
            (engine.name, start("wsync-call", partial(call, index, engine)))
            for index, engine in engines
        ]
        self._engines = {engine.name: engine for _, engine in engines}
        self._ended: dict[str, Deadline] = {}  # since `check_pending` first saw a call's end

    def check(self) -> None:
        """Raises the first error so far."""
        for _, call in self.under_way:
            if call.done():
                call.result()

    def check_pending(self) -> None:
        """Raises if any call has ended, well or badly: an update is still under way.

        A call that ended well raises only after a delay: SGLang answers success even for failed
        workers, whose own error may still be on its way and says more.
        """
        self.check()
        for name, call in self.under_way:
            if call.done() and not self._ended.setdefault(name, Deadline(VERDICT_SECONDS)).left:
                raise _core.ProtocolError(
                    f"engine {name} answered the opening request before the update was committed"
                )

    def join(self, timeout: float, check: Check | None = None) -> None:
        """Waits for all calls; raises an error as soon as there is one, or DeadlineError."""
        deadline = Deadline(timeout)
        while busy := self.busy(POLL_SECONDS):
            self.check()
            if check is not None:
                check()
            if not deadline.left:
                deadline.check(f"{_unanswered(self._engines[busy[0]])}: no answer")
        self.check()

    def busy(self, timeout: float) -> list[str]:
        """Waits for all calls, but not longer, however they end; the engines that are not done."""
        wait([call for _, call in self.under_way], timeout)
        return [name for name, call in self.under_way if not call.done()]


def _unanswered(engine: EngineHandle) -> str:
    """What an engine has been asked and has not answered, for errors."""
    return ", ".join(getattr(engine, "unanswered", [])) or f"engine {engine.name}"


_BUSY: Final = "not done with what an update that failed has asked of it"
NO_CALLS: Final = Calls([], lambda index, engine: None)


class EngineRequests:
    """The requests to engines around an update.  Rank 0 makes them; other ranks have no engines.

    Calls left by a failed update ask engines for nothing more.  What they have asked is awaited
    when the next one pauses (see also ApiHandle.pause): otherwise an engine could apply the older
    version after the newer.

    Attributes:
        compare: called, with a timeout, for the handle of an engine that has paused and may have
            been started again since it was compared; raises where it cannot take what it is sent.
        effect: looks at engines around an update.
        stopped: the engines that have been asked to pause, and have not gone on since.
        sent: those of them that have been sent weights: they may hold a part of an update.
    """

    def __init__(self, engines: Sequence[EngineHandle], options: Options) -> None:
        self.handles = engines
        self.compare: Callable[[EngineHandle, float], object] = lambda engine, timeout: None
        self.effect = FirstEffect()
        self.stopped: list[str] = []
        self.sent = set[str]()
        self._options = options
        self.engines = [CheckedEngine(engine) for engine in engines]
        self._pausing = self._opened = self._handover = NO_CALLS
        self._closing: dict[int, list[Control]] = {}
        self._left: UnderWay = []  # by updates that failed
        self._stops: list[tuple[float, float]] = []  # how long engines paused and flushed

    def pause(self) -> None:
        """Pauses the engines."""
        deadline = Deadline(self._options.deadline)
        self._stops = []

        def pause(index: int, engine: Any) -> None:
            self.stop(engine, lambda: deadline.left)

        self._pausing = self._start(pause)

    def stop(self, engine: CheckedEngine, remaining: Callable[[], float]) -> None:
        """Has one engine stop and, with Options.flush_cache, drop its cache; `remaining` gives the
        timeout of each call."""
        busy = [call for name, call in self._left if name == engine.name]
        if wait(busy, remaining()).not_done:
            raise _core.DeadlineError(f"engine {engine.name}: {_BUSY}")
        times = [time.perf_counter()]
        if engine.name not in self.stopped:
            self.stopped.append(engine.name)
        engine.pause(self._options.pause_mode, remaining())
        times.append(time.perf_counter())
        if engine.restarted:
            engine.look_anew(remaining())
            self.compare(engine.handle, remaining())
        if self._options.flush_cache:
            engine.flush(remaining())
        times.append(time.perf_counter())
        self.effect.look(engine.handle, remaining(), after=False)
        self._stops.append((times[1] - times[0], times[2] - times[1]))

    def measure(self, report: Report) -> None:
        """Reports how long engines took that have stopped since the last call."""
        stops, self._stops = self._stops, []
        if stops:
            pauses, flushes = zip(*stops, strict=True)
            report.engine_pause_seconds, report.engine_flush_seconds = max(pauses), max(flushes)

    def paused(self, check: Check) -> None:
        """Waits until the engines have stopped."""
        # a handle's own error, at the deadline, says more than ours
        self._pausing.join(self._options.deadline + LATER_SECONDS, check)

    def open(self, messages: Mapping[int, Sequence[Control]]) -> None:
        """Has workers join the update; after this, engines are sent weights.
        messages: by engine, one for each of its workers."""
        timeout = self._options.request_deadline
        self.sent.update(self.stopped)
        self._closing = {
            index: [dataclasses.replace(c, op="close", address="") for c in controls]
            for index, controls in messages.items()
        }

        def open_engine(index: int, engine: EngineHandle) -> None:
            send_control(engine, messages[index], weight_version=None, timeout=timeout)

        self._opened = self._start(open_engine, list(messages))

    def look(self) -> None:
        """Raises what has gone wrong with an engine, until all workers hold everything."""
        self._pausing.check()
        self._opened.check_pending()

    def look_for_failures(self) -> None:
        """The same while ranks agree to commit: opening requests may end."""
        self._opened.check()

    def close(self, version: str, check: Check, between: Check) -> None:
        """Ends the opening requests, records the version, and has the engines go on.  `between` is
        called before any is given the version, and once more before any goes on."""
        deadline = Deadline(self._options.deadline)
        self._opened.join(deadline.left, check)
        self._opened = NO_CALLS
        between()
        closing = self._closing

        def close(index: int, engine: EngineHandle, remaining: Callable[[], float]) -> None:
            if index in closing:
                send_control(engine, closing[index], weight_version=version, timeout=remaining())

        self.take_on(version, close, deadline, check, between)

    def take_on(
        self,
        version: str,
        deliver: Callable[[int, EngineHandle, Callable[[], float]], object],
        deadline: Deadline,
        check: Check,
        between: Check = bool,
    ) -> None:
        """Has all engines take on a weight version, and lets none go on before all have.

        deliver(index, engine, remaining) hands the version over; it asks `remaining` for the
        timeout of each call it makes, which raises once the version is given up.  `check` is
        called while this waits, `between` when all have the version and before any goes on.
        Raises what they raise, or DeadlineError.
        """
        self._stops = []
        given_up = threading.Event()

        def remaining() -> float:
            if given_up.is_set():
                raise _core.StateError(f"version {version} has been given up")
            return deadline.left

        def hand_over(index: int, engine: Any) -> None:
            deliver(index, engine, remaining)
            engine.verify(remaining())
            self.effect.look(engine.handle, remaining(), after=True)

        def go_on(index: int, engine: EngineHandle) -> None:
            engine.resume(remaining())

        # the other ranks wait meanwhile, so this has to end before the exchange deadline
        end = Deadline(deadline.left + LATER_SECONDS)
        try:
            self._handover = self._start(hand_over)
            self._handover.join(end.left, check)
            between()
            self._handover = self._start(go_on)
            self._handover.join(end.left, check)
        except BaseException:
            given_up.set()
            raise
        self._handover, self.stopped = NO_CALLS, []
        self.sent.clear()

    def abandon(self, error: Exception, left: UnderWay | None = None) -> None:
        """After a failure: no engine is asked for anything more.  What has been asked, with what is
        `left` elsewhere, may end for a moment, because what engines answer is their side of the
        failure.  Then nobody waits for it any more, and one line says so.  Engines that were paused
        and sent nothing go on.  A note of the error says how others do.
        """
        left = left or []
        engines, self.engines = self.engines, [CheckedEngine(e.handle, e) for e in self.engines]
        for engine in engines:
            engine.give_up()
        asked = [
            each
            for calls in (self._pausing, self._opened, self._handover)
            for each in calls.under_way
        ]
        self._pausing = self._opened = self._handover = NO_CALLS
        wait([call for _, call in asked + left], min(LEAVE_SECONDS, self._options.deadline))
        self._left = [each for each in self._left + asked + left if not each[1].done()]
        busy = {name: f"engine {name}" for name, _ in self._left}
        for engine in engines:
            if engine.name in busy:
                busy[engine.name] = _unanswered(engine)
        if busy:
            _log.warning(
                "wsync: the update has failed and leaves unanswered: %s.  An engine may still "
                "pause when it answers: call update again, or, if its weights are whole, "
                "wsync.handle(url).resume(30)",
                "; ".join(busy.values()),
            )
        waiting = set(self.stopped) - self.sent - busy.keys()
        self._go_on([(i, e) for i, e in enumerate(engines) if e.name in waiting])
        notes = []
        if self.stopped:
            notes = [
                "These engines stay paused until an update succeeds: "
                f"{', '.join(map(repr, self.stopped))}.",
                "Call update again, or connect again if names, shapes or dtypes do not fit.",
                "wsync.handle(url).resume(30) lets an engine go on: do this only if it holds the "
                "weights of one update.",
            ]
        if isinstance(error, _core.PeerClosedError) and str(error).startswith("engine "):
            notes.append("If an engine has ended, start it again, or connect without it.")
        if notes:
            error.add_note("  ".join(notes))

    def _go_on(self, engines: Sequence[tuple[int, CheckedEngine]]) -> None:
        deadline, stopped = Deadline(min(VERDICT_SECONDS, self._options.deadline)), self.stopped

        def go_on(_: int, engine: Any) -> None:
            with contextlib.suppress(_core.PeerClosedError):  # it has ended
                engine.go_on(deadline.left)
            stopped.remove(engine.name)

        calls = Calls(engines, go_on)
        calls.busy(deadline.left)
        self._left += calls.under_way

    def _start(self, call: Call, indices: Sequence[int] | None = None) -> Calls:
        """Calls the engines of these indices (None: all)."""
        wanted = range(len(self.engines)) if indices is None else indices
        return Calls([(index, self.engines[index]) for index in wanted], call)
