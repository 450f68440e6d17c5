"""An engine of the fault matrix: a head process and forked workers with a real receiver each.

It outlives its trainers; `Handle` reaches it from any process by the path of its socket.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener, Pipe
from typing import Any

import torch
from support.engines import FIRST_GPU
from support.fault_points import Fault, allowed, settled

from wsync._core import (
    DeadlineError,
    Importer,
    LayoutBuilder,
    Memory,
    PeerClosedError,
    RemoteError,
    WsyncError,
)
from wsync.engine.receiver import Receiver
from wsync.engine.ring_loaders import LayoutLoader
from wsync.messages.control import LOAD_FORMAT, Control

SHAPES = {f"layer{index}.weight": (48, 16) for index in range(6)}
WORKERS = 2
NO_FAULT = Fault("", "", "")


def weights(seed: int) -> dict[str, torch.Tensor]:
    """What an update brings, whole."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def share(whole: torch.Tensor, worker: int) -> torch.Tensor:
    """The columns that a worker keeps."""
    width = whole.shape[1] // WORKERS
    return whole[:, worker * width : (worker + 1) * width].contiguous()


class Handle:
    """An EngineHandle: every call is a connection of its own to the engine's head."""

    name = "matrix"
    workers = WORKERS
    load_formats = (LOAD_FORMAT,)

    def __init__(self, path: str) -> None:
        self.path = path

    def pause(self, mode: str, timeout: float) -> None:
        self.call("pause", None, timeout)

    def flush(self, timeout: float) -> None:
        self.call("flush", None, timeout)

    def resume(self, timeout: float) -> None:
        self.call("resume", None, timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        info: dict[str, Any] = self.call("info", None, timeout)
        return info

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        self.call("update", (list(payloads), weight_version), timeout)

    def call(self, what: str, argument: Any, timeout: float) -> Any:
        try:
            with Client(self.path) as pipe:
                pipe.send((what, argument, timeout))
                if not pipe.poll(timeout + 1.0):
                    raise DeadlineError(f"engine {self.name}: {what}: no answer")
                good, answer = pipe.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, WsyncError):
                raise
            raise PeerClosedError(f"engine {self.name}: {what}: {error}") from error
        if not good:
            raise RemoteError(f"engine {self.name}: {answer}")
        return answer


class Head:
    """The process that answers handles."""

    def __init__(self, path: str) -> None:
        self._pipes: list[Connection] = []
        self.pids: list[int] = []
        self._locks = [threading.Lock() for _ in range(WORKERS)]
        self._sequence = 0
        self._state: dict[str, Any] = {
            "paused": False,
            "version": "default",
            "error": "",
            "updates": 0,  # that it was asked for
        }
        for rank in range(WORKERS):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in (ours, *self._pipes):
                    pipe.close()
                run_worker(rank, theirs)
            theirs.close()
            self._pipes.append(ours)
            self.pids.append(pid)
        self._listener = Listener(path, backlog=64)

    def serve(self) -> None:
        while True:
            pipe = self._listener.accept()
            threading.Thread(target=self._serve_one, args=(pipe,), daemon=True).start()

    def _serve_one(self, pipe: Connection) -> None:
        with pipe, contextlib.suppress(OSError, EOFError):
            what, argument, timeout = pipe.recv()
            try:
                answer = (True, getattr(self, "_" + what)(argument, time.monotonic() + timeout))
            except Exception as error:
                answer = (False, f"{what}: {error}")
            pipe.send(answer)

    def _pause(self, _: object, end: float) -> None:
        self._state["paused"] = True

    def _flush(self, _: object, end: float) -> None: ...

    def _resume(self, _: object, end: float) -> None:
        reasons = [text for text in self._all("reason", [None] * WORKERS, end) if text]
        if reasons:
            raise RuntimeError("; ".join(reasons))
        self._state["paused"] = False

    def _update(self, argument: tuple[list[bytes], str | None], end: float) -> None:
        payloads, version = argument
        self._state["updates"] += 1
        try:
            self._all("update", payloads, end)
        except RuntimeError as error:
            self._state["error"] = str(error)
            raise
        self._state["error"] = ""
        if version is not None:
            self._state["version"] = version

    def _info(self, _: object, end: float) -> dict[str, Any]:
        return {**self._state, "pids": self.pids}

    def _ask(self, argument: tuple[int, str, Any], end: float) -> Any:
        return self._one(*argument, end)

    def _all(self, what: str, arguments: Sequence[Any], end: float) -> list[Any]:
        found: list[Any] = [None] * WORKERS
        errors: list[str] = []

        def ask(rank: int) -> None:
            try:
                found[rank] = self._one(rank, what, arguments[rank], end)
            except Exception as error:
                errors.append(str(error))

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError("; ".join(errors))
        return found

    def _one(self, rank: int, what: str, argument: Any, end: float) -> Any:
        if not self._locks[rank].acquire(timeout=max(end - time.monotonic(), 0.0)):
            raise RuntimeError(f"worker {rank} is busy")
        try:
            pipe = self._pipes[rank]
            self._sequence += 1
            sequence = self._sequence
            pipe.send((sequence, what, argument))
            while pipe.poll(max(end - time.monotonic(), 0.0)):
                number, good, answer = pipe.recv()
                if number == sequence:  # others were given up
                    if not good:
                        raise RuntimeError(answer)
                    return answer
            raise RuntimeError(f"worker {rank} does not answer")
        except (EOFError, OSError) as error:
            raise RuntimeError(f"worker {rank} is gone: {error}") from error
        finally:
            self._locks[rank].release()


