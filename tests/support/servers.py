"""Whole servers of engines on a CPU, in processes of their own; see sglang_server.py and
vllm_server.py."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import requests
from support.server_models import PATIENCE, Checkpoint

import wsync

PLACE = "WSYNC_SERVER_PACKAGES"  # a folder that holds one of packages for each version
_LOG_NBYTES = 12_000  # of each server, where a test fails
Starter = Callable[[Path, str, Sequence[str]], int]
running: list[Server] = []


def packages(version: str) -> Path:
    """The folder of a version of an engine and what it imports; skips where nobody has made it."""
    if PLACE not in os.environ:
        pytest.skip(f"needs engines' servers: `.ci/run servers` installs them and sets {PLACE}")
    folder = Path(os.environ[PLACE], version)
    assert folder.is_dir(), folder
    return folder


class Server:
    """A server that answers, of the model in a folder; close it, or use `with`.

    Its processes are those of one session of the system."""

    module: str  # what Python runs

    def __init__(self, start: Starter, model: Checkpoint, log: Path, **settings: Any) -> None:
        """start: a Fresh or a Nursery.  settings: tp, the number of workers; port, of a server
        that is gone; arguments, further ones."""
        self.log, self.model, self._start, self._settings = log, model, start, settings
        self._log_began = log.stat().st_size if log.exists() else 0
        port, meeting = free_ports(2)
        self.port, self.workers = settings.get("port", port), settings.get("tp", 1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._session = start(log, self.module, self._arguments(meeting))
        running.append(self)
        try:
            self.await_health()
        except BaseException:
            self.close()
            raise

    def _arguments(self, meeting: int) -> list[str]:
        """What it is started with; meeting: a free port."""
        raise NotImplementedError

    def again(self) -> Self:
        """Another one in its place, at the same URL, after it has been killed."""
        settings = {**self._settings, "port": self.port}
        return type(self)(self._start, self.model, self.log, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def await_health(self) -> None:
        """Until it answers, with a token that it has generated."""

        def healthy() -> bool:
            assert self._session in self.processes(), f"the server has ended: {self.tail()}"
            with contextlib.suppress(requests.RequestException):
                return self._healthy()
            return False

        await_that(healthy, f"{self.url} is healthy")

    def _healthy(self) -> bool:
        return requests.get(self.url + "/health", timeout=PATIENCE).ok

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The answer to one request, which must be a good one."""
        answer = requests.post(self.url + path, json=body, headers=headers, timeout=PATIENCE)
        assert answer.ok, (path, answer.status_code, answer.text)
        return answer.json()

    def processes(self) -> dict[int, str]:
        """Those of the server that have not ended, with the names that they give themselves."""
        return members(self._session)

    def signal(self, number: int) -> None:
        """To all of its processes."""
        signal_all(self._session, number)

    def kill(self) -> None:
        """As a machine that goes away does; returns when nothing of it is left."""
        kill(self._session)

    def close(self) -> None:
        if self in running:
            running.remove(self)
        self.kill()

    def tail(self) -> str:
        """The end of what the server has written."""
        return tail(self.log, self._log_began)


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


def members(session: int) -> dict[int, str]:
    """Processes of a session of the system that have not ended, and their names."""
    found = {}
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            number, stat = int(entry.name), Path(entry.path, "stat").read_text()
            state, _, _, belongs = stat.rpartition(")")[2].split()[:4]
            if int(belongs) == session and state not in "ZX":
                words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                found[number] = words[0].decode()
    return found


def signal_all(session: int, number: int) -> None:
    for process in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def kill(session: int) -> None:
    """Returns when nothing of it is left."""

    def gone() -> bool:
        signal_all(session, signal.SIGKILL)
        return not members(session)

    await_that(gone, f"all of session {session} has ended")


def tail(log: Path, began: int = 0) -> str:
    """The end of what has been written."""
    return log.read_bytes()[began:][-_LOG_NBYTES:].decode(errors="replace")


def await_that(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not after {PATIENCE:.0f} s: {what}"
        time.sleep(0.05)


def logs() -> Iterator[tuple[str, str]]:
    """What the servers that run have written, for a test that has failed."""
    for server in running:
        yield f"server {server.url}", server.tail()


def everyday(kinds: Iterable[str], one: str) -> list[Any]:
    """The parameters of a fixture: one of them is for each change, and `.ci/run all` has all."""
    return [kind if kind == one else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


_libc = ctypes.CDLL(None)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Fresh:
    """Starts servers as users do; engines start their processes anew, too.  They end with this
    process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, log: Path, module: str, arguments: Sequence[str]) -> int:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=log.parent,
                env=self._environment,
                start_new_session=True,
                preexec_fn=lambda: _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL),
            )
        self._processes.append(process)
        return process.pid

    def close(self) -> None:
        """After its servers."""
        for process in self._processes:
            process.wait(PATIENCE)


class Nursery:
    """Starts servers that have imported everything; see server_nursery.py.  They end with it."""

    def __init__(self, kind: str, environment: dict[str, str], log: Path) -> None:
        """kind: one that server_nursery.py knows."""
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server_nursery.py")), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=log.parent,
                env=environment,
            )
        self._log = log

    def __call__(self, log: Path, module: str, arguments: Sequence[str]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(log), module, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery has ended: {self._log.read_text()[-_LOG_NBYTES:]}"
        return int(answer)

    def close(self) -> None:
        """After its servers."""
        self._process.kill()
        self._process.communicate()


def environment(site: Path, *folders: Path, without: tuple[str, ...]) -> dict[str, str]:
    """What servers are started in: a sitecustomize, folders of packages, nothing of what begins
    with `without`.  They end with this process."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith((*without, "PYTHON"))}
    ours = Path(wsync.__file__).parents[1]  # that of this process, wherever it lies
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, (site, *folders, ours))),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WSYNC_TEST_PARENT": str(os.getpid()),
    }
