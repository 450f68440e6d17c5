"""Weights that come in buckets, each in a request of its own, as stock engines take them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wsync._core import StateError

if TYPE_CHECKING:
    from wsync.engine.receiver import Receiver

_UNPAUSED: Final = (
    "an update in several requests begins with a pause, and ends when every tensor has come, with "
    "a failure, another pause, a continue, or another way of updating"
)


class Refused(StateError):
    """A bucket that is none of the update's, which goes on without it; nothing was written."""


class Repeated(Refused):
    """A bucket that the update has brought before, in a request that has been answered."""


class Buckets:
    """What one worker has been brought of an update in buckets.

    One begins with `begin`, takes every tensor once, and has ended when all have come; the worker
    is inconsistent from the first one until then.  So a trainer that dies between two buckets
    leaves no engine that generates with half of its weights, and what two updates have brought,
    one after the other or at once, never counts as one.  A bucket that brings every tensor is an
    update by itself.

    saying: the version that the request under way says; version: what those of the update said.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._lock = threading.RLock()  # a pause may come while a bucket is let in
        self.saying: str | None = None
        self._begun = 0  # updates
        self._served: int | None = None  # which of them the request under way is of
        self.forget()

    def begin(self, named: bool = False) -> None:
        """An update may come.  named: its buckets say that they are its own, so that one that
        comes twice has been repeated on its way, and is no sign of another trainer."""
        with self._lock:
            self.forget()
            self._begun += 1
            self._named = named
            self._why = ""

    def forget(self, why: str = _UNPAUSED) -> None:
        """None may come any more: another way of updating is used, a bucket has failed, or
        whatever `why` says."""
        with self._lock:
            self._why = why
            self._named = False
            self._origin: str | None = None
            self._came: set[str] = set()
            self._missing: set[str] | None = None  # before the first bucket
            self.version: str | None = None

    def part(self) -> None:
        """Ends an update of which buckets have come."""
        if self._came:
            self.forget()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around all that is done for one bucket, one after another: if it fails, the update has,
        but not one that began meanwhile."""
        self._served = mine = self._begun
        try:
            yield
        except Refused:
            raise
        except BaseException:
            if self._begun == mine:
                self.forget()
            raise
        finally:
            self._served = None

    @contextmanager
    def loading(
        self, names: Collection[str], tensors: Mapping[str, str], origin: str = ""
    ) -> Iterator[frozenset[str]]:
        """Around what writes a bucket to the weights; gives the names that the update has brought
        before.

        names: what the bucket brings; tensors: the tensor that each name stands for, of all that
        an update has to bring; origin: the connection that the bucket came by, where that is
        known.  StateError, before anything is written, for a bucket that is not the update's, and
        while an update of another kind runs.
        """
        with self._lock:
            whole = self.admit(names, tensors, origin)
            if self._missing is None or whole:
                self._came, self._missing = set(), set(tensors.values())
                self.version = None
            self._origin = origin
            self.version = self.saying if self.version is None else self.version
            came, missing = self._came, self._missing
        with self._receiver.writing("a bucket is being loaded"):
            yield frozenset(came)
            came.update(names)
            missing.difference_update(tensors[name] for name in names if name in tensors)
            if missing:
                self._receiver.lose(
                    f"an update in buckets has yet to bring {len(missing)} tensors, "
                    f"{min(missing)} among them"
                )
            elif missing is self._missing:
                self._receiver.restored()

    def admit(self, names: Collection[str], tensors: Mapping[str, str], origin: str = "") -> bool:
        """What `loading` asks first, for those who must know before they receive a bucket; whether
        it brings every tensor."""
        whole = set(tensors.values()) <= {tensors[name] for name in names if name in tensors}
        if self._served not in (None, self._begun):
            raise Refused("the engine was paused for another update while this bucket was received")
        if whole and not self._named:
            return True
        if self._why:
            raise Refused(self._why)
        kind: type[Refused] = Refused
        again = next((name for name in names if name in self._came), None)
        if again is not None:
            kind = Repeated
            what = f"{again} has come before"
        elif self._origin not in (None, origin):
            what = "a bucket comes by another group"
        elif self.saying is not None and self.version not in (None, self.saying):
            what = f"weight_version {self.saying} after {self.version}"
        else:
            return whole
        if not self._named:
            self.forget(f"{what}: two trainers may be at work")
            raise Refused(self._why)
        raise kind(f"{what} in this update: the request was repeated")
