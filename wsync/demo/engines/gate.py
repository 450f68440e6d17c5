"""Who may run in an engine: requests, pauses and weight updates, with SGLang's rules."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from wsync._core import DeadlineError, InvalidArgumentError, StateError
from wsync.machine.deadline import seconds

PAUSE_MODES: Final = ("abort", "retract", "in_place")
REQUEST_SECONDS: Final = 600.0
"""The most that a request waits for others."""


class Ticket:
    """One running request.  Both flags are set by others and read between two steps."""

    aborted = False
    retracted = False


class Gate:
    """Orders the threads of one engine.

    Requests wait outside while the engine is paused.  A running request asks before every step.
    pause: "abort" ends running requests and waits until they are gone, "retract" makes them start
    over from their tokens when generation continues, "in_place" freezes them where they are.
    Steps and updates are alone with the weights; resume waits for an update.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._running: set[Ticket] = set()
        self._writing = False  # a step or an update is alone with the weights

    def busy(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._running)

    @contextmanager
    def request(self) -> Iterator[Ticket]:
        ticket = Ticket()
        with self._changed:
            self._wait(lambda: not self._paused, REQUEST_SECONDS, "the engine stays paused")
            self._running.add(ticket)
        try:
            yield ticket
        finally:
            with self._changed:
                self._running.discard(ticket)
                self._changed.notify_all()

    def step(self, ticket: Ticket) -> AbstractContextManager[None]:
        """Around a step of a request, which first looks whether it was aborted."""
        return self._alone(
            lambda: ticket.aborted or not self._paused, REQUEST_SECONDS, "the engine stays paused"
        )

    def update(self, timeout: float) -> AbstractContextManager[None]:
        """Around what reads or writes all weights."""
        return self._alone(lambda: True, timeout, "a step or an update does not end")

    def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise InvalidArgumentError(f"mode {mode!r}: one of {', '.join(PAUSE_MODES)}")
        with self._changed:
            self._paused = True
            for ticket in self._running:
                ticket.aborted |= mode == "abort"
                ticket.retracted |= mode == "retract"
            self._changed.notify_all()
            if mode == "abort":
                self._wait(lambda: not self._running, REQUEST_SECONDS, "requests do not end")

    def resume(self) -> None:
        with self.update(REQUEST_SECONDS):
            self._paused = False

    def flush(self) -> str:
        """StateError while a request keeps what it has computed, unlike one that was retracted."""
        with self._changed:
            if keeping := [ticket for ticket in self._running if not ticket.retracted]:
                raise StateError(
                    f"Cache not flushed because there are pending requests: {len(keeping)} running"
                )
        return "Cache flushed."

    @contextmanager
    def _alone(self, ready: Callable[[], bool], timeout: float, otherwise: str) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._writing and ready(), timeout, otherwise)
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: float, otherwise: str) -> None:
        if not self._changed.wait_for(ready, timeout):
            raise DeadlineError(f"{otherwise}: waited {seconds(timeout)}")
