"""Calls to engines, all engines at once, from threads that never outlive their deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from wsync import _core

_Handle = TypeVar("_Handle")


class Calls(Generic[_Handle]):
    """One call per engine, each in a daemon thread.

    Args:
        engines: what to call.
        call: is given an engine; what it raises is raised by `check` and `join`.
    """

    def __init__(self, engines: Sequence[_Handle], call: Callable[[_Handle], object]) -> None:
        self._errors: list[BaseException | None] = [None] * len(engines)
        self._done = [threading.Event() for _ in engines]
        self._engines = engines
        for index, engine in enumerate(engines):
            threading.Thread(
                target=self._run, args=(index, engine, call), daemon=True, name="wsync-call"
            ).start()

    def _run(self, index: int, engine: _Handle, call: Callable[[_Handle], object]) -> None:
        try:
            call(engine)
        except BaseException as error:
            self._errors[index] = error
        finally:
            self._done[index].set()

    def check(self) -> None:
        """Raises the first error so far."""
        for error in self._errors:
            if error is not None:
                raise error

    def check_pending(self) -> None:
        """Raises if any call has ended, well or badly: an update is still under way."""
        self.check()
        for engine, done in zip(self._engines, self._done, strict=True):
            if done.is_set():
                name = getattr(engine, "name", engine)
                raise _core.ProtocolError(
                    f"engine {name} answered the opening request before the update was committed"
                )

    def join(self, timeout: float, check: Callable[[], object] | None = None) -> None:
        """Waits for all calls; raises the first error, or DeadlineError."""
        waited = 0.0
        for done in self._done:
            while not done.wait(0.05):
                waited += 0.05
                if check is not None:
                    check()
                if waited > timeout:
                    raise _core.DeadlineError(f"an engine did not answer within {timeout:.0f} s")
        self.check()


def call_all(engines: Sequence[_Handle], call: Callable[[_Handle], object], timeout: float) -> None:
    """Calls every engine at once and waits for all of them."""
    Calls(engines, call).join(timeout)
