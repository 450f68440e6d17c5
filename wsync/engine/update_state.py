"""The state of updates at one engine worker: which one it is, what of it has come, and whether the
weights are those of one update.

A trainer makes up an id for each update and sends it with each request (see
wsync.messages.control.UPDATE_HEADER).  slime's and SGLang's own trainers send none; an id is then
"", and a pause is all that tells one update from the next.

States of an update:

    NONE      the engine was not paused, or has continued
    BEGUN     the engine was paused for it; no bucket has come
    PARTIAL   some buckets have come
    COMPLETE  buckets have brought every tensor
    ENDED     no more buckets of it are taken; what replaces every weight at once is

States of the weights:

    WHOLE     those of one update, called `weight_version`
    UNNAMED   those of one update that says its version later: with the closing message, or with
              the last bucket, which may bring nothing that the engine lacks
    LOST      not those of one update

    event             update becomes       weights become      refused
    begin             BEGUN                                     the id has ended, or a later one
                                                                of its trainer has come
      with id, again  (stays)
      no id, again    BEGUN or ENDED                            (see `begin`)
    bucket            PARTIAL, COMPLETE    LOST, WHOLE, or      NONE, ENDED; another update's turn;
                                           UNNAMED with an id   not this update's (see `admit`)
    every tensor at   COMPLETE, or stays   WHOLE                another update's turn
      once            NONE or ENDED
    a request fails   ENDED                (LOST if it wrote)
    replacing, open   ENDED                LOST, then WHOLE     something is being written
      its commit                           UNNAMED
    close                                  WHOLE                LOST; another update's commit;
                                                                others have written since
    regroup, no id    ENDED if buckets
                      have come
    rename                                                      not WHOLE; another update's turn
    go_on             NONE                                      not WHOLE; another update's turn

Whatever is refused changes nothing, with one exception: a bucket that reveals two trainers without
ids ends the update.  The weights become LOST if they may be of both: they came in several buckets,
and some of these said no version.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from wsync._core import InvalidArgumentError, StateError, WsyncError
from wsync.machine.try_lock import Turn

_ID: Final = re.compile(r"[0-9a-f]{1,64}")
_SERIES: Final = slice(0, 16)  # of an id: the same in all of one trainer, with a count behind it
_REMEMBERED: Final = 1024
UNKNOWN_VERSION: Final = "unknown"
"""What weights are called that came without a version."""

# every refusal of this module
REFUSALS: Final = {
    "bad id": "update id {id!r}: 1 to 64 lower-case hex digits",
    "late pause": "update {id} has ended; this pause comes late",
    "ended": "update {id} has ended: another trainer has paused or continued the engine{now}",
    "not paused": "this engine was not paused for update {id}: it may have been restarted{now}",
    "no id": "the engine was paused for update {id}, and this request does not say that it belongs "
    "to it; pause first",
    "busy": "another update is running",
    "no version": "version {version} is not taken on: {trouble}",
    "unpaused": "an update in several requests begins with a pause, and ends when every tensor has "
    "come, with a failure, another pause, a continue, or another way of updating",
    "contested": "the engine was paused again before it continued: two trainers may be at work, "
    "and this request does not say to whose update it belongs",
    "abandoned": "weight_version {version}: the engine was paused again before that update was "
    "complete; buckets are taken that say another version",
    "meanwhile": "the engine was paused for another update while this bucket was received",
    "repeated": "{what} in this update: the request was repeated",
    "two trainers": "{what}: two trainers may be at work",
    "inconsistent": "the weights are inconsistent: {why}",
    "not committed": "update {number} of this connection was not committed here, the last "
    "one is {last}",
    "replaced": "the weights have been replaced by others after update {number} of this connection",
    "unnamed": "update {number} is complete, but nobody has said its version yet",
}


class Refused(StateError):
    """A bucket that is none of the update's, which goes on without it; nothing was written."""


