"""The engines that a trainer updates, as rank 0 sees them: who they are, and which are lost."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    PeerClosedError,
    UnsupportedError,
)
from wsync.handles.answers import without_password
from wsync.handles.base import (
    EngineHandle,
    check_distinct,
    handle,
    handles_of,
    listed,
    number,
    who_answers,
)
from wsync.handles.local import LocalHandle
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import Deadline
from wsync.messages.control import TAKEN
from wsync.options import Options, numbers
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.roster import Delivery, RolloutEngine

_log = logging.getLogger("wsync")
_SUSPECT_SECONDS: Final = 5.0  # for an engine to answer after an update has failed
_RETURN_SECONDS: Final = 1.0  # for a lost engine to answer before an update
_PASSED: Final = "deadline passed"  # as a worker says that has waited for the trainer
_JOIN_SECONDS: Final = 5.0  # for a new engine to answer before an update
_SILENT: Final = (PeerClosedError, TimeoutError)  # of an engine that is not there yet


@dataclass(eq=False)
class _Member:
    """An engine.  reason: why updates go without it; "" if they reach it.  answer: who answered
    when it was lost (`who_answers`); None if nobody did."""

    given: Any
    handle: EngineHandle
    engine: RolloutEngine
    reason: str = ""
    answer: Any = None

    def stands_for(self, given: Any) -> bool:
        """Whether this is the engine that is given now.  Actors and handles may be new objects."""
        if given is self.given:
            return True
        if isinstance(self.handle, LocalHandle) and self.handle.in_process:
            return False
        named = isinstance(given, EngineHandle) and given.name == self.handle.name
        return bool(given == self.given) or (named and not self.reason)


class Fleet:
    """A list of engines, or a function that returns the list, which may change between updates.

    welcome: called with an engine that joins later, before an update reaches it; raises if the
        engine cannot be updated.
    generation: grows whenever updates reach other engines.
    receivers: the engines with wsync's receiver.
    """

    def __init__(
        self,
        engines: Sequence[Any] | Callable[[], Sequence[Any]],
        offsets: Sequence[int] | None,
        options: Options,
        *,
        ranks: int,
        api_key: str | None,
    ) -> None:
        self.welcome: Callable[[EngineHandle], object] = lambda handle: None
        self.generation = 0
        self.receivers: list[EngineHandle] = []
        self._engines, self._offsets, self._options = engines, offsets, options
        self._ranks, self._api_key = ranks, api_key
        self._members: list[_Member] = []
        self._joining: list[tuple[Any, Future[_Member]]] = []  # that have not answered yet
        self._waiting: dict[str, str] = {}  # engines that cannot join yet, each with the reason
        self._reached: list[EngineHandle] = []
        self._earlier: list[_Member] = []  # that were lost before the current update
        self._spared = False  # whether the current update has spared an engine
        self._refusals = set[str]()  # of the current update

    @property
    def handles(self) -> list[EngineHandle]:
        """The engines that updates reach."""
        return [member.handle for member in self._members if not member.reason]

    @property
    def engines(self) -> list[RolloutEngine]:
        """The descriptions of the engines that updates reach."""
        return [member.engine for member in self._members if not member.reason]

    @property
    def known(self) -> list[EngineHandle]:
        """The engines that updates reach, and lost ones."""
        return [member.handle for member in self._members]

    @property
    def lost(self) -> dict[str, str]:
        """The engines that updates go without, by name, each with the reason."""
        lost = {each.handle.name: each.reason for each in self._members if each.reason}
        return lost | self._waiting

    def connect(self) -> None:
        """Describes the engines for the first time; raises the error of any of them.  But if a
        function lists them and lost="continue", updates go without engines that do not answer."""
        if callable(self._engines) and self._options.lost == "continue":
            self._list(first=True)
            check_distinct([m.given for m in self._members], self.handles)
            self._reached = self.handles
            return
        given = listed(self._engines)
        handles = handles_of(given, timeout=self._options.deadline, api_key=self._api_key)
        gpus = self._gpus(len(given))
        each = zip(given, handles, gpus, strict=True)
        self._members = [self._member(engine, handle, gpu) for engine, handle, gpu in each]
        self._reached = self.handles

    def begin(self) -> None:
        """Begins an update.  Takes back engines that have returned: an engine that did not answer
        returns when it answers, an engine that refused an update after a restart.  Lists the
        engines anew if they are given by a function."""
        self._spared, self._refusals = False, set()
        away = [member for member in self._members if member.reason]
        for member, answer in zip(
            away, _ask([m.handle for m in away], _RETURN_SECONDS), strict=True
        ):
            if not isinstance(answer, Exception) and answer != member.answer:
                member.reason = ""
                _log.info("wsync: engine %s is back", member.handle.name)
        if callable(self._engines):
            self._list()
        self._earlier = [member for member in self._members if member.reason]
        self._count()

    def forget(self) -> None:
        """Forgets what the current update has found, because it has failed in the end."""
        for member in self._members:
            if member not in self._earlier:
                member.reason = ""
        self._count()

    def find(
        self,
        engines: Sequence[CheckedEngine],
        error: Exception,
        *,
        late: Container[str],
        grouped: bool,
    ) -> bool:
        """Finds the engines to blame for a failed attempt; returns whether another attempt without
        them may succeed.

        An engine is lost if it does not answer, or if the error names it.  But an engine that was
        restarted is spared once: its connection was closed, and it takes the update from a new one.
        The same is true of an engine that another connection has updated meanwhile (`wsync copy`).
        If a second engine that answers refuses the update for the same reason, the trainer is to
        blame.

        late: engines that have not answered a request.  When a deadline has passed, they are to
        blame: an engine that has waited for them may have been the first to say so.
        grouped: whether engines are members of process groups.  When a member ends, the others
        report an error, too.  So an engine that answers is not to blame for a group's error.
        """
        closed, absent = isinstance(error, PeerClosedError), isinstance(error, DeadlineError)
        passed = absent or _PASSED in str(error)
        grouped = grouped and not isinstance(error, LayoutError | UnsupportedError)
        taken = TAKEN in str(error)
        waiting = passed and any(engine.name in late for engine in engines)
        found, spared, refusals = list[tuple[CheckedEngine, str, Any]](), False, list[str]()
        answers = _ask([engine.handle for engine in engines], _SUSPECT_SECONDS)
        for engine, answer in zip(engines, answers, strict=True):
            named = engine.name in late if waiting else blames(error, engine.name)
            why = str(error if named else answer).rpartition(f"engine {engine.name}: ")[2]
            silent = isinstance(answer, Exception) and (named or passed)
            if silent or isinstance(answer, PeerClosedError):
                found.append((engine, why, None))
            elif not (named or grouped) or isinstance(answer, Exception):
                continue
            elif not self._spared and (
                (closed and engine.restarted_since(answer[0])) or (named and taken)
            ):
                spared = True
                if taken:
                    _log.warning(
                        "wsync: engine %s: %s; this update takes it back", engine.name, why
                    )
            elif named and not grouped:
                if not (closed or absent or waiting):
                    refusals.append(_reason(why))
                # a request that was cut off says nothing about the next one
                cut_off = closed and f"engine {engine.name}: worker " not in str(error)
                stays = "; it stays paused" if engine.stopped else ""
                found.append((engine, why + stays, None if cut_off or taken else answer))
        again = len({*refusals} - self._refusals) < len(refusals)
        if len(found) == len(engines) or not (found or spared) or again:
            return False
        self._spared |= spared
        self._refusals |= {*refusals}
        self._lose(found)
        return True

    def _lose(self, found: Sequence[tuple[CheckedEngine, str, Any]]) -> None:
        """Makes updates go without engines.  found: each with the reason and who answered."""
        for engine, why, answer in found:
            (member,) = (each for each in self._members if each.handle is engine.handle)
            member.reason, member.answer = why, answer
            _log.warning("wsync: updates go without engine %s: %s", engine.name, why)
        self._count()

    def _count(self) -> None:
        now = self.handles
        if [*map(id, now)] != [*map(id, self._reached)]:
            self._reached = now
            self.generation += 1

    def _gpus(self, count: int) -> list[int | None]:
        if self._offsets is None:
            return [None] * count
        gpus = numbers("engine_gpu_offsets", self._offsets)
        if len(gpus) != count:
            raise InvalidArgumentError(f"{len(gpus)} engine_gpu_offsets for {count} engines")
        return [*gpus]

    def _member(self, given: Any, handle: EngineHandle, gpu: int | None) -> _Member:
        engine = RolloutEngine.of(handle, gpu, self._options, self._ranks)
        if engine.delivery not in (Delivery.STOCK, Delivery.BROADCAST):
            self.receivers.append(handle)
        return _Member(given, handle, engine)

    def _join(self, given: Any, gpu: int | None) -> _Member:
        made = handle(given, api_key=self._api_key, timeout=self._options.deadline)
        member = self._member(given, made, gpu)
        self.welcome(made)
        return member

    def _list(self, *, first: bool = False) -> None:
        """Lists the engines anew.  An engine that cannot join does not hold the others up.  The
        first time, only engines that do not answer may be missing, and not all of them."""
        given, former, found = listed(self._engines), self._members, list[_Member | Any]()
        begun, joining = list[Future[_Member]](), self._joining
        for engine, gpu in zip(given, self._gpus(len(given)), strict=True):
            known = [m for m in former if m.stands_for(engine) and m not in found]
            asked = [future for other, future in joining if other is engine or other == engine]
            if not (known or asked):
                asked = [start("wsync-join", partial(self._join, engine, gpu))]
                begun += asked
            found.append(known[0] if known else (engine, asked[0]))
        patient = self._options.lost == "continue"
        wait(begun, _JOIN_SECONDS if patient and not first else self._options.deadline)
        waited, self._waiting, self._joining, self._members = self._waiting, {}, [], []
        for each in found:
            if isinstance(each, _Member):
                self._members.append(each)
                continue
            engine, future = each
            error: Any = TimeoutError("it does not answer yet")
            if not future.done():
                self._joining.append(each)
            elif (error := future.exception()) is None:
                self._members.append(future.result())
                number(future.result().handle, self.known[:-1])
                _log.info("wsync: engine %s joins", self.known[-1].name)
                continue
            last = each is found[-1] and not self._members
            if not patient or (first and (last or not isinstance(error, _SILENT))):
                raise error
            name = without_password(str(engine))
            self._waiting[name] = str(error)
            if waited.get(name) != str(error):
                _log.warning("wsync: updates go without engine %s: %s", name, error)
        if not self._joining:
            self.receivers[:] = [handle for handle in self.receivers if handle in self.known]


def blames(error: Exception, engine: str) -> bool:
    """Whether an error names an engine as its place."""
    return f"engine {engine}: " in str(error)


def _reason(text: str) -> str:
    """What an engine refuses an update for, without what differs between engines."""
    return re.sub(r"\d+", "", text.rpartition(": ")[2])


def _ask(engines: Sequence[EngineHandle], timeout: float) -> list[Any]:
    """Returns who answers for each engine, or the error of one that does not answer."""
    calls = [start("wsync-ask", partial(who_answers, each, Deadline(timeout))) for each in engines]
    wait(calls, timeout)
    late = TimeoutError(f"no answer within {timeout:.0f} s")
    return [call.exception() or call.result() if call.done() else late for call in calls]
