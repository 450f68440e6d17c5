"""One at a time, whatever interrupts whom."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Turn:
    """What one caller has at a time, and nobody waits for."""

    def __init__(self) -> None:
        self._holder: dict[str, list[int]] = {}

    @property
    def own(self) -> bool:
        """Whether the caller in such a block is this thread."""
        return self._holder.get("token") == [threading.get_ident()]

    @contextlib.contextmanager
    def taken(self, refusal: Callable[[], Exception]) -> Iterator[None]:
        """Around what must be alone; raises `refusal()` where somebody else is in such a block.

        A lock that is acquired before `try` stays so for ever if an exception, such as that of
        Ctrl-C, comes between the two.  So the holder has a token, whose taking is one step of the
        interpreter, and which is given back wherever it is found to be this caller's.
        """
        mine = [threading.get_ident()]  # a new object
        try:
            try:
                if self._holder.setdefault("token", mine) is not mine:
                    raise refusal()
                yield
            finally:
                self._give_back(mine)
        finally:
            self._give_back(mine)  # where an interrupt has hit the one above

    def _give_back(self, mine: list[int]) -> None:
        if self._holder.get("token") is mine:
            del self._holder["token"]
