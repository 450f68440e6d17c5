"""Who may run in an engine: requests, pauses and weight updates, with SGLang's rules."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from wsync._core import DeadlineError, InvalidArgumentError, StateError
from wsync.machine.deadline import seconds

PAUSE_MODES: Final = ("abort", "retract", "in_place")
REQUEST_SECONDS: Final = 600.0
"""The most that a request waits for others."""


class Ticket:
    """One running request.  Both flags are set by others and read between two steps."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.aborted = False
        self.retracted = False


class Gate:
    """Orders the threads of one engine.

    Requests wait outside while the engine is paused or an update waits or runs.  A running
    request asks before every step.  pause: "abort" ends running requests and waits until they
    are gone, "retract" makes them start over from their tokens when generation continues,
    "in_place" freezes them where they are.  An update of an engine that is not paused waits
    for running requests; in a paused engine it runs at once, and resume waits for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused: str | None = None
        self._running: set[Ticket] = set()
        self._stepping = 0
        self._updating = False
        self._updates_waiting = 0

    @property
    def paused(self) -> bool:
        return self._paused is not None

    def busy(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._running)

    @contextmanager
    def request(self, rid: str, timeout: float) -> Iterator[Ticket]:
        ticket = Ticket(rid)
        with self._changed:
            self._wait(
                lambda: not (self.paused or self._updating or self._updates_waiting),
                timeout,
                "the engine stays paused",
            )
            self._running.add(ticket)
        try:
            yield ticket
        finally:
            with self._changed:
                self._running.discard(ticket)
                self._changed.notify_all()

    @contextmanager
    def step(self, ticket: Ticket, timeout: float) -> Iterator[bool]:
        """One step at a time; yields False if the request was aborted."""
        with self._changed:
            self._wait(
                lambda: ticket.aborted or not (self.paused or self._updating or self._stepping),
                timeout,
                "the engine stays paused",
            )
            go = not ticket.aborted
            self._stepping += go
        try:
            yield go
        finally:
            with self._changed:
                self._stepping -= go
                self._changed.notify_all()

    def pause(self, mode: str, timeout: float) -> None:
        if mode not in PAUSE_MODES:
            raise InvalidArgumentError(f"mode {mode!r}: one of {', '.join(PAUSE_MODES)}")
        with self._changed:
            self._paused = mode
            for ticket in self._running:
                ticket.aborted |= mode == "abort"
                ticket.retracted |= mode == "retract"
            self._changed.notify_all()
            if mode == "abort":
                self._wait(lambda: not self._running, timeout, "requests do not end")
            elif mode == "retract":
                self._wait(lambda: not self._stepping, timeout, "a step does not end")

    def abort(self, rid: str | None) -> None:
        """Ends one running request, or all of them (None)."""
        with self._changed:
            for ticket in self._running:
                ticket.aborted |= rid is None or ticket.rid == rid
            self._changed.notify_all()

    def resume(self, timeout: float) -> None:
        with self._changed:
            self._wait(lambda: not self._updating, timeout, "a weight update does not end")
            self._paused = None
            self._changed.notify_all()

    @contextmanager
    def update(self, timeout: float) -> Iterator[None]:
        """Alone with the weights."""
        with self._changed:
            self._updates_waiting += 1
            try:
                self._wait(
                    lambda: (
                        not (self._updating or self._stepping)
                        and (self.paused or not self._running)
                    ),
                    timeout,
                    "requests do not end",
                )
                self._updating = True
            finally:
                self._updates_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def flush(self) -> None:
        """StateError while a request keeps what it has computed, unlike one that was retracted."""
        with self._changed:
            if keeping := [ticket for ticket in self._running if not ticket.retracted]:
                raise StateError(
                    f"Cache not flushed because there are pending requests: {len(keeping)} running"
                )

    def _wait(self, ready: Callable[[], object], timeout: float, otherwise: str) -> None:
        if not self._changed.wait_for(ready, timeout):
            raise DeadlineError(f"{otherwise}: waited {seconds(timeout)}")
