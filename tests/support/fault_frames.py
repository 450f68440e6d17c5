"""A process between a trainer rank and a worker that mishandles one frame of their session."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct

KINDS = {
    "hello": ("up", 1),
    "attach": ("down", 2),
    "begin": ("down", 3),
    "round": ("down", 4),
    "done": ("up", 5),
    "prepared": ("up", 6),
    "commit": ("down", 7),
}
WAYS = ("truncated", "duplicated", "reordered", "stripped")
_LIMIT = 1 << 16


def _receive(source: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = source.recvmsg(_LIMIT, socket.CMSG_SPACE(16 * 4))
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) // 4 * 4])
    return data, list(descriptors)


def _send(target: socket.socket, frame: tuple[bytes, list[int]]) -> None:
    data, descriptors = frame
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
    target.sendmsg([data], rights if descriptors else [])


def _mishandle(frame: tuple[bytes, list[int]], way: str) -> list[tuple[bytes, list[int]]]:
    data, descriptors = frame
    if way == "truncated":
        return [(data[: len(data) // 2], descriptors)]
    if way == "duplicated":
        return [frame, frame]
    return [(data, [])]


def run_between(path: str, kind: str, way: str) -> None:
    """Serves one session; `path`.target holds where it really goes, and `path`.struck is made
    when a frame is mishandled.  Does not return."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.bind(path + ".new")
        listener.listen()
        os.rename(path + ".new", path)
        worker, _ = listener.accept()
        with open(path + ".target", encoding="utf-8") as file:
            target = file.read()
        with worker, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trainer:
            trainer.connect(target)
            _pump(worker, trainer, *KINDS[kind], way, path + ".struck")
    os._exit(0)


def _pump(
    worker: socket.socket,
    trainer: socket.socket,
    direction: str,
    kind: int,
    way: str,
    mark: str,
) -> None:
    """Hands frames on; the first of a kind fares as `way` says."""
    struck = False
    late: list[tuple[socket.socket, tuple[bytes, list[int]]]] = []
    while True:
        ready, _, _ = select.select([worker, trainer], [], [], 0.3 if late else None)
        if not ready:  # nothing has come that it could be exchanged with
            for target, frame in late:
                _send(target, frame)
            late.clear()
        for source in ready:
            target, way_it_goes = (trainer, "up") if source is worker else (worker, "down")
            frame = _receive(source)
            if not frame[0]:
                return
            frames = [frame]
            number = struct.unpack_from("<I", frame[0], 8)[0]
            if not struck and (way_it_goes, number) == (direction, kind):
                struck = True
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                if way == "reordered":
                    late.append((target, frame))
                    continue
                frames = _mishandle(frame, way)
            for one in frames:
                _send(target, one)
            for late_target, late_frame in list(late):
                if late_target is target:
                    _send(target, late_frame)
                    late.clear()
            if not late:
                for descriptor in frame[1]:
                    os.close(descriptor)
