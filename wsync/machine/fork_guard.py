"""What belongs to one process: its threads, sockets and memory are no child's of it."""

import os

from wsync._core import StateError


class Owner:
    """The process in which this was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        """Whether that is this process, and not one that was forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """StateError, which begins with `what`, in another process."""
        if not self:
            raise StateError(
                f"{what}: this belongs to process {self._pid}, which made it; process "
                f"{os.getpid()} was forked from that one, and has to make its own"
            )
