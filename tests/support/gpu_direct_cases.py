"""What trainer ranks do in tests/test_gpu_direct.py, with weights on GPUs that tests/fakecuda
plays; rank 0 also runs the engine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.cuda_cases import plan_failure
from support.errors import error_of
from support.fakecuda import calls, position
from support.played_gpu import (
    PLACES,
    Pieces,
    PlayedTensor,
    by_handle,
    driver,
    in_pieces,
    put,
    replace,
    source_of,
)
from support.rows import rows_of, sharded
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import Weights, draw, same
from support.weights_only_engine import ProcessEngine

import wsync
from wsync import _core
from wsync.machine import device
from wsync.machine.device import KnownMemory
from wsync.trainer import lending
from wsync.trainer.sessions.worker import WorkerSession

OPTIONS = wsync.Options(
    deadline=60.0, progress=False, round_nbytes=1 << 20, flush_cache=False, delivery="direct"
)
# the first lies across six pieces, more than go into one message, and others share the last
SHAPES = {"a": (3100, 1000), "b": (3000,), "c": (40, 8), "d": (64, 96)}


def fill(played: Mapping[str, PlayedTensor], weights: Weights) -> None:
    for name, tensor in weights.items():
        played[name].fill(tensor)


def steady(
    config: Any,
    place: str,
    gpus: Sequence[int],
    delivery: str,
    tp: int,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the third update asks of the driver, of an engine of workers on GPU 0; gpus: of each
    rank's weights; more: options."""
    whole, gpu = draw(config, 1), gpus[dist.get_rank()]
    played = PLACES[place](rows_of(whole), gpu)
    options = dataclasses.replace(OPTIONS, delivery=delivery, **(more or {}))
    right, paths = [], []
    with contextlib.ExitStack() as stack:
        engine = None
        if dist.get_rank() == 0:
            engine = stack.enter_context(TensorParallelEngine(config, tp=tp))
        engines = [] if engine is None else [engine]
        sync = stack.enter_context(wsync.connect(sharded(whole, played), engines, options=options))
        for seed in (1, 2, 3):
            fill(played, rows_of(draw(config, seed)))
            dist.barrier()
            begin = position()
            dist.barrier()
            report = sync.update()
            dist.barrier()
            counts = calls(begin)
            paths += report.paths.values()
            right.append(engine is None or same(engine.weights(), draw(config, seed)))
            dist.barrier()
        pids = engine.pids if engine else []
    return {
        "right": right,
        "paths": set(paths),
        "ring": report.ring_nbytes,
        "rounds": report.rounds,
        "trainer": counts.get(os.getpid(), Counter()),
        "workers": [counts.get(pid, Counter()) for pid in pids],
    }


class Torch:
    """How often a played torch has given memory back to the driver; never, unless it is told."""

    freed = 0

    def frees(self, gpu: int) -> int:
        return self.freed


def asks_nothing(config: Any) -> dict[str, Any]:
    """`steady`, of a torch that says that it has freed nothing."""
    with mock.patch.object(lending, "frees", Torch().frees):
        return steady(config, "by handle", [0], "direct", 2)


def changes() -> list[tuple[bool, bool]]:
    """Updates of the same tensors, whose memory is another one in turn: whether each was right, and
    whether the driver was asked about memory."""
    tensors, found = by_handle(weights_of(0)), []
    a, b = tensors["a"], tensors["b"]
    torch = Torch()

    def again() -> None:
        replace(tensors.values())
        torch.freed += 1

    steps = [
        *(lambda: None, lambda: None),
        lambda: a.move(put(a.like)),  # a.data = ..., or a.untyped_storage().resize_(...)
        again,  # resize_(0), torch.cuda.empty_cache(), resize_(n)
        lambda: None,
        lambda: tensors.update(b=PlayedTensor(b.data_ptr(), b.like, b)),  # a view
        lambda: None,
    ]
    with mock.patch.object(lending, "frees", torch.frees), _connected(tensors) as (sync, engine):
        for seed, change in enumerate(steps):
            change()
            fill(tensors, weights_of(seed))
            begin = position()
            sync.update(tensors)
            right = same(engine.weights(), weights_of(seed))
            found.append((right, calls(begin)[os.getpid()]["cuPointerGetAttributes"] > 0))
    return found


