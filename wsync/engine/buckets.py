"""Weights that come in buckets, each in a request of its own, as stock engines take them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsync.engine.receiver import Receiver


class Buckets:
    """What one worker has been brought of an update in buckets.

    No request says that an update begins or ends.  One begins with the first bucket after
    `forget`, or with a bucket that brings a tensor once more or comes from elsewhere, and it has
    ended when every tensor has come; the worker is inconsistent until then.  So a trainer that
    dies between two buckets leaves no engine that generates with half of its weights, and what
    two updates have brought, one after the other or at once, never counts as one.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._origin = ""
        self.forget()

    def forget(self) -> None:
        """The next bucket begins an update: the engine has been paused, has joined or left a
        group, is being updated in another way, or a bucket has failed."""
        self._came: set[str] = set()
        self._missing: set[str] | None = None  # before the first bucket

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around all that is done for one bucket: if it fails, the update has."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    @contextmanager
    def loading(
        self, names: Collection[str], tensors: Mapping[str, str], origin: str = ""
    ) -> Iterator[frozenset[str]]:
        """Around what writes a bucket to the weights; gives the names that the update has brought
        before.

        names: what the bucket brings; tensors: the tensor that each name stands for, of all that
        an update has to bring; origin: the connection that the bucket came by, where that is
        known.  StateError while an update of another kind runs.
        """
        if self._missing is None or origin != self._origin or not self._came.isdisjoint(names):
            self._came, self._missing = set(), set(tensors.values())
            self._origin = origin
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
