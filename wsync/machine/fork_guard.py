"""What belongs to one process: its threads, sockets and memory are no child's of it."""

import os
import socket
import weakref
from typing import Final

from wsync._core import StateError

_SOCKETS: Final = weakref.WeakSet[socket.socket]()


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


def private(connection: socket.socket) -> socket.socket:
    """The socket, which processes that are forked from this one do not keep: while one of them had
    it open, the other end would not hear that this process has ended.  (Sessions on one host do the
    same, csrc/ipc/private_fd.h.)"""
    _SOCKETS.add(connection)
    return connection


def _after_fork() -> None:
    for connection in list(_SOCKETS):
        connection.close()


os.register_at_fork(after_in_child=_after_fork)