def known_memory() -> list[Any]:
    """How often the driver is asked what tensors lie in that an engine keeps; or an error."""
    torch, memory, pieces = Torch(), KnownMemory(), Pieces(1 << 20, kind=0)
    small = {"d": weights_of(1)["d"]}
    one, other, pausing = by_handle(small), by_handle(small), pieces.cut(small)

    def asked(tensors: Mapping[str, PlayedTensor]) -> int:
        begin, table = position(), _core.describe([*tensors.values()], gpu=True)
        buffers = memory.bind(table)
        assert [buffers[0][0]] == [tensor.data_ptr() for tensor in tensors.values()]
        return calls(begin).get(os.getpid(), Counter())["cuPointerGetAttributes"]

    with mock.patch.object(device, "frees", torch.frees):
        found: list[Any] = [asked(tensors) for tensors in (one, one, other, one, one)]
        torch.freed += 1
        found += [asked(one), asked(one), asked(pausing), asked(pausing)]
        pieces.unmap()
        found.append(error_of(lambda: asked(pausing)))
    return found


def weights_of(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@contextlib.contextmanager
def _connected(
    played: Mapping[str, PlayedTensor], **options: Any
) -> Iterator[tuple[wsync.Sync, ProcessEngine]]:
    shapes = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
    source = source_of(list(played), list(played.values()))
    chosen = dataclasses.replace(OPTIONS, **options)
    with ProcessEngine(shapes) as engine, wsync.Sync(source, [engine], options=chosen) as sync:
        yield sync, engine


def _try(sync: wsync.Sync, weights: Any = None) -> str:
    return error_of(lambda: sync.update(weights))


class Warned(logging.Handler):
    """What wsync says, as a list of texts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("wsync").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("wsync").removeHandler(self)


def moves(place: str, park: bool) -> dict[str, Any]:
    """Updates from memory that is another one each time, whose tensors nobody else keeps."""
    right, paths = [], set[str]()
    played = PLACES[place](weights_of(0))
    with _connected(played, park=park) as (sync, engine):
        for seed in range(4):
            begin = position()
            report = sync.update(PLACES[place](weights_of(seed)))
            right.append(same(engine.weights(), weights_of(seed)))
            paths |= set(report.paths.values())
            asked = calls(begin)[engine.pids[0]]
    return {"right": right, "paths": paths, "worker": asked}


def pauses() -> dict[str, Any]:
    """An allocator takes its memory away between updates, and brings other memory to the same
    addresses."""
    memory = Pieces(sum(t.nbytes + 512 for t in weights_of(0).values()))
    played = memory.cut(weights_of(1))
    with mock.patch.object(lending, "frees", Torch().frees), _connected(played) as (sync, engine):
        sync.update()
        memory.unmap()
        paused = _try(sync)
        memory.map()
        fill(played, weights_of(2))
        after = _try(sync)
        right = [same(engine.weights(), weights_of(2))]
        memory.unmap()
        memory.map()
        fill(played, weights_of(3))
        begin = position()
        report = sync.update()
        right.append(same(engine.weights(), weights_of(3)))
        maps = calls(begin)[engine.pids[0]]["cuMemMap"]
    return {
        "paused": paused,
        "after": after,
        "right": right,
        "paths": set(report.paths.values()),
        "mapped": maps == memory.count > 4,
    }


def cannot_be_lent() -> dict[str, Any]:
    """One tensor lies in memory that is never exported; then all do."""
    weights = weights_of(1)
    part = {"a": weights["a"], "c": weights["c"]}
    played = {**by_handle(weights), **in_pieces(part, kind=0)}
    found: dict[str, Any] = {"right": [], "paths": []}
    with Warned() as found["said"], _connected(played) as (sync, engine):
        for seed in (1, 2):
            fill(played, weights_of(seed))
            found["paths"].append(set(sync.update().paths.values()))
            found["right"].append(same(engine.weights(), weights_of(seed)))
        private = in_pieces(weights_of(3), kind=0)
        found["paths"].append(set(sync.update(private).paths.values()))
        found["right"].append(same(engine.weights(), weights_of(3)))
    return found


def late_weights() -> bool:
    """Whether an update brings what a foreign stream still writes when it begins, as torch's does
    behind an optimizer's step."""
    weights = weights_of(1)
    played = in_pieces(weights)
    gate, context, stream = ctypes.c_uint64(0), ctypes.c_void_p(), ctypes.c_void_p()
    at = ctypes.c_uint64(ctypes.addressof(gate))
    # who does not wait has read everything by then
    opening = threading.Timer(1.0, lambda: setattr(gate, "value", 1))
    with _connected(played) as (sync, engine):
        sync.update()
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        driver("cuCtxPushCurrent", context)
        driver("cuMemHostRegister", at, ctypes.c_size_t(8), 0)
        driver("cuStreamCreate", ctypes.byref(stream), 1)
        driver("cuStreamWaitValue64", stream, at, ctypes.c_uint64(1), 0)
        for name, tensor in played.items():
            begin, nbytes = ctypes.c_uint64(tensor.data_ptr()), weights[name].nbytes
            value = ctypes.c_ubyte(0x3F)
            driver("cuMemsetD8Async", begin, value, ctypes.c_size_t(nbytes), stream)
        opening.start()
        sync.update()
        wanted = {n: torch.full(t.shape, 0x3F3F3F3F, dtype=torch.int32) for n, t in weights.items()}
        right = same(engine.weights(), {n: t.view(torch.float32) for n, t in wanted.items()})
        driver("cuStreamSynchronize", stream)
        driver("cuStreamDestroy", stream)
        driver("cuMemHostUnregister", at)
        driver("cuCtxPopCurrent", None)
    return right


def frees_late(place: str) -> list[bool]:
    """Whether tensors that the trainer lets go of right after an update are kept; and whether they
    are given back once the worker has let go of them, too."""
    alive: list[weakref.ref[Any]] = []
    with _connected(PLACES[place](weights_of(0))) as (sync, engine):
        for seed in range(1, 4):
            played = PLACES[place](weights_of(seed))
            alive.append(weakref.ref(played["a"]))
            sync.update(played)
            del played
            gc.collect()
        assert same(engine.weights(), weights_of(3))
        return [reference() is not None for reference in alive]


def lending_fails(place: str, call: str) -> dict[str, Any]:
    """Such a call fails in the trainer's second update, for which the weights have moved."""
    with Warned() as said, _connected(PLACES[place](weights_of(1))) as (sync, engine):
        sync.update()
        moved = PLACES[place](weights_of(2))
        plan_failure(call, 0, 999)
        error = _try(sync, moved)
        plan_failure(call, -1, 0)
        fill(moved, weights_of(3))
        report = sync.update(moved)
        right = same(engine.weights(), weights_of(3))
    return {"error": error, "right": right, "said": said, "paths": set(report.paths.values())}


def borrowing_fails(place: str, call: str, k: int) -> dict[str, Any]:
    """The k-th such call fails in the worker; two more updates follow."""
    with (
        mock.patch.dict(os.environ, WSYNC_FAKE_CUDA_FAIL=f"{call}:{k}:999"),
        _connected(PLACES[place](weights_of(1))) as (sync, engine),
    ):
        error = _try(sync)
        consistent = engine.model_info(10.0)["consistent"]
        right = []
        for seed in (2, 3):
            report = sync.update(PLACES[place](weights_of(seed)))
            right.append(same(engine.weights(), weights_of(seed)))
    paths = set(report.paths.values())
    return {"error": error, "consistent": consistent, "right": right, "paths": paths}


def elsewhere() -> dict[str, Any]:
    """The worker is in another PID namespace."""
    with (
        mock.patch.object(lending, "place_of", lambda gpu, **_: f"{gpu}@1"),
        _connected(by_handle(weights_of(1))) as (sync, engine),
    ):
        paths = set(sync.update().paths.values())
        return {"paths": paths, "right": same(engine.weights(), weights_of(1))}


def beside_mps() -> dict[str, Any]:
    """The worker is a client of MPS, and the trainer is none."""
    played = by_handle(weights_of(1))
    with (
        mock.patch.dict(os.environ, WSYNC_FAKE_CUDA_MPS="1"),
        _connected(played) as (sync, engine),
    ):
        paths = set(sync.update().paths.values())
        return {"paths": paths, "right": same(engine.weights(), weights_of(1))}


def worker_dies() -> list[str]:
    """What the trainer says whose worker is killed while it reads; and whether another engine is
    updated then, from memory that the first one had open."""
    played = by_handle(weights_of(1))
    post = WorkerSession.post

    with _connected(played) as (sync, engine):
        sync.update()

        def strike(session: WorkerSession, *rest: Any) -> None:
            os.kill(engine.pids[0], signal.SIGKILL)
            post(session, *rest)

        with mock.patch.object(WorkerSession, "post", strike):
            error = _try(sync)
    with _connected(played) as (sync, engine):
        said = _try(sync) or ("right" if same(engine.weights(), weights_of(1)) else "wrong")
    return [error, said]
