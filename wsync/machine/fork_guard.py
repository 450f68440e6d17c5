"""Guards objects that belong to one process, because a fork lacks the threads, sockets and
memory."""

import os

from wsync._core import StateError


class Owner:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        """Whether this process made the object, and is not a fork of the process that did."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raises StateError in another process; its text begins with `what`."""
        if not self:
            raise StateError(
                f"{what}: this belongs to process {self._pid}, which made it. Process "
                f"{os.getpid()} was forked from that process, and must make its own"
            )
