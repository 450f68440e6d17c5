"""Python processes that start at once: forked from one that has imported what most of them need.

`Popen` and `run` are subprocess's for commands of this interpreter.  The process is as a fresh one
would be, but for the modules that are imported already; it ends as a fresh one does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

ADDRESS = "WSYNC_TEST_NURSERY"
_FURTHER = "WSYNC_TEST_NURSERIES"  # addresses and modules of Further ones, by their folders
_LARGEST = 1 << 20  # bytes of a request
_PATIENCE = 240.0  # seconds for imports on a busy machine
_FLAGS = ("-P", "-B")
_OF_LIBRARIES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS")  # read when they are loaded
_ENGINE = "wsync.demo.engines.transformers"
_NEEDED = {
    "": (
        "torch",
        "support.worker_processes",
        "support.tensor_parallel_engine",
    ),
    "support.forked_demo": ("wsync.demo.trainer",),
    _ENGINE: ("wsync.demo.engines.server", "transformers.models.qwen3.modeling_qwen3"),
}


class Popen(subprocess.Popen):
    """subprocess.Popen for `[sys.executable, "-P", ...]`, `-c`, `-m` or a script.

    Other commands, and those that look for modules where no nursery does, are started as they
    stand.
    """

    _line: socket.socket | None = None

    def _execute_child(self, *arguments: Any) -> None:
        original = subprocess.Popen._execute_child
        given = inspect.signature(original).bind(self, *arguments).arguments
        environment = dict(os.environ if given["env"] is None else given["env"])
        command = [os.fspath(word) for word in given["args"]]
        found = _nursery_of(command, environment)
        if found is None:
            original(self, *arguments)
            return
        address, modules = found
        ends = [(given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)]
        passed = {target: own if own >= 0 else target for own, target in ends}
        passed |= {number: number for number in given["pass_fds"]}
        told = {
            "words": _main_of(command),
            "environment": environment,
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "targets": list(passed),
            "session": given["start_new_session"],
            "modules": modules,
        }
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(_PATIENCE)
        line.connect(address)
        socket.send_fds(line, [json.dumps(told).encode()], list(passed.values()))
        answer, descriptors, *_ = socket.recv_fds(line, 64, 1)
        (self._pidfd,) = descriptors
        self._line, self.pid, self._child_created = line, int(answer), True
        weakref.finalize(self, os.close, self._pidfd)
        weakref.finalize(self, line.close)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*arguments, **named)
        return self._ended(0.0)

    def _wait(self, timeout: float | None) -> int:
        if self._line is None:
            return super()._wait(timeout)
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._line.fileno() >= 0 and wait([self._line], timeout):
            with self._waitpid_lock:
                if self.returncode is None:
                    status = self._line.recv(64)  # none: the nursery is gone
                    self.returncode = int(status) if status else -signal.SIGKILL
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self._line is None:
            super().send_signal(sig)
        elif self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """subprocess.run with text, of which all that is written is captured."""
    pipe = subprocess.PIPE
    with Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def install() -> None:
    """Has the demo's engines be forked where there is a nursery, as far as this process starts
    them."""
    if ADDRESS in os.environ:
        import wsync.demo.engines.serve

        wsync.demo.engines.serve.Popen = Popen


def _nursery_of(
    command: Sequence[str], environment: dict[str, str]
) -> tuple[str, Sequence[str]] | None:
    """The address of one whose processes are as this command's, and what they need imported: where
    this interpreter runs it with modules that lie where this one's or a Further one's lie, and
    with libraries as they were loaded here."""
    if any(environment.get(name) != os.environ.get(name) for name in _OF_LIBRARIES):
        return None
    if command[0] != sys.executable:
        return None
    path = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if not set(path) <= set(sys.path):
        further = [folder for folder in path if folder not in sys.path]
        known = json.loads(os.environ.get(_FURTHER, "{}"))
        found = known.get(os.pathsep.join(further)) if path[: len(further)] == further else None
        return None if found is None else tuple(found)
    words = _main_of(command)
    return os.environ[ADDRESS], _NEEDED.get(words[1] if words[0] == "-m" else "", _NEEDED[""])


def _main_of(command: Sequence[str]) -> list[str]:
    """The command line without the interpreter and its options."""
    rest = list(command[1:])
    while rest[0] in _FLAGS:
        del rest[0]
    assert rest[0] in ("-c", "-m") or not rest[0].startswith("-"), command
    return rest


class Nursery:
    """The process; ends with this one, or when it is closed.  What it has started goes on."""

    def __init__(self, path: Sequence[str] = ()) -> None:
        """path: folders before those of this process."""
        self._folder = tempfile.TemporaryDirectory(prefix="wsync-nursery-")
        self.address = os.path.join(self._folder.name, "socket")
        path = [*path, *sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from support.nursery import main; main()"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )

    def install(self) -> None:
        """As the one of this process, and of those that it starts."""
        os.environ[ADDRESS] = self.address
        install()

    def close(self) -> None:
        if os.environ.get(ADDRESS) == self.address:
            del os.environ[ADDRESS]
        self._process.communicate(timeout=60)
        self._folder.cleanup()


class Further(Nursery):
    """Another one, for commands that look for modules in other folders first."""

    def __init__(self, path: Sequence[str], modules: Sequence[str]) -> None:
        super().__init__(path)
        self.environment = {_FURTHER: json.dumps({os.pathsep.join(path): [self.address, modules]})}


def main() -> None:
    """Serves until the standard input ends; returns never, or in a child when it has run."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    job = _serve(listener)
    if job is not None:
        listener.detach()
        _become(job)


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """What a child is to do, in the child; None at the end."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(0, selectors.EVENT_READ)
        children: dict[int, tuple[int, socket.socket]] = {}  # by their descriptors
        while True:
            for key, _ in waiting.select():
                if key.fd == 0:
                    return None
                if key.fd in children:
                    waiting.unregister(key.fd)
                    pid, line = children.pop(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with line, contextlib.suppress(OSError):  # who asked may be gone
                        line.send(str(status).encode())
                    continue
                line = listener.accept()[0]
                found = _started(line)
                if isinstance(found, dict):
                    for _, line in children.values():
                        line.close()
                    return found
                if found is not None:
                    children[os.pidfd_open(found)] = (found, line)
                    descriptor = next(reversed(children))
                    waiting.register(descriptor, selectors.EVENT_READ)
                    with contextlib.suppress(OSError):
                        socket.send_fds(line, [str(found).encode()], [descriptor])


def _started(line: socket.socket) -> dict[str, Any] | int | None:
    """The id of a new process, in which it is what it has to do; None where nobody asks."""
    line.settimeout(_PATIENCE)
    try:
        data, descriptors, *_ = socket.recv_fds(line, _LARGEST, 64)
    except OSError:
        data, descriptors = b"", []
    if not data:
        line.close()
        return None
    told: dict[str, Any] = json.loads(data)
    for name in told["modules"]:
        importlib.import_module(name)
    gc.freeze()  # see preloaded
    pid = os.fork()
    if pid == 0:
        line.detach()
        told["descriptors"] = dict(zip(told["targets"], descriptors, strict=True))
        return told
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become(told: dict[str, Any]) -> None:
    """The rest of a child's life, to the end of its main module."""
    _take(told["descriptors"])
    if told["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    path = [folder for folder in told["environment"].get("PYTHONPATH", "").split(":") if folder]
    sys.path[:] = path + [folder for folder in sys.path if folder not in path]
    kind, *arguments = told["words"]
    if kind == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[0], "<string>", "exec"), vars(module))
    else:
        sys.argv[:] = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


def _take(descriptors: dict[int, int]) -> None:
    """Has these at their numbers, and no other at all."""
    clear = max(256, *descriptors, *descriptors.values()) + 1
    for number in range(clear):
        if number not in descriptors.values():
            with contextlib.suppress(OSError):
                os.close(number)
    moved = {}
    for target, number in descriptors.items():
        moved[target] = clear + len(moved)
        os.dup2(number, moved[target])
    for number in descriptors.values():
        with contextlib.suppress(OSError):
            os.close(number)
    for target, number in moved.items():
        os.dup2(number, target)
        os.set_inheritable(target, True)
        os.close(number)
