"""Requests to all engines at once.  A request may never return, so a daemon thread makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final

from wsync import _core
from wsync.handles.answers import ignores_pause
from wsync.handles.base import EngineHandle, how_started, pause_mode, send_control
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import (
    LATER_SECONDS,
    LEAVE_SECONDS,
    POLL_SECONDS,
    VERDICT_SECONDS,
    Check,
    Deadline,
)
from wsync.messages.control import NOTHING, Control
from wsync.options import Options
from wsync.report import Report
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.first_effect import FirstEffect

_log = logging.getLogger(__name__)

Call = Callable[[int, Any], object]
UnderWay = list[tuple[str, Future[Any]]]
"""Requests to engines, each with the engine's name."""


class Calls:
    """One call per engine, each in a daemon thread.

    Args:
        engines: the index and the handle of each engine.
        call: called with an engine's index and handle; `check` and `join` raise its errors.
    """

    def __init__(self, engines: Sequence[tuple[int, Any]], call: Call) -> None:
        self._calls = [
            (engine, start("wsync-call", partial(call, index, engine))) for index, engine in engines
        ]
        self._verdict: Deadline | None = None  # since `check_pending` first saw a call's end

    @property
    def under_way(self) -> UnderWay:
        return [(engine.name, call) for engine, call in self._calls]

    def check(self) -> None:
        """Raises the first error so far."""
        for _, call in self._calls:
            if call.done():
                call.result()

    def check_pending(self, early: Container[str] = ()) -> None:
        """Raises if any call has ended, because the update is still under way.  early: the names of
        engines that answer before.

        For a call without an error, this raises only after a delay: SGLang answers success even if
        workers have failed, and a worker's own error, which says more, may still be on its way.
        """
        self.check()
        for name in (name for name, call in self.under_way if call.done() and name not in early):
            self._verdict = self._verdict or Deadline(VERDICT_SECONDS)
            if not self._verdict.left:
                raise _core.ProtocolError(
                    f"engine {name} answered the opening request before the update was committed"
                )

    def wait(self, timeout: float) -> None:
        """Waits until all calls have ended, for at most `timeout` seconds; raises no error."""
        wait([call for _, call in self._calls], timeout)

    def join(self, timeout: float, check: Check = bool) -> None:
        """Waits for all calls; raises the first error at once, or DeadlineError."""
        deadline = Deadline(timeout)
        while busy := [engine for engine, call in self._calls if not call.done()]:
            if not deadline.left:
                deadline.check(f"{_unanswered(busy[0])}: no answer")
            self.wait(POLL_SECONDS)
            self.check()
            check()
        self.check()


def _is_late(call: Future[Any]) -> bool:
    return not call.done() or isinstance(call.exception(), _core.DeadlineError)


def _unanswered(engine: Any) -> str:
    """The requests that an engine has not answered, as a text for errors."""
    return ", ".join(getattr(engine, "unanswered", [])) or f"engine {engine.name}"


NO_CALLS: Final = Calls([], lambda index, engine: None)


