"""The part of an update that arrives while its engine generates."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from wsync._core import StateError
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import Check, Deadline
from wsync.machine.error_text import error_text
from wsync.messages.control import ROUNDS

if TYPE_CHECKING:
    from wsync.engine.receiver import Session

_FOREVER: Final = 1e9  # seconds
_CLOSE_SECONDS: Final = 10.0  # that a step of the session may still take


class Ahead:
    """Begins a session's next update in a thread, which maps the memory that is lent for it.  With
    ROUNDS it also takes all rounds; they stay in the ring, which has room for all of them.  Nothing
    else is written.

    Nobody else may use the session until `join` or `close` has returned.  A failure ends the
    session and frees what it holds.

    what: BEGIN or ROUNDS of wsync.messages.control.
    owner: the object that the session belongs to; the thread ends when it is freed.
    timeout: seconds that each round may take once the update has begun.
    """

    def __init__(self, what: str, session: Session, owner: object, timeout: float) -> None:
        self.rounds = what == ROUNDS
        self._closed = threading.Event()
        look = partial(_look, self._closed, weakref.ref(owner))
        # without this object: an error's traceback would keep it, and it the error and the session
        self._taken = start("wsync-ahead", partial(_take, session, self.rounds, timeout, look))

    def join(self, timeout: float) -> tuple[int, int]:
        """Waits until all has come; returns the update's number and the number of its rounds."""
        late = "the trainer has not sent all of this update"
        return result(self._taken, Deadline(timeout), bool, late)

    def close(self) -> None:
        """Gives up waiting, and returns when the session is no longer in use."""
        self._closed.set()
        wait([self._taken], _CLOSE_SECONDS)

    @property
    def failed(self) -> bool:
        return self._taken.done() and self._taken.exception() is not None


def _take(session: Any, all_rounds: bool, timeout: float, look: Check) -> tuple[int, int]:
    try:
        update, rounds = session.begin(_FOREVER, look)
        for round in range(rounds if all_rounds else 0):
            session.take(round, None, timeout, look)
            session.done(round, None, timeout)
    except Exception as error:
        session.fail(error_text(error))
        session.close()
        raise
    return update, rounds


def _look(closed: threading.Event, owner: weakref.ref[Any]) -> None:
    if closed.is_set() or owner() is None:
        raise StateError("the engine has ended the session")
