"""Engines that are worker processes of this one: how they are started, asked and ended.

`WorkersEngine` is such an engine's handle (wsync.handles.base.EngineHandle); what lives in each
process is a wsync.demo.engines.model_worker.ModelWorker.  Processes are asked one question at a
time over a pipe and end when it closes.
"""

import contextlib
import functools
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, Self

import torch
from support.update_groups import BROADCAST_SECONDS, UpdateGroups, take

from wsync._core import (
    DeadlineError,
    PeerClosedError,
    RemoteError,
    WsyncError,
)
from wsync.demo.engines.model_worker import ModelWorker
from wsync.demo.engines.serve import ServerProcess
from wsync.handles.sglang_base import check_payloads
from wsync.machine.daemon_threads import WorkerThread
from wsync.machine.deadline import Deadline, seconds
from wsync.machine.fork_guard import Owner
from wsync.messages import control

_CLOSE_SECONDS: Final = 10.0
_MAIN: Final = "import sys; from support.worker_processes import serve; serve(int(sys.argv[1]))"


class WorkersEngine:
    """An engine of worker processes, and its handle.  Close it, or use `with`; the workers end
    with this process.

    worker: the class in each process; settings: its keyword arguments, for each worker; path:
    folders in which the workers find modules, before those of this process.
    """

    load_formats = (control.LOAD_FORMAT,)

    def __init__(
        self,
        worker: type[ModelWorker],
        settings: Sequence[Mapping[str, Any]],
        *,
        name: str,
        timeout: float = 120.0,
        path: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._owner = Owner()
        self.workers = len(settings)
        self.weight_version = "default"
        self._instance = uuid.uuid4().hex
        self.paused = False
        self._lock = threading.RLock()
        self._sequence = 0
        self._processes: list[_Process] = []
        try:
            for rank in range(self.workers):
                self._processes.append(_Process(name, rank, path))
            self._call("start", [(worker, dict(each)) for each in settings], timeout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.close()

    # --- the handle -------------------------------------------------------------------------

    def pause(self, mode: str, timeout: float) -> None:
        self._call("ping", None, timeout)
        self.paused = True

    def flush(self, timeout: float) -> None:
        self._call("ping", None, timeout)

    def resume(self, timeout: float) -> None:
        """RemoteError while a worker's weights are inconsistent or have no version yet."""
        self._check_consistent(timeout)
        self.paused = False

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        check_payloads(self.name, self.workers, payloads)
        version = None if weight_version is None else str(weight_version)
        end = Deadline(timeout)
        told = {"load_format": load_format, "weight_version": version}
        self._write("update", [{**told, "data": data} for data in payloads], end)
        if version is not None or load_format != control.LOAD_FORMAT:
            self._state(end.left)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        # the caller waits no longer, whenever a worker gets to it
        end = Deadline(timeout)
        told = {**arguments, "end": end}
        if method == "init_weights_update_group":
            # what is left for the meeting says nothing of how long a broadcast may take
            told["timeout"] = max(timeout, BROADCAST_SECONDS)
        if method == "update_weights_from_distributed":
            self._write(method, [told] * self.workers, end)
            self._state(end.left)
        else:
            self._call(method, [told] * self.workers, timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        reason = self._state(timeout)
        return {
            "weight_version": self.weight_version,
            "tp_size": self.workers,
            "consistent": not reason,
            "reason": reason,
            "instance": self._instance,
        }

    def _state(self, timeout: float) -> str:
        """Why the workers must not run, or ""; learns the version of their weights."""
        states = self._call("state", None, timeout)
        reasons = [reason for reason, _ in states if reason]
        if not reasons:  # they may have done what the caller of a request did not wait for
            self.weight_version = states[0][1]
        return "; ".join(reasons)

    def _write(self, what: str, arguments: Sequence[Mapping[str, Any]], end: Deadline) -> None:
        """Asks for what writes to the weights once all workers are there: of one that comes late
        the others would know too late."""
        self._call("ping", None, end.left)
        self._call(what, [{**each, "end": end} for each in arguments], end.left)

    # --- the workers ------------------------------------------------------------------------

    def _check_consistent(self, timeout: float) -> None:
        info = self.model_info(timeout)
        if not info["consistent"]:
            raise RemoteError(f"engine {self.name}: {info['reason']}")

    def _call(self, what: str, arguments: Sequence[Any] | None, timeout: float) -> list[Any]:
        """Asks every worker and returns their answers.  Fails with the first that fails, dies
        or is late; answers that come after that are dropped."""
        where = f"engine {self.name}: {what}"
        end = Deadline(timeout)
        with self._alone(what, timeout):
            self._sequence += 1
            told = arguments or [None] * self.workers
            asked = [
                process.ask(where, (self._sequence, end, what, argument))
                for process, argument in zip(self._processes, told, strict=True)
            ]
            done, late = wait(asked, end.left, FIRST_EXCEPTION)
            for answer in done:
                answer.result()
            if late:
                ranks = ", ".join(str(rank) for rank, answer in enumerate(asked) if answer in late)
                raise DeadlineError(f"{where}: worker {ranks}: no answer within {seconds(timeout)}")
            return [answer.result() for answer in asked]

    @contextlib.contextmanager
    def _alone(self, what: str, timeout: float) -> Iterator[None]:
        """Around questions between which no other thread asks any."""
        where = f"engine {self.name}: {what}"
        self._owner.check(where)
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            raise DeadlineError(f"{where}: another call did not end within {seconds(timeout)}")
        try:
            yield
        finally:
            self._lock.release()


class _Process(ServerProcess):
    """A worker's process.  A thread of its own asks it, one question after another: a process that
    is busy or stopped neither reads nor writes."""

    def __init__(self, engine: str, rank: int, path: Sequence[str]) -> None:
        self._worker, self._owner = f"worker {rank}", Owner()
        self._pipe, theirs = Pipe()
        environment = os.environ | {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # gloo over the loopback interface: the workers are on this host
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            # a worker's class is found where this process found it
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)]),
        }
        with theirs:
            super().__init__(
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())],
                f"{engine} {self._worker}",
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self._thread = WorkerThread("wsync-ask")

    def ask(self, where: str, question: tuple[int, Deadline, str, Any]) -> Future[Any]:
        """The answer to (number, deadline, what, argument), however late it comes."""
        return self._thread.submit(functools.partial(self._ask, where, question))

    def _ask(self, where: str, question: tuple[int, Deadline, str, Any]) -> Any:
        if not question[1].left:
            raise DeadlineError(f"{where}: {self._worker} was busy until nobody waited any more")
        try:
            self._pipe.send(question)
            success, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            status = self.process.poll()
            raise PeerClosedError(
                f"{where}: {self._worker} ended with {status}: {self.log()}"
            ) from error
        if not success:
            raise RemoteError(f"{where}: {answer}")
        return answer

    def close(self) -> None:
        if not self._owner:  # a forked process has no such thread, and the process is no child
            self._pipe.close()
            return
        super().close()
        closed = self._thread.submit(self._pipe.close)  # which reads until the process has ended
        self._thread.close()
        wait([closed], _CLOSE_SECONDS)