class Repeated(Refused):
    """A bucket that the update has brought before, in a request that has been answered."""


class Ended(StateError):
    """A request of an update that has ended: its trainer has failed, or has sent it long ago."""


@dataclass(eq=False, slots=True)
class _Update:
    """One update at this worker.  Another one is another object."""

    id: str | None = None  # None: the engine was not paused
    ended: str = REFUSALS["unpaused"]  # why no bucket is taken, or ""
    abandoned: frozenset[str] = frozenset()  # versions of others, whose trainers may go on
    heard: set[str | None] = field(default_factory=set)  # versions that its buckets said
    origin: str | None = None
    came: set[str] = field(default_factory=set)
    missing: set[str] | None = None  # before the first bucket
    version: str | None = None
    mixed: bool = False  # whether its buckets may be of several trainers

    @property
    def complete(self) -> bool:
        return self.missing is not None and not self.missing

    def end(self, why: str = REFUSALS["unpaused"]) -> None:
        self.ended, self.origin, self.version = why, None, None
        self.came, self.missing = set(), None


class UpdateState:
    """The state machine above, from any thread.

    weight_version: changes only with all weights of one update, before `trouble` says that they
    are here; read `trouble` first.
    consistent: False from the first byte written until all weights are those of one update.
    reason: why they are not, or "".
    update: number of the last update that was committed by a control message, or None.
    request: what an engine calls the request that it has this worker carry out; weights: the
    request that last replaced all weights, which tells whether the workers of one engine hold
    the same.
    loads: how often weights were loaded by other means than a receiver's update (a bucket, a
    broadcast, files); None if its owner does not tell it of all of them.
    """

    def __init__(self, *, told: bool = False) -> None:
        self.weight_version = "default"
        self.consistent = True
        self.reason = ""
        self.update: int | None = None
        self.request = self.weights = 0
        self.loads: int | None = 0 if told else None
        self._busy = Turn()
        self._lock = threading.RLock()  # a pause may come while a bucket is let in
        self._now = _Update()
        self._past: deque[str] = deque(maxlen=_REMEMBERED)
        self._committed = ""  # the session that the weights came by
        self._unnamed = ""
        self._serving: _Update | None = None  # that the request under way is of
        self._said: str | None = None  # the version that this request says

    @property
    def trouble(self) -> str:
        """Why the engine must not generate, or ""."""
        if self.consistent:
            return self._unnamed
        return self.reason or "the weights are inconsistent"

    # --- whose turn it is ---------------------------------------------------------------------

    def begin(self, update_id: str) -> None:
        """The engine is paused for an update.

        Where two trainers without ids have paused, nothing tells whose a later bucket is, except
        the version that it says: the later update takes buckets of a version that none of the
        earlier one has said, if each of these has said one.
        """
        self._check_id(update_id)
        with self._lock:
            now = self._now
            if update_id and update_id == now.id:
                return
            if self._is_late(update_id):
                raise _refusal("late pause", id=update_id)
            self._pass(_Update(update_id, ""))
            if update_id or now.id is None or now.id:
                return
            versions = {version for version in now.heard if version is not None}
            if versions and len(versions) == len(now.heard):
                self._now.abandoned = now.abandoned | versions
            else:
                self._now.end(REFUSALS["contested"])

    def go_on(self, update_id: str) -> bool:
        """The engine is to continue: False if this update's trainer has had it do so before."""
        self._check_id(update_id)
        with self._lock:
            if update_id and self._now.id is None and update_id in self._past:
                return False
            if update_id:
                self._check_turn(update_id)
            self.check_whole()
            self._pass(_Update())
            return True

    def check(self, update_id: str) -> None:
        """StateError if it is another update's turn."""
        self._check_id(update_id)
        with self._lock:
            self._check_turn(update_id)

    def check_whole(self) -> None:
        """StateError where the weights are not those of one update."""
        if self.trouble:
            raise StateError(self.trouble)

    def rename(self, version: str, update_id: str) -> None:
        """Calls the weights something else."""
        self.check(update_id)
        self.check_whole()
        self.weight_version = version

    def regroup(self, update_id: str) -> None:
        """A process group is made or left.  Without an id, and between two buckets, it may be
        another trainer's."""
        with self._lock:
            if not update_id and self._now.came:
                self._now.end()

    def _pass(self, to: _Update) -> None:
        if self._now.id:
            self._past.append(self._now.id)
        self._now = to

    def _is_late(self, update_id: str) -> bool:
        """Whether the update has ended, or began before another one of its trainer."""
        size, series = len(update_id), update_id[_SERIES]
        known = [each for each in (*self._past, self._now.id) if each and len(each) == size]
        return any(each >= update_id for each in known if each[_SERIES] == series)

    def _check_id(self, update_id: str) -> None:
        if update_id and not _ID.fullmatch(update_id):
            raise _refusal("bad id", InvalidArgumentError, id=update_id[:80])

    def _check_turn(self, update_id: str) -> None:
        current = self._now.id
        if update_id and update_id != current:
            now = f", which now waits for update {current}" if current else ""
            if update_id in self._past:
                raise _refusal("ended", Ended, id=update_id, now=now)
            raise _refusal("not paused", id=update_id, now=now)
        if not update_id and current:
            raise _refusal("no id", id=current)

    # --- weights in requests ------------------------------------------------------------------

    @contextmanager
    def serving(self, update_id: str, version: str | None) -> Iterator[None]:
        """Around one request's weights.  They are called `version` once all are here; if the block
        fails, its update has ended, but not one that began meanwhile."""
        self._check_id(update_id)
        with self._lock:
            self._check_turn(update_id)
            self._serving = mine = self._now
            self._said = version
        try:
            yield
            if not self.trouble or (self.consistent and version is not None and mine.complete):
                self._name(mine, version)
                self._unnamed = ""
            elif update_id and version is not None:  # sent only with the last request
                raise _refusal("no version", version=version, trouble=self.trouble)
        except Refused:
            raise
        except BaseException:
            mine.end()
            raise
        finally:
            self._serving = self._said = None

    @contextmanager
    def loading(
        self, names: Collection[str], tensors: Mapping[str, str], origin: str = ""
    ) -> Iterator[frozenset[str]]:
        """Around what writes a bucket to the weights; gives the names that the update has brought
        before.

        names: what the bucket brings; tensors: the tensor that each name stands for, of all that
        an update has to bring; origin: the connection that the bucket came by, where that is
        known.
        """
        with self._lock:
            whole, now = self.admit(names, tensors, origin), self._now
            if now.missing is None or (whole and not self._goes_on(now, names)):
                now.came, now.missing, now.version = set(), set(tensors.values()), None
            now.origin = origin
            now.version = self._said if now.version is None else now.version
            now.heard.add(self._said)
            now.mixed = not whole and (now.mixed or self._said is None)
            came, missing = now.came, now.missing
        with self.writing("a bucket is being loaded"):
            yield frozenset(came)
            self._count()
            came.update(names)
            missing.difference_update(tensors[name] for name in names if name in tensors)
            if missing:
                self.lose(
                    f"an update in buckets has yet to bring {len(missing)} tensors, "
                    f"{min(missing)} among them"
                )
            elif self._now.missing is missing:
                waits = now.id and now.version is None
                self.restored(REFUSALS["unnamed"].format(number=now.id) if waits else "")

    def admit(self, names: Collection[str], tensors: Mapping[str, str], origin: str = "") -> bool:
        """What `loading` asks first, for callers that must know before they receive a bucket;
        returns whether it brings every tensor.  Refused, before anything is written, if it is not
        the update's."""
        now, said = self._now, self._said
        whole = set(tensors.values()) <= {tensors[name] for name in names if name in tensors}
        if self._serving not in (None, now):
            raise _refusal("meanwhile", Refused)
        if whole and (now.ended or not now.id):
            return True
        if now.ended:
            raise Refused(now.ended)
        if now.abandoned and (said is None or said in now.abandoned):
            raise _refusal("abandoned", Refused, version=said)
        kind: type[Refused] = Refused
        again = next((name for name in names if name in now.came), None)
        if again is not None:
            kind = Repeated
            what = f"{again} has come before"
        elif now.origin not in (None, origin):
            what = "a bucket comes by another group"
        elif said is not None and now.version not in (None, said):
            what = f"weight_version {said} after {now.version}"
        else:
            return whole
        if now.id:
            raise _refusal("repeated", kind, what=what)
        now.end(REFUSALS["two trainers"].format(what=what))
        if now.mixed:
            self.lose(now.ended)
        raise Refused(now.ended)

    def _goes_on(self, now: _Update, names: Collection[str]) -> bool:
        """Whether a bucket of every tensor is one more of an update in buckets: other names of
        tensors may have come before."""
        return bool(
            now.id or (now.missing and self._said == now.version and now.came.isdisjoint(names))
        )

    # --- the weights --------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """The weights are not those of one update any more."""
        self.consistent, self.reason = False, REFUSALS["inconsistent"].format(why=why)

    def restored(self, unnamed: str = "") -> None:
        """Every weight has been replaced; they are called what the request under way says, or by
        a later one: `unnamed` says so."""
        self._unnamed = unnamed
        if not unnamed:
            self._name(self._serving, self._said)
        self._whole()

    def commit(self, session: str, number: int) -> None:
        """Every weight has been replaced by an update whose closing message is to come."""
        self.update = number
        self._unnamed = REFUSALS["unnamed"].format(number=number)
        self._whole(session)

    def overwritten(self) -> None:
        """Others write to the weights, in a way of the engine's own: they are not those of the
        update that was committed."""
        self._committed = ""
        self._count()

    def _count(self) -> None:
        if self.loads is not None:
            self.loads += 1

    def _name(self, update: _Update | None, said: str | None) -> None:
        """Calls the weights what a request said, or else what an earlier one of its update did."""
        if said is None and update is not None:
            said = update.version
        self.weight_version = UNKNOWN_VERSION if said is None else said

    def _whole(self, session: str = "") -> None:
        self._committed = session
        self.reason, self.weights = "", self.request
        self.consistent = True  # comes last: whoever reads this must find what the rest is now

    def close(self, session: str, number: int, version: str | None) -> None:
        """The closing message of an update.  StateError if the weights are not that update's:
        trainers count from 1, and a late message of one that is gone would fit another's."""
        if not self.consistent:
            raise StateError(self.trouble)
        if self.update != number:
            last = "none" if self.update is None else self.update
            raise _refusal("not committed", number=number, last=last)
        if self._committed != session:
            raise _refusal("replaced", number=number)
        self.weight_version = UNKNOWN_VERSION if version is None else version
        self._unnamed = ""

    @contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        """Around the replacement of every weight by other means than an update."""
        with self.writing(what):
            self.end_buckets()
            yield
            self._count()
            self.restored()

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Around what writes to some of the weights: they are LOST until `restored`."""
        with self.only():
            try:
                self.lose(what)
                yield
            except BaseException as error:
                self.reason += f": {error}"
                raise

    def only(self) -> AbstractContextManager[None]:
        """Around what must be alone with the weights.  StateError where something else is."""
        return self._busy.taken(lambda: _refusal("busy"))

    def end_buckets(self) -> None:
        """No more buckets are taken in this update: there is another way of updating."""
        with self._lock:
            self._now.end()


def _refusal(text: str, kind: type[WsyncError] = StateError, **values: object) -> WsyncError:
    return kind(REFUSALS[text].format(**values))
