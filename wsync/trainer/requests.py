"""Requests to all engines at once, which may never return: each is made from a daemon thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from wsync import _core
from wsync.handles.base import EngineHandle
from wsync.machine.deadline import left as left
from wsync.trainer.checked_engine import CheckedEngine

_GRACE_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 2.0  # a handle's own error, at its deadline, says more than ours


class Calls:
    """One call per engine, each in a daemon thread.

    Args:
        engines: what to call.
        call: is given an engine's index and handle; what it raises is raised by `check`, `join`.
    """

    def __init__(
        self,
        engines: Sequence[tuple[int, EngineHandle]],
        call: Callable[[int, EngineHandle], object],
    ) -> None:
        self._errors: list[BaseException | None] = [None] * len(engines)
        self._done = [threading.Event() for _ in engines]
        self._names = [engine.name for _, engine in engines]
        self._ended: dict[int, float] = {}  # when `check_pending` first saw a call's end
        for place, (index, engine) in enumerate(engines):
            threading.Thread(
                target=self._run, args=(place, index, engine, call), daemon=True, name="wsync-call"
            ).start()

    def _run(
        self,
        place: int,
        index: int,
        engine: EngineHandle,
        call: Callable[[int, EngineHandle], object],
    ) -> None:
        try:
            call(index, engine)
        except BaseException as error:
            self._errors[place] = error
        finally:
            self._done[place].set()

    def check(self) -> None:
        """Raises the first error so far."""
        for error in self._errors:
            if error is not None:
                raise error

    def check_pending(self) -> None:
        """Raises if any call has ended, well or badly: an update is still under way.

        A call that ended well does so after a while: SGLang answers so for workers that have
        failed, and their own words, which are on their way, say more.
        """
        self.check()
        now = time.monotonic()
        for place, (name, done) in enumerate(zip(self._names, self._done, strict=True)):
            if done.is_set() and now > self._ended.setdefault(place, now) + _GRACE_SECONDS:
                raise _core.ProtocolError(
                    f"engine {name} answered the opening request before the update was committed"
                )

    def settle(self, timeout: float) -> list[str]:
        """Waits for all calls, but not longer, however they end; the engines that are not done."""
        end = time.monotonic() + timeout
        done = [done.wait(left(end)) for done in self._done]
        return [name for name, ended in zip(self._names, done, strict=True) if not ended]

    def join(self, timeout: float, check: Callable[[], object] | None = None) -> None:
        """Waits for all calls; raises an error as soon as there is one, or DeadlineError."""
        end = time.monotonic() + timeout
        for name, done in zip(self._names, self._done, strict=True):
            while not done.wait(0.05):
                self.check()
                if check is not None:
                    check()
                if time.monotonic() > end:
                    raise _core.DeadlineError(
                        f"engine {name} did not answer within {timeout:.0f} s"
                    )
        self.check()


class Handover:
    """Has engines take on one weight version after another.

    What a version that failed has left under way is waited for before engines are told of the
    next one: they would take on the older one last.
    """

    def __init__(self) -> None:
        self._calls: Calls | None = None
        self._failed = ""  # the version of these calls
        self._end = 0.0  # when they have ended, as handles keep their timeouts

    def take_on(
        self,
        version: str,
        engines: Sequence[EngineHandle],
        deliver: Callable[[int, EngineHandle, Callable[[], float]], object],
        *,
        timeout: float,
        check: Callable[[], object],
        between: Callable[[], object] = bool,
    ) -> None:
        """Has all engines take on a weight version, and lets none go on before all have.

        deliver(index, engine, remaining) hands the version over; it asks `remaining` for the
        timeout of each call it makes, which raises once the version is given up.  `check` is
        called while this waits, `between` when all have the version and before any goes on.
        Raises what they raise, or DeadlineError.
        """
        end = time.monotonic() + timeout
        self._clear(end, timeout, check)
        given_up = threading.Event()

        def remaining() -> float:
            if given_up.is_set():
                raise _core.StateError(f"version {version} has been given up")
            return left(end)

        def hand_over(index: int, engine: EngineHandle) -> None:
            deliver(index, engine, remaining)
            if isinstance(engine, CheckedEngine):
                engine.verify(remaining())

        def go_on(index: int, engine: EngineHandle) -> None:
            engine.resume(remaining())

        # the other ranks wait meanwhile, so this has to end before the exchange deadline
        self._failed, self._end = version, end + _SETTLE_SECONDS
        try:
            self._run(hand_over, engines, check)
            between()
            self._run(go_on, engines, check)
        except BaseException:
            given_up.set()
            raise
        self._calls = None

    def _run(
        self,
        call: Callable[[int, EngineHandle], object],
        engines: Sequence[EngineHandle],
        check: Callable[[], object],
    ) -> None:
        self._calls = Calls(list(enumerate(engines)), call)
        self._calls.join(left(self._end), check)

    def settle(self, timeout: float | None = None) -> None:
        """Waits for what a failed version has left under way; without a timeout, as long as its
        calls may take."""
        if self._calls is not None:
            self._calls.settle(left(self._end) if timeout is None else timeout)

    def _clear(self, end: float, timeout: float, check: Callable[[], object]) -> None:
        if self._calls is None:
            return
        while busy := self._calls.settle(0.05):
            check()
            if time.monotonic() > end:
                raise _core.DeadlineError(
                    f"engine {busy[0]} did not end what it was told of version {self._failed}, "
                    f"which failed, within {timeout:.0f} s"
                )
        self._calls = None
