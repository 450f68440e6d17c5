"""What trainer ranks with a played GPU each do in tests/test_remote_nccl.py; rank 0 also runs
engines whose workers have GPUs of their own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
from support import tensor_parallel_engine
from support.engines import FIRST_GPU
from support.errors import error_of
from support.played_gpu import put
from support.procs import runs
from support.rows import rows_of, sharded
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import draw, same
from support.update_cases import before_receiving

import wsync
from wsync.exchange import choose_exchange
from wsync.exchange.choose_exchange import ExchangeSetup
from wsync.exchange.remote_session import RemoteImporter
from wsync.trainer.connection import Connection

GPUS = 8
OPTIONS: dict[str, Any] = {
    "deadline": 60.0,
    "lost": "raise",
    "progress": False,
    "delivery": "distributed",
    "round_nbytes": 1 << 15,
    "ring_nbytes": 1 << 16,
    "flush_cache": False,
}
BRIEF: dict[str, Any] = {**OPTIONS, "deadline": 4.0}
OPERATIONS = 40  # more than an update has
STRUCK = 1  # the round in which something happens


class Census(ctypes.Structure):
    """fakenccl_census_t: what a process has not given back."""

    _fields_ = [
        (name, ctypes.c_long) for name in ("communicators", "works", "received", "operations")
    ]


def _fake() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["WSYNC_NCCL_LIB"])


def _count() -> Census:
    found = Census()
    _fake().fakenccl_census(ctypes.byref(found))
    return found


def census() -> tuple[int, int]:
    """Communicators and groups of this process that are left."""
    found = _count()
    return found.communicators, found.works


def inject(what: str, k: int, value: int = 0) -> None:
    """At the k-th operation from now on, where it is about one; a negative k takes it back."""
    if what in ("hang", "error") and k >= 0:
        k += _count().operations
    _fake().fakenccl_inject(what.encode(), ctypes.c_long(k), ctypes.c_long(value))


class PlacedWorker(tensor_parallel_engine._Worker):
    """Is served by a GPU of its own."""

    def __init__(self, *, rank: int, **settings: Any) -> None:
        os.environ["WSYNC_DEVICE"] = f"cuda:{int(os.environ[FIRST_GPU]) + rank}"
        super().__init__(rank=rank, **settings)

    def census(self) -> tuple[int, int]:
        return census()

    def inject(self, what: str, k: int, value: int) -> None:
        inject(what, k, value)

    def strike(self, step: str, how: int) -> None:
        _strike_at(step, how)


def _strike_at(step: str, how: int) -> None:
    """Has this worker's process get a signal at a step of the next update."""
    name = {
        "introduced": "begin",
        "ordered": "_meet",
        "round": "take",
        "loaded": "prepared",
        "prepared": "verdict",
    }[step]
    original = getattr(RemoteImporter, name)

    def struck(self: RemoteImporter, *arguments: Any) -> Any:
        if step != "round" or arguments[0] == STRUCK:
            setattr(RemoteImporter, name, original)
            os.kill(os.getpid(), how)
        return original(self, *arguments)

    setattr(RemoteImporter, name, struck)


def all_gpus() -> dict[str, str]:
    """The environment of a process that sees all of them, where this one may see its own alone."""
    return {"WSYNC_FAKE_CUDA_FIRST": "0", "WSYNC_FAKE_CUDA_DEVICES": str(GPUS)}


def engine(
    config: Any, tp: int, first: int, experts: str = "tp", **environment: str
) -> TensorParallelEngine:
    """One whose workers have the GPUs from `first` on."""
    settings = {FIRST_GPU: str(first), **all_gpus(), **environment}
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch.object(tensor_parallel_engine, "_Worker", PlacedWorker),
    ):
        return TensorParallelEngine(config, tp=tp, experts=experts, name=f"tp{tp}")


_engines: dict[int, TensorParallelEngine] = {}


def engines(config: Any, *sizes: int) -> list[TensorParallelEngine]:
    """On rank 0, engines of so many workers, which end with it, each on a GPU that nobody else has;
    those of before, if they live."""
    found = []
    for number, tp in enumerate(sizes if dist.get_rank() == 0 else ()):
        if tp in _engines and not all(map(_runs, _engines[tp].pids)):
            _engines.pop(tp).close()
        if tp not in _engines:
            first = dist.get_world_size() + sum(sizes[:number])
            _engines[tp] = engine(config, tp, first)
        found.append(_engines[tp])
    dist.barrier()  # nobody waits for engines to start within an update's deadline
    return found


