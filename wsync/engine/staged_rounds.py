"""The rounds of an update that arrive while its engine generates."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from wsync._core import StateError
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import Deadline
from wsync.machine.error_text import error_text

if TYPE_CHECKING:
    from wsync.engine.receiver import Session

_FOREVER: Final = 1e9  # seconds


class StagedRounds:
    """Takes all rounds of a session's next update, in a thread.  They stay in the ring, which has
    room for all of them, and nothing else is written.

    Nobody else may use the session until `join` or `close` has returned.  A failure ends the
    session.

    owner: the object that the session belongs to; the thread ends when it is freed.
    timeout: seconds that each round may take once the update has begun.
    """

    def __init__(self, session: Session, owner: object, timeout: float) -> None:
        self._owner = weakref.ref(owner)
        self._closed = threading.Event()
        self._taken = start("wsync-stage", partial(self._take, session, timeout))

    def join(self, timeout: float) -> tuple[int, int]:
        """Waits for the last round; returns the update's number and the number of rounds."""
        late = "the rounds of this update have not all arrived"
        return result(self._taken, Deadline(timeout), bool, late)

    def close(self) -> None:
        """Gives up waiting, and returns when the session is no longer in use."""
        self._closed.set()
        self._taken.exception()

    def _take(self, session: Any, timeout: float) -> tuple[int, int]:
        try:
            update, rounds = session.begin(_FOREVER, self._look)
            for round in range(rounds):
                session.take(round, None, timeout, self._look)
                session.done(round, None, timeout)
        except Exception as error:
            session.fail(error_text(error))
            raise
        return update, rounds

    def _look(self) -> None:
        if self._closed.is_set() or self._owner() is None:
            raise StateError("the engine has ended the session")
