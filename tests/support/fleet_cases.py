"""A trainer of several ranks and a fleet of engines, for tests of engines that come and go.

The functions run on every rank (support.procs.Ranks); `Fleet` is the engines' side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import fault_engine, procs

import wsync
from wsync._core import LayoutBuilder, describe
from wsync.layout import TrainerLayout

PATIENCE = 60.0
_kept: dict[str, wsync.Sync] = {}
_listed: list[Handle] = []


class Handle(fault_engine.Handle):
    """One engine of a fleet; an engine that was restarted tells another instance."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.name = os.path.basename(path)

    def model_info(self, timeout: float) -> dict[str, Any]:
        info = super().model_info(timeout)
        return {**info, "weight_version": info["version"], "instance": str(info["pids"])}


def share(version: int) -> dict[str, torch.Tensor]:
    """The weights that this rank holds: half of the rows of its pipeline stage's tensors (TP2)."""
    stage, part = divmod(dist.get_rank(), 2)
    whole = list(fault_engine.weights(version).items())[stage :: dist.get_world_size() // 2]
    return {name: each.chunk(2)[part].contiguous() for name, each in whole}


def layout() -> TrainerLayout:
    """Of this rank's share."""
    rank, mine = dist.get_rank(), share(1)
    builder, whole = LayoutBuilder(rank), fault_engine.weights(1)
    for index, (name, each) in enumerate(mine.items()):
        start = [rank % 2 * len(each), *[0] * (each.dim() - 1)]
        strides = [stride * each.itemsize for stride in each.stride()]
        shape = whole[name].shape
        builder.add_shard(name, "float32", shape, start, each.shape, index, 0, strides)
    names, tensors = tuple(mine), [*mine.values()]
    known = rank, dist.get_world_size()
    return TrainerLayout(builder.build(), names, lambda: tensors, describe(tensors, names), *known)


def list_engines(paths: list[str]) -> None:
    """What the function returns that `connect` is given by `connect_to_listed`."""
    known = {handle.path: handle for handle in _listed}
    _listed[:] = [known.get(path) or Handle(path) for path in paths]


def connect_to_listed(paths: list[str]) -> None:
    list_engines(paths)
    options = wsync.Options(deadline=20.0, round_nbytes=4096, progress=False)
    _kept["sync"] = wsync.connect(layout(), lambda: _listed, options=options)


def connect(paths: list[str], options: dict[str, Any]) -> None:
    settings = {
        "deadline": 20.0,
        "round_nbytes": 4096,
        "progress": False,
        "lost": "continue",
        **options,
    }
    known = wsync.Options(**settings)
    engines = [Handle(path) for path in paths]
    _kept["sync"] = wsync.connect(layout(), engines, options=known)


def update(version: int) -> dict[str, str]:
    """Returns why each lost engine is lost."""
    return _kept["sync"].update(share(version), version=version).lost


def update_alone(path: str, version: int) -> None:
    """Updates one engine by a connection of its own, with the weights of the last update."""
    options = wsync.Options(deadline=20.0, progress=False)
    with wsync.connect(layout(), [Handle(path)], options=options) as sync:
        sync.update(share(version), version=version)


def fail(version: int) -> str:
    """The error of an update."""
    try:
        update(version)
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def verify(version: int) -> tuple[bool, str]:
    """Whether a verification finds no difference; its error or what it has found."""
    try:
        found = _kept["sync"].verify(share(version))
    except wsync.WsyncError as error:
        return False, f"{type(error).__name__}: {error}"
    return bool(found), repr(found)


def close() -> None:
    _kept.pop("sync").close()


class Fleet:
    """Engines of two workers each, in processes of their own."""

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [str(folder / f"engine{number}") for number in range(count)]
        self.handles = [Handle(path) for path in self.paths]
        self._heads: list[Any] = [None] * count
        self._workers: list[list[int]] = [[] for _ in range(count)]
        for number in range(count):
            self.start(number)

    def start(self, number: int, *width: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths[number])
        self._heads[number] = procs.started(fault_engine.run_head, self.paths[number], *width)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self._workers[number] = self.handles[number].call("info", None, PATIENCE)["pids"]
                return
            except wsync.PeerClosedError:  # it does not listen yet
                assert time.monotonic() < end
                time.sleep(0.01)

    def kill(self, number: int) -> None:
        for pid in (*self._workers[number], self._heads[number].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._heads[number].join()

    def arm(self, number: int, phase: str, how: str, worker: int = 1) -> None:
        """Plants a fault in a worker; see support.fault_points."""
        self.ask(number, worker, "arm", (phase, how, ""))

    def ask(self, number: int, worker: int, what: str, argument: Any = None) -> Any:
        return self.handles[number].call("ask", (worker, what, argument), PATIENCE)

    def held(self, number: int, among: Sequence[int]) -> list[int]:
        """The version whose bytes each worker holds, or 0."""
        found = []
        for worker in range(fault_engine.WORKERS):
            bytes_held, *_ = self.ask(number, worker, "held")
            versions = [
                version
                for version in among
                if bytes_held
                == [
                    fault_engine.share(tensor, worker).numpy().tobytes()
                    for tensor in fault_engine.weights(version).values()
                ]
            ]
            found.append(versions[0] if versions else 0)
        return found

    def asked(self, number: int) -> int:
        """How many updates an engine was asked for."""
        found: int = self.handles[number].call("info", None, PATIENCE)["updates"]
        return found

    def serving(self, number: int) -> str:
        """The version that an engine reports; "" while it is paused."""
        info = self.handles[number].call("info", None, PATIENCE)
        return "" if info["paused"] else info["version"]

    def close(self) -> None:
        for number, head in enumerate(self._heads):
            if head is not None:
                self.kill(number)
