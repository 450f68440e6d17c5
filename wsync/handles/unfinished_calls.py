"""Calls that change an engine: those that nobody waits for any more may go on, and those of an
update that has been given up are not to begin."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from wsync._core import DeadlineError, StateError
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT

Ended = Callable[[float], bool]
"""Waits for the end of a call, but no more seconds than this; whether it has come."""

# Questions; what empties caches; groups, which have names of their own; and what goes to wsync's
# code in vLLM's workers.
_HARMLESS: Final = frozenset(
    (
        *("model_info", "get_model_info", "server_info", "get_server_info"),
        *("get_weight_version", "version"),
        *("flush_cache", "reset_prefix_cache", "reset_encoder_cache"),
        *("init_weights_update_group", "destroy_weights_update_group"),
        "collective_rpc",
    )
)


def changes_engine(method: str, arguments: Mapping[str, Any]) -> bool:
    """Whether it matters when a call is carried out: it loads or processes weights, say, or stops
    an engine or has it go on.  Messages to wsync's receiver do not, which knows one update from
    another."""
    return method not in _HARMLESS and arguments.get("load_format") != LOAD_FORMAT


class _Asking(threading.local):
    given_up: threading.Event | None = None


_asking: Final = _Asking()


@contextmanager
def asking_for(given_up: threading.Event) -> Iterator[None]:
    """While this thread asks an engine for something in an update, which ends with the event."""
    former, _asking.given_up = _asking.given_up, given_up
    try:
        yield
    finally:
        _asking.given_up = former


def check_wanted(where: str) -> None:
    """To be called right before an engine is changed.  StateError if the update that this thread
    asks for has been given up: the next one may be under way, or may have ended."""
    if _asking.given_up is not None and _asking.given_up.is_set():
        raise StateError(f"{where}: not asked, as its update has been given up")


@dataclasses.dataclass(eq=False)
class _Call:
    changes: Changes
    ended: Ended
    abandoned: bool = False  # nobody waits for it any more


_open: Final[list[_Call]] = []  # of this process: connections come and go, and engines stay


class Changes:
    """Those that one update asks of an engine, which does them in whatever order: a bucket of an
    update that failed may come behind those of the next, or its pause when that has gone on.

    engine: equal for all handles of an engine in this process.
    """

    def __init__(self, engine: int | str) -> None:
        self.engine = engine

    def wait(self, where: str, timeout: float) -> float:
        """Waits for those that others have asked for; the seconds that are left.  DeadlineError if
        they go on for so long."""
        deadline = Deadline(timeout)
        for call in list(_open):
            if call.changes is self or call.changes.engine != self.engine:
                continue
            if not call.ended(deadline.left):
                raise DeadlineError(f"{where}: what an update that failed has asked of it goes on")
            _forget(call)
        return deadline.left

    @contextmanager
    def one(self, ended: Ended) -> Iterator[None]:
        """While this call is waited for, and longer if it has not ended then."""
        call = _Call(self, ended)
        _open.append(call)
        try:
            yield
        finally:
            if ended(0.0):
                _forget(call)
            else:
                call.abandoned = True
                for other in [other for other in _open if other.abandoned]:
                    if other.ended(0.0):
                        _forget(other)

    def left(self, timeout: float) -> bool:
        """Whether the engine goes on after this time with what nobody waits for any more."""
        deadline = Deadline(timeout)
        calls = [call for call in _open if call.changes.engine == self.engine and call.abandoned]
        return not all(call.ended(deadline.left) for call in calls)


def _forget(call: _Call) -> None:
    if call in _open:
        _open.remove(call)
