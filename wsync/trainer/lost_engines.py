"""Engines that updates go without, because they are gone, do not answer or refuse updates."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Final, NamedTuple

from wsync._core import DeadlineError, PeerClosedError
from wsync.handles.base import EngineHandle, who_answers
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import Deadline
from wsync.trainer.checked_engine import CheckedEngine

_log = logging.getLogger("wsync")
_SUSPECT_SECONDS: Final = 5.0  # for an engine to answer after an update has failed
_RETURN_SECONDS: Final = 1.0  # for a lost engine to answer before an update


class _Lost(NamedTuple):
    """A lost engine.  answer: who answered then (`who_answers`); None if nobody did."""

    handle: EngineHandle
    reason: str
    answer: Any


class LostEngines:
    """Finds engines that are lost, and engines that have come back.  Used on rank 0."""

    def __init__(self) -> None:
        self._lost: dict[str, _Lost] = {}
        self._earlier = set[str]()  # engines that were lost before the current update
        self._spared = self._refused = False  # engines of the current update

    @property
    def reasons(self) -> dict[str, str]:
        """Why each lost engine is lost, by name."""
        return {name: lost.reason for name, lost in self._lost.items()}

    def begin(self) -> None:
        """Begins an update.  Engines that have come back are no longer lost: an engine that did not
        answer comes back when it answers, an engine that refused an update after a restart."""
        answers = _ask([lost.handle for lost in self._lost.values()], _RETURN_SECONDS)
        for name, answer in answers.items():
            if not isinstance(answer, Exception) and answer != self._lost[name].answer:
                del self._lost[name]
                _log.info("wsync: engine %s is back", name)
        self._earlier = {*self._lost}
        self._spared = self._refused = False

    def forget(self) -> None:
        """Forgets what the current update has found, because it has failed in the end."""
        self._lost = {name: lost for name, lost in self._lost.items() if name in self._earlier}

    def find(
        self,
        engines: Sequence[CheckedEngine],
        error: Exception,
        *,
        busy: Container[str],
        grouped: bool,
    ) -> bool:
        """Finds the engines to blame for a failed attempt; returns whether another attempt without
        them may succeed.

        An engine is lost if it does not answer, or if the error names it.  But an engine that was
        restarted is spared once: its connection was closed, and it takes the update from a new one.
        If a second engine that answers is late or refuses the update, the trainer is to blame.

        busy: engines with requests under way.  When a deadline has passed, they are to blame: an
        engine that has waited for them may have been the first to say so.
        grouped: whether engines are members of process groups.  When a member ends, the others
        report an error, too.  So an engine that answers is not to blame for a group's error.
        """
        answers = _ask([engine.handle for engine in engines], _SUSPECT_SECONDS)
        closed, late = isinstance(error, PeerClosedError), isinstance(error, DeadlineError)
        waiting = late and any(engine.name in busy for engine in engines)
        found, spared, refused = dict[str, _Lost](), False, False
        for engine in engines:
            name, answer = engine.name, answers[engine.name]
            named = name in busy if waiting else blames(error, name)
            why = str(error if named else answer)
            silent = isinstance(answer, Exception) and (named or late)
            if silent or isinstance(answer, PeerClosedError):
                found[name] = _Lost(engine.handle, why, None)
            elif not (named or grouped) or isinstance(answer, Exception):
                continue
            elif closed and not self._spared and engine.restarted_since(answer[0]):
                spared = True
            elif named and not grouped:
                refused |= not closed
                # a request that was cut off says nothing of the next one
                again = closed and f"engine {name}: worker " not in str(error)
                stays = "; it stays paused" if engine.stopped else ""
                found[name] = _Lost(engine.handle, why + stays, None if again else answer)
        if len(found) == len(engines) or not (found or spared) or (refused and self._refused):
            return False
        self._spared |= spared
        self._refused |= refused
        self._lost |= found
        for name, lost in found.items():
            _log.warning("wsync: updates go without engine %s: %s", name, lost.reason)
        return True


def blames(error: Exception, engine: str) -> bool:
    """Whether an error names an engine as its place."""
    return f"engine {engine}: " in str(error)


def _ask(engines: Sequence[EngineHandle], timeout: float) -> dict[str, Any]:
    """Returns who answers for each engine, or the error of one that does not answer, by name."""
    calls = {
        engine.name: start("wsync-ask", partial(who_answers, engine, Deadline(timeout)))
        for engine in engines
    }
    wait(calls.values(), timeout)
    late = TimeoutError(f"no answer within {timeout:.0f} s")
    return {
        n: call.exception() or call.result() if call.done() else late for n, call in calls.items()
    }
