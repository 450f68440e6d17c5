"""SGLang's whole server on a CPU: uvicorn, tokenizer manager, schedulers and detokenizer, in
processes of their own, with stand-ins for its kernels (sglang_site)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from support.engine_nursery import free_ports
from support.server_models import PATIENCE, Checkpoint

PLACE = "WSYNC_SERVER_PACKAGES"  # a folder that holds one of packages for each version
NEWEST = "sglang0523"
_SITE = Path(__file__).with_name("sglang_site")
_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_LOG_NBYTES = 12_000  # of each server, where a test fails
Starter = Callable[[Path, Sequence[str]], int]
running: list[Server] = []


def packages(version: str) -> Path:
    """The folder of a version of SGLang and what it imports; skips where nobody has made it."""
    if PLACE not in os.environ:
        pytest.skip(f"needs SGLang's server: `.ci/run servers` installs it and sets {PLACE}")
    folder = Path(os.environ[PLACE], version)
    assert folder.is_dir(), folder
    return folder


class Server:
    """A server that answers, of the model in a folder; close it, or use `with`.

    Its processes are those of one session of the system."""

    def __init__(self, start: Starter, model: Checkpoint, log: Path, **settings: Any) -> None:
        """start: a Fresh or a Nursery.  settings: tp, the number of workers; port, of a server
        that is gone; arguments, further ones."""
        self.log, self.model, self._start, self._settings = log, model, start, settings
        self._log_began = log.stat().st_size if log.exists() else 0
        port, meeting = free_ports(2)
        self.port, self.workers = settings.get("port", port), settings.get("tp", 1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._session = start(log, self._arguments(meeting))
        running.append(self)
        try:
            self.await_health()
        except BaseException:
            self.close()
            raise

    def _arguments(self, meeting: int) -> list[str]:
        dtype = str(self.model.dtype).removeprefix("torch.")  # or it makes float32 float16
        further = self._settings.get("arguments", ())
        words = [
            *(
                "--model-path",
                self.model.folder,
                "--device",
                "cpu",
                "--dtype",
                dtype,
                "--tp-size",
                self.workers,
            ),
            *("--host", "127.0.0.1", "--port", self.port, "--nccl-port", meeting),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
            *("--disable-overlap-schedule", "--disable-radix-cache"),
            *("--max-total-tokens", 8192, "--max-running-requests", 4),
            *("--custom-weight-loader", "wsync.sglang.load_weights", *further),
        ]
        return list(map(str, words))

    def again(self) -> Server:
        """Another one in its place, at the same URL, after it has been killed."""
        return Server(self._start, self.model, self.log, **{**self._settings, "port": self.port})

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def await_health(self) -> None:
        """Until it answers, with a token that it has generated."""

        def healthy() -> bool:
            assert self._session in self.processes(), f"the server has ended: {self.tail()}"
            with contextlib.suppress(requests.RequestException):
                return requests.get(self.url + "/health", timeout=PATIENCE).ok
            return False

        await_that(healthy, f"{self.url} is healthy")

    def post(self, path: str, **body: Any) -> Any:
        """The answer to one request, which must be a good one."""
        answer = requests.post(self.url + path, json=body, timeout=PATIENCE)
        assert answer.ok, (path, answer.status_code, answer.text)
        return answer.json()

    def processes(self) -> dict[int, str]:
        """Those of the server that have not ended, with the names that they give themselves."""
        found = {}
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                number, stat = int(entry.name), Path(entry.path, "stat").read_text()
                state, _, _, session = stat.rpartition(")")[2].split()[:4]
                if int(session) == self._session and state not in "ZX":
                    words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                    found[number] = words[0].decode()
        return found

    def signal(self, number: int) -> None:
        """To all of its processes."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """As a machine that goes away does; returns when nothing of it is left."""

        def gone() -> bool:
            self.signal(signal.SIGKILL)
            return not self.processes()

        await_that(gone, f"all of {self.url} has ended")

    def close(self) -> None:
        if self in running:
            running.remove(self)
        self.kill()

    def tail(self) -> str:
        """The end of what the server has written."""
        written = self.log.read_bytes()[self._log_began :]
        return written[-_LOG_NBYTES:].decode(errors="replace")


def await_that(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not after {PATIENCE:.0f} s: {what}"
        time.sleep(0.05)


def logs() -> Iterator[tuple[str, str]]:
    """What the servers that run have written, for a test that has failed."""
    for server in running:
        yield f"server {server.url}", server.tail()


class Fresh:
    """Starts servers as users do; SGLang starts their processes anew, too."""

    def __init__(self, folder: Path) -> None:
        """folder: what `packages` has said."""
        self._environment = environment(folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, log: Path, arguments: Sequence[str]) -> int:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=log.parent,
                env=self._environment,
                start_new_session=True,
            )
        self._processes.append(process)
        return process.pid

    def close(self) -> None:
        """After its servers."""
        for process in self._processes:
            process.wait(PATIENCE)


class Nursery:
    """Starts servers that have imported everything; see sglang_nursery.py.  They end with it."""

    def __init__(self, folder: Path, log: Path) -> None:
        """folder: what `packages` has said."""
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("sglang_nursery.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=log.parent,
                env=environment(folder),
            )
        self._log = log

    def __call__(self, log: Path, arguments: Sequence[str]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(log), *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery has ended: {self._log.read_text()[-_LOG_NBYTES:]}"
        return int(answer)

    def close(self) -> None:
        """After its servers."""
        self._process.kill()
        self._process.communicate()


def environment(folder: Path) -> dict[str, str]:
    kept = {name: v for name, v in os.environ.items() if not name.startswith(("SGLANG", "PYTHON"))}
    models = sorted(path.stem for path in (folder / "sglang/srt/models").glob("*.py"))
    kept |= {
        # an older version runs with the newest one's packages
        "PYTHONPATH": os.pathsep.join([str(_SITE), str(folder), str(folder.with_name(NEWEST))]),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",  # for each worker one; it binds nothing
        # the others take a worker longer to import than all else
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(name for name in models if name not in _MODELS),
        "WSYNC_TEST_PARENT": str(os.getpid()),
    }
    return kept
