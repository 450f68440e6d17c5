"""Engines over HTTP that start at once: forked from a process that has imported what they need."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe

import requests
from support.procs import spawned

_NEEDED = ("wsync.demo.engines.server", "transformers.models.qwen3.modeling_qwen3")
_PATIENCE = 120.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Nursery:
    """Starts processes of `python -m wsync.demo.engines.transformers`.

    They end with this process, or when this is closed.  One caller at a time."""

    def __init__(self, log: str) -> None:
        self._pipe, theirs = Pipe()
        self._process = spawned(_serve, theirs, log)
        self._process.start()
        theirs.close()

    def start(self, *arguments: str) -> int:
        """The id of a new process, with these arguments of the command line."""
        self._pipe.send(arguments)
        assert self._pipe.poll(_PATIENCE), "the nursery does not answer"
        pid: int = self._pipe.recv()
        return pid

    def close(self) -> None:
        self._pipe.close()
        self._process.join(_PATIENCE)
        self._process.kill()


def _serve(pipe: Connection, log: str) -> None:
    import torch

    from wsync.demo.engines import serve

    for name in _NEEDED:
        importlib.import_module(name)
    gc.freeze()  # see frozen_heap
    torch.set_num_threads(1)
    children: list[int] = []
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            break
        pid = os.fork()
        if pid == 0:
            pipe.close()
            _run(serve.main, arguments, log)
        children.append(pid)
        pipe.send(pid)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run(main: Callable[[Sequence[str]], None], arguments: Sequence[str], log: str) -> None:
    """The rest of a child's life."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        main(arguments)
        status = 0
    finally:
        os._exit(status)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, and that no outgoing connection will be given."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        lowest = int(file.read().split()[0])
    found: list[int] = []
    port = lowest - 1 - os.getpid() * 64 % (lowest // 2)  # away from neighbours
    while len(found) < count:
        port -= 1
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            found.append(port)
    return found


def await_health(urls: Sequence[str]) -> None:
    end = time.monotonic() + _PATIENCE
    for url in urls:
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(url + "/health", timeout=5).ok:
                    break
            assert time.monotonic() < end, f"{url} is not healthy"
            time.sleep(0.02)