def serve(descriptor: int) -> None:
    """A worker's main loop: until its parent closes the pipe."""
    torch.set_num_threads(1)
    os.set_inheritable(descriptor, False)  # a process that outlives this one is not to hold it
    pipe: Connection[Any, Any] = Connection(descriptor)
    worker: ModelWorker | None = None
    while True:
        try:
            _, end, what, argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if not end.left:
                raise DeadlineError(f"{what}: nobody waits for this worker any more")
            if what == "start":
                make, settings = argument
                worker, what, argument = make(**settings), "ping", None
                groups = UpdateGroups(worker.rank)
            assert worker is not None
            reply = (True, _answer(worker, groups, what, argument))
        except WsyncError as error:
            reply = (False, str(error))
        except Exception as error:
            who = "worker" if worker is None else f"worker {worker.rank}"
            reply = (False, f"{who}: {type(error).__name__}: {error}")
        pipe.send(reply)


def _answer(worker: ModelWorker, groups: UpdateGroups, what: str, argument: Any) -> Any:
    """The answer to one question; most are methods."""
    if what == "ping":
        return None
    if what == "state":
        return worker.updates.trouble, worker.updates.weight_version
    if what == "init_weights_update_group":
        return groups.init(meeting=argument.pop("end").left, **argument)
    if what == "destroy_weights_update_group":
        return groups.destroy(argument["group_name"])
    if what == "update_weights_from_distributed":
        return take(worker, groups, **argument)
    method = getattr(worker, what)
    if argument is None:
        return method()
    if isinstance(argument, dict):
        return method(**argument)
    return method(*argument) if isinstance(argument, tuple) else method(argument)
