"""The other process of the `gpu` benchmark: it maps what it is sent, and answers questions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from benchmarks.gpu_device import SECONDS, each_span, fill, one_each, read
from wsync import _core
from wsync.machine import device


class Peer:
    """A process that is asked one question at a time, with descriptors beside it."""

    def __init__(self, uuid: str) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._pipe, pipe = context.Pipe()
            self._socket = ours
            key = bytes(multiprocessing.current_process().authkey)
            self._process = context.Process(target=_serve, args=(pipe, theirs, uuid, key))
            self._process.start()
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._socket.close()
        self._process.join(SECONDS)

    def tell(self, what: str, *arguments: Any, fds: tuple[int, ...] = ()) -> None:
        self._pipe.send((what, arguments, len(fds)))
        if fds:
            socket.send_fds(self._socket, [b"."], list(fds))

    def answer(self) -> Any:
        if not self._pipe.poll(SECONDS):
            raise TimeoutError(f"no answer from the other process within {SECONDS:g} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def ask(self, what: str, *arguments: Any, fds: tuple[int, ...] = ()) -> Any:
        self.tell(what, *arguments, fds=fds)
        return self.answer()


def _serve(pipe: Connection[Any, Any], sockets: socket.socket, uuid: str, key: bytes) -> None:
    # torch hands tensors to processes that know the same key
    multiprocessing.current_process().authkey = key
    state = _State(device.find(uuid))
    while True:
        try:
            what, arguments, count = pipe.recv()
        except EOFError:
            return
        fds = socket.recv_fds(sockets, 1, count)[1] if count else []
        try:
            pipe.send((True, getattr(state, what)(*arguments, *fds)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
        finally:
            for fd in fds:
                os.close(fd)


class _State:
    def __init__(self, found: _core.Device) -> None:
        self._device = found
        self._stream = _core.Stream(1, found)
        self._memory: _core.Memory | None = None
        self._tensor: torch.Tensor | None = None

    # --- memory ----------------------------------------------------------------------------------

    def map(self, nbytes: int, fd: int) -> float:
        """Seconds to map memory that another process has made."""
        start = time.perf_counter()
        self._memory = _core.Memory.from_fd(fd, nbytes, self._device)
        return time.perf_counter() - start

    def sum(self, nbytes: int) -> int:
        assert self._memory is not None
        return _core.checksum(read(self._stream, self._memory, nbytes).numpy())

    def unmap(self) -> float:
        start = time.perf_counter()
        self._memory = None
        return time.perf_counter() - start

    def rebuild(self, data: bytes) -> float:
        """Seconds to map a tensor that torch has pickled."""
        start = time.perf_counter()
        self._tensor = pickle.loads(data)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def drop(self) -> float:
        start = time.perf_counter()
        self._tensor = None
        return time.perf_counter() - start

    def rest(self, address: str, nbytes: int) -> int:
        """Takes part in an update of no round, after which the ring is parked, and in one of one
        round; returns what that began with."""
        importer = _core.Importer(address, b"", SECONDS, self._device)
        importer.begin(SECONDS)
        importer.prepared(0, 0, 0, SECONDS)
        importer.verdict(SECONDS)
        importer.begin(SECONDS)
        importer.take(0, self._stream, SECONDS)
        found = _core.checksum(read(self._stream, importer.ring, nbytes).numpy())
        importer.done(0, self._stream, SECONDS)
        importer.prepared(0, 0, 0, SECONDS)
        importer.verdict(SECONDS)
        importer.close()
        return found

    # --- order -----------------------------------------------------------------------------------

    def follow(self, address: str, updates: int, count: int, nbytes: int) -> bytes:
        """Takes part in updates of `count` rounds of one slot and keeps what came; returns what
        came last."""
        importer = _core.Importer(address, b"", SECONDS, self._device)
        log = _core.Memory(count * nbytes, self._device)
        copies = one_each(count, nbytes, nbytes // 2)
        targets = each_span(log, count, nbytes)
        for _ in range(updates):
            importer.begin(SECONDS)
            ring = importer.ring
            sources = _core.BufferTable([(ring.address, nbytes)] * count, owner=ring)
            fill(self._stream, log, torch.zeros(count * nbytes, dtype=torch.uint8))
            for number in range(count):
                importer.take(number, self._stream, SECONDS)
                self._stream.copy(copies, number, 0, sources, targets)
                importer.done(number, self._stream, SECONDS)
            self._stream.synchronize(SECONDS)
            importer.prepared(count, count * nbytes, 0, SECONDS)
            importer.verdict(SECONDS)
        importer.close()
        return read(self._stream, log, count * nbytes).numpy().tobytes()