def _runs(pid: int) -> bool:
    return runs(pid, patience=0.1)


class Held:
    """This rank's rows of every tensor, in memory of its GPU, which is the only one it sees."""

    def __init__(self, config: Any) -> None:
        os.environ |= {
            "WSYNC_FAKE_CUDA_FIRST": str(dist.get_rank()),
            "WSYNC_FAKE_CUDA_DEVICES": "1",
        }
        self.config = config
        weights = draw(config, 0)
        self.tensors = {name: put(mine) for name, mine in rows_of(weights).items()}
        self.layout = sharded(weights, self.tensors)

    def train(self, seed: int) -> None:
        """Other weights, where those were."""
        for name, mine in rows_of(draw(self.config, seed)).items():
            self.tensors[name].fill(mine)


_held: list[Held] = []


def held(config: Any) -> Held:
    """The one of this process, whose driver stays what it is."""
    if not _held:
        _held.append(Held(config))
    return _held[0]


def deliver(config: Any, park: bool) -> dict[str, Any]:
    """Two updates with different weights of engines of one and of two workers: what differed, how
    they travelled, and what is left afterwards."""
    mine, remote = held(config), engines(config, 1, 2)
    options = wsync.Options(**OPTIONS, park=park)
    wrong, paths, paused = [], [], list[bool]()
    start = Connection.start

    def noting(*arguments: Any) -> Any:
        paused.append(all(each.paused for each in remote))
        return start(*arguments)

    with (
        mock.patch.object(Connection, "start", noting),
        wsync.connect(mine.layout, remote, options=options) as sync,
    ):
        for seed in (1, 2):
            mine.train(seed)
            report = sync.update(version=seed)
            wrong += _wrong(remote, config, seed, str(seed))
            paths.append(report.paths)
    return {
        **report.facts(),
        "metrics": report.metrics(),
        "wrong": wrong,
        "paths": paths,
        "paused": paused,
        "left": _left(remote),
    }


def disagree(config: Any) -> dict[str, Any]:
    """What an engine with another version of NCCL is refused with, and two updates of it without
    that; what is said of it in all."""
    mine, remote, logged = held(config), [], list[str]()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            other = engine(config, 1, GPUS - 1, WSYNC_FAKE_NCCL_VERSION="22809")
            remote.append(stack.enter_context(other))
        dist.barrier()
        options = wsync.Options(**OPTIONS, exchange="nccl")
        with wsync.connect(mine.layout, remote, options=options) as sync:
            error = error_of(sync.update)
        warning = mock.Mock()
        once = functools.cache(warning)
        stack.enter_context(mock.patch.object(choose_exchange, "_say_once", once))
        for seed in (1, 2):
            options = wsync.Options(**OPTIONS)
            sync = stack.enter_context(wsync.connect(mine.layout, remote, options=options))
            mine.train(seed)
            report = sync.update(version=seed)
        logged += [str(call.args[-1]) for call in warning.call_args_list]
        wrong = _wrong(remote, config, 2, "2")
    return {"error": error, "wrong": wrong, "paths": report.paths, "logged": logged}


def _wrong(remote: list[TensorParallelEngine], config: Any, seed: int, version: str) -> list[str]:
    """Engines with other weights than those of a seed, or under another version."""
    expected = draw(config, seed) if remote else {}
    return [
        each.name
        for each in remote
        if not same(each.weights(), expected) or each.weight_version != version
    ]


def _left(remote: list[TensorParallelEngine]) -> tuple[tuple[int, int], set[tuple[int, int]]]:
    """What this rank, which has left, and the workers, who have not heard of it, keep."""
    return census(), {left for each in remote for left in each._call("census", None, 60)}


def fail_once(config: Any, plant: str, *how: Any) -> dict[str, Any]:
    """The first update of two engines fails, one way or another; the next one, of those that are
    left, is to succeed."""
    mine, remote = held(config), engines(config, 1, 2)
    waits = signal.SIGSTOP in how or "hang" in how or "never" in how
    options = wsync.Options(**(BRIEF if waits else OPTIONS))
    with wsync.connect(mine.layout, remote, options=options) as sync:
        undo = PLANTS[plant](remote, *how)
        error = error_of(sync.update)
        # an engine that goes on holds no part of the update
        paused = all(each.paused or each.model_info(10)["consistent"] for each in remote)
    undo()
    if plant == "worker" and how[1] == signal.SIGKILL:
        remote = remote[1:]
    mine.train(5)
    with wsync.connect(mine.layout, remote, options=wsync.Options(**OPTIONS)) as sync:
        report = sync.update(version="after")
        wrong = _wrong(remote, config, 5, "after")
    return {
        "error": error,
        "paused": paused,
        "wrong": wrong,
        "paths": set(report.paths.values()),
        "left": _left(remote),
    }