class _Phased:
    """An importer that says where it is."""

    def __init__(self, importer: Importer, fault: Fault) -> None:
        self._importer, self._fault = importer, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._importer, name)

    def done(self, round: int, *rest: Any) -> None:
        self._fault.at("done")
        self._importer.done(round, *rest)

    def prepared(self, *arguments: Any) -> None:
        self._fault.at("prepared")
        self._importer.prepared(*arguments)

    def verdict(self, *arguments: Any) -> None:
        self._fault.at("commit")
        self._importer.verdict(*arguments)


class _Loader(LayoutLoader):
    fault = NO_FAULT

    def attach(self, ring: Memory, manifest: Any) -> None:
        self.fault.at("attach")
        super().attach(ring, manifest)

    def load(self, round: int) -> None:
        if round >= 1 or self._borrowed is not None:  # which is one round
            self.fault.at("round")
        super().load(round)


class _Receiver(Receiver):
    fault = NO_FAULT

    def _connect(self, message: Control) -> Any:
        self.fault.at("open")
        return _Phased(super()._connect(message), self.fault)

    def _close(self, message: Control, version: str | None) -> tuple[bool, str]:
        self.fault.at("close")
        return super()._close(message, version)


def _handle(receiver: Receiver, data: bytes) -> tuple[bool, str]:
    try:
        return receiver.answer(data)
    except Exception as error:  # a planted one: an engine goes on
        return False, f"{type(error).__name__}: {error}"


def run_worker(rank: int, pipe: Connection) -> None:
    """A worker process; does not return."""
    if FIRST_GPU in os.environ:
        os.environ["WSYNC_DEVICE"] = f"cuda:{int(os.environ[FIRST_GPU]) + rank}"
    builder = LayoutBuilder()
    tensors = []
    for index, (name, shape) in enumerate(SHAPES.items()):
        width = shape[1] // WORKERS
        tensors.append(torch.full((shape[0], width), 77.0))
        builder.add_shard(
            name, "float32", shape, [0, rank * width], [shape[0], width], index, 0, [4 * width, 4]
        )
    loader = _Loader(builder.build(), tensors)
    receiver = _Receiver(loader, worker=rank)
    limits: dict[str, int] | None = None
    status = 0
    try:
        while True:
            number, what, argument = pipe.recv()
            good, answer = True, None
            if what == "update":
                good, answer = _handle(receiver, argument)
            elif what == "reason":
                answer = "" if receiver.state.consistent else receiver.state.reason
            elif what == "held":
                names = [tensor.numpy().tobytes() for tensor in tensors]
                answer = (names, receiver.state.consistent, receiver.state.update)
            elif what == "arm":
                loader.fault = receiver.fault = Fault(*argument)
            elif what == "disarm":
                receiver.fault.disarm()
                answer = receiver.fault.struck
                loader.fault = receiver.fault = NO_FAULT
            elif what == "census":
                found = settled(limits)
                limits = limits or allowed(found)
                answer = (found, limits)
            pipe.send((number, good, answer))
    except SystemExit as error:
        status = int(str(error.code))
    except EOFError:
        pass
    finally:
        os._exit(status)


def run_head(path: str, width: int = 16) -> None:
    """The head process; does not return.  width: the columns of its model's tensors."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    SHAPES.update({name: (rows, width) for name, (rows, _) in SHAPES.items()})
    Head(path).serve()
