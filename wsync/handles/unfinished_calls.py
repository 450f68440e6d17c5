"""Calls that change an engine, and may go on when nobody waits for them any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from wsync._core import DeadlineError
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT

Ended = Callable[[float], bool]
"""Waits for the end of a call, but no more seconds than this; whether it has come."""


def changes_engine(method: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call loads weights, or stops an engine or has it go on.  Messages to wsync's
    receiver do not, which knows one update from another."""
    if method in ("pause_generation", "continue_generation"):
        return True
    return method.startswith("update_weights") and arguments.get("load_format") != LOAD_FORMAT


class Changes:
    """Those of one engine, in whatever order it does them: a bucket of an update that failed may
    come behind those of the next, or its pause when that has gone on."""

    def __init__(self) -> None:
        self._open: list[tuple[object, Ended]] = []

    def wait(self, requester: object, where: str, timeout: float) -> float:
        """Waits for those that another has asked for; the seconds that are left.  DeadlineError if
        they go on for so long."""
        deadline = Deadline(timeout)
        for each in list(self._open):
            if each[0] is requester:
                continue
            if not each[1](deadline.left):
                raise DeadlineError(f"{where}: what an update that failed has asked of it goes on")
            self._forget(each)
        return deadline.left

    @contextmanager
    def one(self, requester: object, ended: Ended) -> Iterator[None]:
        """While this call is waited for, and longer if it has not ended then."""
        call = requester, ended
        self._open.append(call)
        try:
            yield
        finally:
            if ended(0.0):
                self._forget(call)

    def _forget(self, call: tuple[object, Ended]) -> None:
        if call in self._open:
            self._open.remove(call)
