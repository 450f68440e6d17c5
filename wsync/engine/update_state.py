"""Whose update an engine takes, where several trainers may talk to it."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from wsync._core import InvalidArgumentError, StateError
from wsync.messages.control import Control

if TYPE_CHECKING:
    from wsync.engine.receiver import Receiver

_ID: Final = re.compile(r"[0-9a-f]{1,64}")
_REMEMBERED: Final = 1024
_CROWDED: Final = (
    "the engine was paused again before it continued: two trainers may be at work, and this "
    "request does not say to whose update it belongs"
)
UNKNOWN_VERSION: Final = "unknown"
"""What weights are called that came without a version."""


class UpdateState:
    """The update that an engine was paused for, until it continues, and the version of its weights.

    A trainer makes up an id for each update, and says it with everything that it asks for.  Of
    those that say none (`update` is "", as slime's and SGLang's own), a pause is all that can be
    seen; where a second one pauses before the engine has continued, nothing tells whose a later
    request is.

    weight_version: changes only with all weights of one update.
    """

    def __init__(self, receiver: Receiver, weight_version: str = "default") -> None:
        self.weight_version = weight_version
        self._receiver = receiver
        self._lock = threading.Lock()
        self._now: str | None = None
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)

    def begin(self, update: str) -> None:
        """The engine is paused for an update.  StateError for one that has ended."""
        _check_id(update)
        with self._lock:
            if update and update == self._now:
                return
            if update in self._ended:
                raise StateError(f"update {update} has ended; this pause comes late")
            crowded = update == self._now
            self._end()
            self._now = update
            if crowded:
                self._receiver.buckets.forget(_CROWDED)
            else:
                self._receiver.buckets.begin(named=bool(update))

    def go_on(self, update: str) -> bool:
        """The engine is to continue: False if this update's trainer has had it do so before.
        StateError while the weights are inconsistent or have no version yet, and where it is
        another update's turn."""
        _check_id(update)
        with self._lock:
            if update and update != self._now:
                if self._now is None and update in self._ended:
                    return False
                raise StateError(self._not_now(update))
            self._check_whole()
            self._end()
            self._receiver.buckets.forget()
            return True

    @contextmanager
    def request(self, update: str, version: str | None) -> Iterator[None]:
        """Around one request's weights; names them once they are all here."""
        receiver = self._receiver
        with ExitStack() as serving:
            with self._taking(update):
                serving.enter_context(receiver.buckets.request())
            receiver.buckets.saying = version
            yield
            if not receiver.trouble:
                said = receiver.buckets.version if version is None else version
                self.weight_version = UNKNOWN_VERSION if said is None else said
            elif update and version is not None:  # said with the last request alone
                raise StateError(f"version {version} is not taken on: {receiver.trouble}")

    def steer(self, control: bytes | None, version: str | None, update: str) -> tuple[bool, str]:
        """Has the receiver handle a control message.  Only a close comes with a version."""
        op = "" if control is None else Control.from_bytes(control).op
        if version is not None and op in ("open", "inspect"):
            raise InvalidArgumentError(
                f"weight_version {version} with {op!r}: it comes with the closing message"
            )
        if op != "inspect":
            self.check(update)
        success, text = self._receiver.handle(control)
        if success and op == "close":
            self.weight_version = UNKNOWN_VERSION if version is None else version
        return success, text

    def regroup(self, update: str) -> None:
        """A process group is made or left: on nobody's behalf, and between two buckets, another
        trainer's."""
        if not update:
            self._receiver.buckets.part()

    def rename(self, version: str, update: str) -> None:
        """Calls the weights something else.  StateError where they are not those of one update."""
        self.check(update)
        self._check_whole()
        self.weight_version = version

    def check(self, update: str) -> None:
        """Before anything is written: StateError if another update's turn it is."""
        with self._taking(update):
            pass

    @contextmanager
    def _taking(self, update: str) -> Iterator[None]:
        """The same, and no other update begins within the block."""
        _check_id(update)
        with self._lock:
            if update and update != self._now:
                raise StateError(self._not_now(update))
            if not update and self._now:
                raise StateError(
                    f"the engine was paused for update {self._now}, and this request does not say "
                    "that it belongs to it; pause first"
                )
            yield

    def _check_whole(self) -> None:
        if self._receiver.trouble:
            raise StateError(self._receiver.trouble)

    def _end(self) -> None:
        if self._now:
            self._ended.append(self._now)
        self._now = None

    def _not_now(self, update: str) -> str:
        if update in self._ended:
            what = f"update {update} has ended: another trainer has paused or continued the engine"
        else:
            what = f"this engine was not paused for update {update}: it may have been restarted"
        return what + (f", which now waits for update {self._now}" if self._now else "")


def _check_id(update: str) -> None:
    if update and not _ID.fullmatch(update):
        raise InvalidArgumentError(f"update id {update[:80]!r}: 1 to 64 lower-case hex digits")
