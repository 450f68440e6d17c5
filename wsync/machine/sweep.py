"""Removes what processes that are gone have left behind."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time

_FOLDER = re.compile(r"wsync-[A-Za-z0-9]{6}")  # of one listening socket; see csrc/ipc/listener.c
_STALE_SECONDS = 60.0  # a folder this young may belong to a process that does not listen yet


def sweep(directory: str | None) -> None:
    """Removes the socket folders that killed processes of this user have left behind.

    A socket that refuses connections belongs to nobody any more, in whatever container.
    """
    # listener.c takes /tmp where TMPDIR is too long for a socket's path
    for parent in {directory} if directory else {os.environ.get("TMPDIR", "/tmp"), "/tmp"}:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                if _FOLDER.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        _sweep_one(entry.path)


def _sweep_one(folder: str) -> None:
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return
    if time.time() - facts.st_mtime < _STALE_SECONDS:
        return
    path = os.path.join(folder, "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)  # a full queue of a living listener is an answer, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            os.rmdir(folder)
        except FileNotFoundError:  # killed before it listened, or after
            os.rmdir(folder)