class EngineRequests:
    """The requests to engines around an update.  Rank 0 makes them; other ranks have no engines.

    After a failed update, its calls send no further requests.  The next update waits for requests
    that are still under way: otherwise an engine could apply the older version after the newer one.

    Attributes:
        compare: called with an engine's handle and a timeout, after the engine has paused, if it
            may have been restarted; raises if the engine cannot take what it is sent.
        effect: looks at engines before and after an update.
        late: the names of engines that have not answered a request of the last failed update.
    """

    def __init__(self, engines: Sequence[EngineHandle], options: Options) -> None:
        self.handles = engines
        self.compare: Callable[[EngineHandle, float], object] = lambda engine, timeout: None
        self.effect = FirstEffect()
        self.late = set[str]()
        self._options = options
        self.engines = [CheckedEngine(engine) for engine in engines]
        self._unused: list[CheckedEngine] = []
        self._pausing = self._opened = self._calling = NO_CALLS
        self._messages: Mapping[int, Sequence[Control]] = {}  # that opened the update
        self._early: set[str] = set()  # engines that answer before the update is committed
        self._left: UnderWay = []  # requests of failed updates
        # by engine: the seconds that it took to pause and to flush
        self._stops: dict[str, tuple[float, float]] = {}

    def use(self, engines: Sequence[EngineHandle], known: Sequence[EngineHandle]) -> None:
        """Makes further requests to these engines only.  known: these engines, and others that may
        be used again."""
        made = {id(engine.handle): engine for engine in (*self.engines, *self._unused)}
        self.handles, self._stops = engines, {}
        self.engines = [
            made.pop(id(each)) if id(each) in made else CheckedEngine(each) for each in engines
        ]
        self._unused = [made[id(each)] for each in known if id(each) in made]

    def pause(self) -> None:
        """Pauses the engines."""
        deadline = Deadline(self._options.deadline)
        self._pausing = self._start(lambda _, engine: self.stop(engine, deadline))

    def hold(self, names: Container[str]) -> None:
        """Pauses these engines for a look at their weights: they keep requests and cache, if they
        can."""
        deadline = Deadline(self._options.deadline)

        def hold(_: int, engine: CheckedEngine) -> None:
            if engine.name not in names:
                return
            if not ignores_pause(how_started(engine.handle, deadline.left), "in_place"):
                with contextlib.suppress(_core.RemoteError):  # slime's actors of 0.2.2 take no mode
                    engine.pause("in_place", deadline.left)
                    return
            engine.pause("abort", deadline.left)

        self._pausing = self._start(hold)

    def stop(self, engine: CheckedEngine, deadline: Deadline) -> None:
        """Stops one engine and, with Options.flush_cache, empties its cache."""
        left = [call for name, call in self._left if name == engine.name]
        if wait(left, deadline.left).not_done:
            raise _core.DeadlineError(
                f"engine {engine.name}: still busy with a request of an update that failed"
            )
        times = [time.perf_counter()]
        engine.pause(pause_mode(engine.handle, self._options.pause_mode), deadline.left)
        times.append(time.perf_counter())
        if engine.unchecked:
            handle: Any = engine.handle
            if hasattr(type(handle), "look_anew"):
                handle.look_anew(deadline.left)
            try:
                self.compare(engine.handle, deadline.left)
            except _core.LayoutError as error:
                raise _core.LayoutError(f"engine {engine.name}: {error}") from error
            engine.unchecked = False
        if self._options.flush_cache:
            engine.flush(deadline.left)
        times.append(time.perf_counter())
        self.effect.look(engine.handle, deadline.left, after=False)
        self._stops[engine.name] = (times[1] - times[0], times[2] - times[1])

    def measure(self, report: Report) -> None:
        """Reports how long the slowest engine took to stop."""
        if self._stops:
            pauses, flushes = zip(*self._stops.values(), strict=True)
            report.engine_pause_seconds, report.engine_flush_seconds = max(pauses), max(flushes)

    @property
    def pauses(self) -> dict[str, float]:
        """By engine, the seconds from the request to pause until it went on, in the last update."""
        return {engine.name: engine.paused_seconds for engine in self.engines}

    def paused(self, check: Check) -> None:
        """Waits until the engines have stopped."""
        # a handle's own error, at the deadline, says more than ours
        self._pausing.join(self._options.deadline + LATER_SECONDS, check)

    def open(self, messages: Mapping[int, Sequence[Control]]) -> None:
        """Asks workers to join the update, or to compare it.

        messages: by engine, one for each of its workers."""
        timeout = self._options.request_deadline
        if not any(each.answer for told in messages.values() for each in told):
            self._messages = messages
        # a pipeline stage passes a request on after its own answer
        self._early = {
            self.handles[index].name
            for index, told in messages.items()
            if len(told) > self.handles[index].workers
        }

        def open_engine(index: int, engine: Any) -> None:
            send_control(engine, messages[index], weight_version=None, timeout=timeout)

        self._opened = Calls([(index, self.engines[index]) for index in messages], open_engine)

    def look(self, *, committing: bool = False) -> None:
        """Raises an engine's error, if there is one.  committing: whether ranks agree to commit;
        only then may opening requests end."""
        self._pausing.check()
        if committing:
            self._opened.check()
        else:
            self._opened.check_pending(self._early)

    def answered(self, check: Check) -> None:
        """Waits for the answers to the opening requests."""
        self._opened.join(self._options.deadline, check)
        self._opened = NO_CALLS

    def close(self, version: str, check: Check, *, ahead: str = NOTHING) -> None:
        """Ends the update for its workers, and gives all engines the version.  ahead: what of the
        next update comes before its opening requests."""
        deadline = Deadline(self._options.deadline)

        def close(index: int, engine: Any) -> None:
            closing: Any = {"op": "close", "address": "", "ahead": ahead}
            opened = self._messages.get(index, ())
            if messages := [dataclasses.replace(each, **closing) for each in opened]:
                send_control(engine, messages, weight_version=version, timeout=deadline.left)

        self.hand_over(close, deadline, check)

    def hand_over(self, deliver: Call, deadline: Deadline, check: Check) -> None:
        """Gives all engines a weight version.

        deliver(index, engine) gives one engine the version.  `check` is called while this waits.
        Raises the errors of these functions, or DeadlineError.
        """

        def hand_over(index: int, engine: Any) -> None:
            deliver(index, engine)
            if engine.stopped:
                engine.verify(deadline.left)
                self.effect.look(engine.handle, deadline.left, after=True)

        self.call_all(hand_over, deadline, check)

    def resume(self, deadline: Deadline, check: Check) -> None:
        """Lets all paused engines continue."""

        def resume(_: int, engine: Any) -> None:
            if engine.stopped:
                engine.resume(deadline.left)

        self.call_all(resume, deadline, check)

    def call_all(self, call: Call, deadline: Deadline, check: Check) -> None:
        """Calls a function with the index and the handle of each engine, and waits for all."""
        self._calling = self._start(call)
        # the other ranks wait meanwhile, so this has to end before the exchange deadline
        self._calling.join(deadline.left + LATER_SECONDS, check)
        self._calling = NO_CALLS

    def abandon(self, error: Exception, left: UnderWay | None = None) -> None:
        """Sends no further requests after a failure.  Waits a moment for requests under way and for
        those in `left`, because engines' answers may explain the failure; then logs the requests
        without an answer.  Engines that were paused and hold no part of the update continue.  A
        note of the error says how to continue the other engines.
        """
        asked = [*self._left, *(left or [])]
        for calls in (self._pausing, self._opened, self._calling):
            asked += calls.under_way
        self._pausing = self._opened = self._calling = NO_CALLS
        for engine in self.engines:
            engine.give_up()
        wait([call for _, call in asked], min(LEAVE_SECONDS, self._options.deadline))
        self._left = [each for each in asked if not each[1].done()]
        self.late = {name for name, call in asked if _is_late(call)}
        names = [name for name, _ in self._left]
        busy = {each.name: _unanswered(each) for each in self.engines if each.name in names}
        if busy:
            _log.warning(
                "wsync: the update has failed, and these requests have no answer: %s.  Such an "
                "engine may still pause: call update again, or, if the engine holds the weights of "
                "one update, wsync.handle(url).resume(30)",
                "; ".join(busy.values()),
            )
        idle = [engine for engine in self.engines if engine.name not in busy]
        self._go_on([engine for engine in idle if engine.stopped and not engine.sent])
        self.engines = [CheckedEngine(engine.handle, engine) for engine in self.engines]
        notes = []
        if stopped := [repr(engine.name) for engine in self.engines if engine.stopped]:
            notes = [
                f"These engines stay paused until an update succeeds: {', '.join(stopped)}.",
                "Call update again, or connect again if names, shapes or dtypes do not fit.",
                "wsync.handle(url).resume(30) lets an engine go on: do this only if it holds the "
                "weights of one update.",
            ]
        if isinstance(error, _core.PeerClosedError) and str(error).startswith("engine "):
            notes.append("If an engine has ended, start it again, or connect without it.")
        if notes:
            error.add_note("  ".join(notes))

    def _go_on(self, engines: Sequence[CheckedEngine]) -> None:
        deadline = Deadline(min(VERDICT_SECONDS, self._options.deadline))

        def go_on(_: int, engine: CheckedEngine) -> None:
            try:
                engine.go_on(deadline.left)
            except _core.PeerClosedError:  # it has ended
                engine.stopped = False

        calls = Calls(list(enumerate(engines)), go_on)
        calls.wait(deadline.left)
        self._left += calls.under_way

    def _start(self, call: Call) -> Calls:
        return Calls(list(enumerate(self.engines)), call)
