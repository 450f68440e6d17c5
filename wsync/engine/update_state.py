"""Whether the weights of an engine worker are those of one update, and of which one.

WHOLE     they are those of one update, whose version is `weight_version`
UNNAMED   they are those of one update, and its closing message will give the version
LOST      they are not those of one update

the first byte of an update is written    LOST
commit                                    UNNAMED
close                                     WHOLE; refused if LOST, or if another update was committed
replacing                                 LOST, then WHOLE
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from wsync._core import StateError

UNKNOWN_VERSION: Final = "unknown"
"""The version of weights that came without one."""


class UpdateState:
    """The state machine above, usable from any thread.

    weight_version: changes once all weights of an update are here, but before `trouble` becomes "";
    so read `trouble` first.
    consistent: False from the first byte written until all weights are those of one update.
    reason: why the weights are inconsistent; "" if they are consistent.
    update: number of the last update that was committed by a control message; None if there is
    none.
    verified: what the last comparison of the weights found (see wsync.inspection.EngineReport);
    None if they were never compared.
    """

    def __init__(self) -> None:
        self.weight_version = "default"
        self.consistent = True
        self.reason = ""
        self.update: int | None = None
        self.verified: dict[str, Any] | None = None
        self._busy = threading.Lock()
        self._session = ""  # that delivered the weights
        self._unnamed = ""

    @property
    def trouble(self) -> str:
        """Why the engine must not generate; "" if it may."""
        return self._unnamed if self.consistent else self.reason

    def check_whole(self) -> None:
        """Raises StateError if the weights are not those of one update, or have no version yet."""
        if self.trouble:
            raise StateError(self.trouble)

    @contextmanager
    def only(self) -> Iterator[None]:
        """Reserves the weights for the block.  StateError: another update is running."""
        if not self._busy.acquire(blocking=False):
            raise StateError("another update is running")
        try:
            yield
        finally:
            self._busy.release()

    def lose(self, why: str) -> None:
        """Records that the weights are no longer those of one update."""
        self.consistent, self.reason = False, f"the weights are inconsistent: {why}"
        self._outdate()

    def commit(self, session: str, number: int) -> None:
        """Records that an update has replaced every weight.  Its closing message is yet to come."""
        self.update = number
        self._unnamed = f"update {number} is complete, but its version has not been given yet"
        self._whole(session)

    def close(self, session: str, number: int, version: str | None) -> None:
        """Follows an update's closing message.  StateError if the weights are not that update's.
        The session must match, too: each trainer counts from 1, and an old message may be late.
        """
        if not self.consistent:
            raise StateError(self.trouble)
        if (self._session, self.update) != (session, number):
            raise StateError(
                f"the weights are not those of update {number} of this connection: that update "
                "was not committed here, or other weights have replaced it since"
            )
        self.rename(version)

    def bucket_loaded(self, version: str | None) -> None:
        """Records that a part of the weights was loaded without an update.  As in SGLang, the last
        part has a version, and that becomes the version of all weights."""
        self._outdate()
        if version is not None:
            self.rename(version)
            self._whole()

    @contextmanager
    def replacing(self, what: str, version: str | None) -> Iterator[None]:
        """Wraps code that replaces every weight without an update.  `version` is the version of the
        weights afterwards."""
        with self.only():
            try:
                self.lose(what)
                yield
            except BaseException as error:
                self.reason += f": {error}"
                raise
            self.rename(version)
            self._whole()

    def rename(self, version: str | None) -> None:
        """Sets the version of the weights."""
        self.weight_version = UNKNOWN_VERSION if version is None else version
        self._unnamed = ""

    def _outdate(self) -> None:
        if self.verified is not None:
            self.verified["current"] = False

    def _whole(self, session: str = "") -> None:
        self._session, self.reason = session, ""
        self.consistent = True  # last: a thread that reads True must find the other fields set
