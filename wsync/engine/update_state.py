"""Whether the weights of an engine worker are those of one update, and of which one.

WHOLE     they are those of one update, called `weight_version`
UNNAMED   they are those of one update that says its version with the closing message
LOST      they are not those of one update

the first byte of an update is written    LOST
commit                                    UNNAMED
close                                     WHOLE; refused if LOST, or for another update's commit
replacing                                 LOST, then WHOLE
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from wsync._core import StateError

UNKNOWN_VERSION: Final = "unknown"
"""What weights are called that came without a version."""


class UpdateState:
    """The state machine above, from any thread.

    weight_version: changes only with all weights of one update, before `trouble` says that they
    are here; read `trouble` first.
    consistent: False from the first byte written until all weights are those of one update.
    reason: why they are not, or "".
    update: number of the last update that was committed by a control message, or None.
    """

    def __init__(self) -> None:
        self.weight_version = "default"
        self.consistent = True
        self.reason = ""
        self.update: int | None = None
        self._busy = threading.Lock()
        self._session = ""  # that the weights came by
        self._unnamed = ""

    @property
    def trouble(self) -> str:
        """Why the engine must not generate, or ""."""
        if self.consistent:
            return self._unnamed
        return self.reason or "the weights are inconsistent"

    def check_whole(self) -> None:
        """StateError where the weights are not those of one update, or have no version yet."""
        if self.trouble:
            raise StateError(self.trouble)

    @contextmanager
    def only(self) -> Iterator[None]:
        """Around what must be alone with the weights.  StateError where something else is."""
        if not self._busy.acquire(blocking=False):
            raise StateError("another update is running")
        try:
            yield
        finally:
            self._busy.release()

    def lose(self, why: str) -> None:
        """The weights are not those of one update any more."""
        self.consistent, self.reason = False, f"the weights are inconsistent: {why}"

    def commit(self, session: str, number: int) -> None:
        """Every weight has been replaced by an update whose closing message is to come."""
        self.update = number
        self._unnamed = f"update {number} is complete, but nobody has said its version yet"
        self._whole(session)

    def close(self, session: str, number: int, version: str | None) -> None:
        """The closing message of an update.  StateError if the weights are not that update's:
        trainers count from 1, and a late message of one that is gone would fit another's."""
        if not self.consistent:
            raise StateError(self.trouble)
        if (self._session, self.update) != (session, number):
            raise StateError(
                f"the weights are not those of update {number} of this connection: it was not "
                "committed here, or they have been replaced since"
            )
        self.rename(version)

    def bucket_loaded(self, version: str | None) -> None:
        """A part of the weights was loaded by other means than an update.  As in SGLang, the bucket
        that has a version is the last one, and all weights are called that."""
        if version is not None:
            self.rename(version)
            self._whole()

    @contextmanager
    def replacing(self, what: str, version: str | None) -> Iterator[None]:
        """Around the replacement of every weight by other means than an update; the weights are
        then called `version`."""
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
        """What the weights are called from now on."""
        self.weight_version = UNKNOWN_VERSION if version is None else version
        self._unnamed = ""

    def _whole(self, session: str = "") -> None:
        self._session, self.reason = session, ""
        self.consistent = True  # comes last: whoever reads this must find what the rest is now
