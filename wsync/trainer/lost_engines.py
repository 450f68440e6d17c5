"""Engines that updates go without, because they are gone, do not answer or refuse updates."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Final

from wsync._core import DeadlineError, PeerClosedError
from wsync.handles.answers import identity_of
from wsync.handles.base import EngineHandle, how_started
from wsync.machine.daemon_threads import start
from wsync.trainer.checked_engine import CheckedEngine

_SUSPECT_SECONDS: Final = 5.0  # for an engine to answer after an update has failed
_RETURN_SECONDS: Final = 1.0  # for a lost engine to answer before an update


class LostEngines:
    """Finds engines that are lost, and engines that have come back.  Used on rank 0."""

    def __init__(self) -> None:
        # by name: the handle, and the identity that has refused updates; None if it did not answer
        self._lost: dict[str, tuple[EngineHandle, Mapping[str, Any] | None]] = {}
        self._refused = set[str]()  # why engines have refused the update

    def find(
        self,
        engines: Sequence[CheckedEngine],
        error: Exception,
        *,
        first: bool,
        grouped: bool,
    ) -> dict[str, str] | None:
        """Returns the engines to repeat a failed update without, each with the reason; None if
        repeating cannot help: no engine is to blame, or none would be left, or two have refused it.

        An engine is lost if it does not answer, or if the error names it.  If two engines refuse an
        update for the same reason, the trainer is to blame.

        first: whether the update has failed for the first time.  Then an engine that was restarted
        is not lost: its connection was closed, and it takes the update if it is connected anew.
        grouped: whether engines are members of process groups.  When a member ends, the others
        report an error, too.  So an engine that answers is not to blame for a group's error.
        """
        answers = _ask([engine.handle for engine in engines], _SUSPECT_SECONDS)
        closed = first and isinstance(error, PeerClosedError)
        found, lost, spared = dict[str, str](), dict[str, Any](), False
        for engine in engines:
            name, answer, named = engine.name, answers[engine.name], blames(error, engine.name)
            gone = isinstance(answer, Exception)
            if closed and (named or grouped) and not gone and engine.restarted_since(answer):
                spared = True
            elif gone or (named and not grouped):
                found[name] = str(error if named else answer)
                lost[name] = engine.handle, None if gone else answer
        refused = set[str]()
        if not isinstance(error, PeerClosedError | DeadlineError):
            blamed_ones = (name for name in found if blames(error, name))
            refused = {_reason(str(error), name) for name in blamed_ones}
        self._refused = set() if first else self._refused
        if len(found) == len(engines) or not (found or spared) or refused & self._refused:
            return None
        self._refused |= refused
        self._lost |= lost
        return found

    def forget_others(self, names: Container[str]) -> None:
        """Forgets all lost engines but these."""
        self._lost = {name: lost for name, lost in self._lost.items() if name in names}

    def returned(self) -> list[str]:
        """Returns the names of lost engines that take updates again.  An engine that did not answer
        returns when it answers.  An engine that refused an update returns after a restart."""
        answers = _ask([engine for engine, _ in self._lost.values()], _RETURN_SECONDS)
        return [
            name
            for name, answer in answers.items()
            if not isinstance(answer, Exception) and answer != self._lost[name][1]
        ]


def blames(error: Exception, engine: str) -> bool:
    """Whether an error names an engine as its place."""
    return f"engine {engine}: " in str(error)


def _reason(text: str, engine: str) -> str:
    """The part of an error that may be the same for several engines."""
    return re.sub(r"\d+", "", text.partition(f"engine {engine}: ")[2])


def _ask(engines: Sequence[EngineHandle], timeout: float) -> dict[str, Any]:
    """Returns the identity of each engine by name, or the error of one that does not answer."""
    calls = {
        engine.name: start("wsync-ask", partial(_identity, engine, timeout)) for engine in engines
    }
    wait(calls.values(), timeout)
    late = TimeoutError(f"no answer within {timeout:.0f} s")
    return {
        n: call.exception() or call.result() if call.done() else late for n, call in calls.items()
    }


def _identity(engine: EngineHandle, timeout: float) -> Mapping[str, Any]:
    found: Mapping[str, Any] = engine.model_info(timeout) or {}
    if not found.keys() & {"instance", "process"}:
        found = how_started(engine, timeout)
    return identity_of(found)