def lose_one(config: Any, step: str, how: int) -> dict[str, Any]:
    """A worker of one engine gets a signal in the first of two updates: the engines that each goes
    without, those that are wrong then, and the others' paths."""
    mine, remote = held(config), engines(config, 1, 2)
    options = wsync.Options(**{**BRIEF, "lost": "continue"})
    facts: dict[str, Any] = {"lost": [], "wrong": [], "paths": []}
    with wsync.connect(mine.layout, remote, options=options) as sync:
        undo = PLANTS["worker"](remote, step, how)
        for seed in (1, 2):
            mine.train(seed)
            report = sync.update(version=seed)
            facts["lost"].append([*report.lost])
            facts["wrong"] += _wrong(remote[1:], config, seed, str(seed))
            facts["paths"].append(report.paths)
    undo()
    return {**facts, "left": _left(remote[1:])}


def fail_in_turn(config: Any, plant: str) -> dict[str, Any]:
    """The first operation fails, then the second one, and so on, each in an update of its own; the
    update that follows must succeed.  The errors, the engines that are wrong after an update which
    returns, and what is left."""
    mine, remote = held(config), engines(config, 1, 2)
    options = wsync.Options(**{**BRIEF, "lost": "continue"})
    wrong, errors, version = list[str](), list[str](), 0
    with wsync.connect(mine.layout, remote, options=options) as sync:
        for k in range(OPERATIONS):
            undo = PLANTS[plant](remote, "error", k, 6)
            version += 2
            mine.train(version - 1)
            error = error_of(functools.partial(sync.update, version=version - 1))
            undo()
            if error:
                errors.append(error)
            else:
                wrong += _wrong(remote, config, version - 1, str(version - 1))
            mine.train(version)
            sync.update(version=version)
            wrong += _wrong(remote, config, version, str(version))
        assert not error, "the last operation is not beyond an update's"
    return {"wrong": wrong, "errors": errors, "left": _left(remote)}


def _plant_in_worker(
    remote: list[TensorParallelEngine], step: str, how: int
) -> Callable[[], object]:
    if not remote:
        return lambda: None
    struck = remote[0]
    struck._call("strike", [(step, how)], 60)
    pid = struck.pids[0]
    return lambda: how == signal.SIGSTOP and os.kill(pid, signal.SIGCONT)


def _inject_in_worker(
    remote: list[TensorParallelEngine], what: str, k: int, value: int
) -> Callable[[], object]:
    if not remote:
        return lambda: None
    struck = remote[0]
    struck._call("inject", [(what, k, value)], 60)
    return lambda: struck._call("inject", [(what, -1, 0)], 60)


def _inject_in_trainer(
    remote: list[TensorParallelEngine], what: str, k: int, value: int
) -> Callable[[], object]:
    if dist.get_rank() != 1:
        return lambda: None
    inject(what, k, value)
    return lambda: inject(what, -1)


PLANTS: Mapping[str, Callable[..., Callable[[], object]]] = {
    "worker": _plant_in_worker,
    "in worker": _inject_in_worker,
    "in trainer": _inject_in_trainer,
}


def update_server(config: Any, url: str, version: int, strike: tuple[int, str] | None) -> str:
    """An update of an engine that is not this trainer's, with weights drawn for the version; with
    (rank, step), that rank is killed there.  The error, or ""."""
    mine = held(config)
    mine.train(version)
    struck = strike is not None and strike[0] == dist.get_rank()
    options = wsync.Options(**(BRIEF if strike else OPTIONS))
    with contextlib.ExitStack() as stack:
        if strike is not None and struck:
            stack.enter_context(_killed_at(strike[1]))
        sync = wsync.connect(mine.layout, [url], options=options)
        error = error_of(lambda: sync.update(version=version))
        sync.close()
    return error or ""


def _killed_at(step: str) -> Any:
    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "round":
        return before_receiving(lambda _, number: kill() if number == STRUCK else None)
    owner, name = {
        "choosing": (ExchangeSetup, "choose"),
        "planned": (ExchangeSetup, "meet"),
        "meeting": (ExchangeSetup, "open"),
        "loaded": (Connection, "prepared"),
        "committing": (Connection, "commit"),
    }[step]
    return mock.patch.object(owner, name, kill)
