"""What trainer ranks do in tests/test_cuda_update.py, on the stand-in for the driver; rank 0 also
runs the engines."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import fused
from support.errors import error_of
from support.fakecuda import calls, position
from support.played_gpu import driver, hold, put, reach, source_of
from support.rows import rows_of, sharded
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import Weights, draw, same
from support.weights_only_engine import ProcessEngine
from support.worker_processes import WorkersEngine

import wsync
from wsync import _core
from wsync.demo.engines.model_worker import ModelWorker
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.exchange.trainer_group import TrainerGroup
from wsync.inspection import look
from wsync.machine.device import find, uuid
from wsync.messages.control import Control
from wsync.trainer import quantised_image
from wsync.trainer.sessions.worker import WorkerSession

OPTIONS = wsync.Options(
    deadline=60.0, progress=False, round_nbytes=1 << 14, ring_nbytes=1 << 16, flush_cache=False
)


def steady(config: Any, moved: bool) -> dict[str, Any]:
    """What the third update of a connection to an engine of two workers asks of the driver, whose
    weights lie where they were or elsewhere."""
    source = sharded(draw(config, 1))
    with contextlib.ExitStack() as stack:
        engine = None
        if dist.get_rank() == 0:
            engine = stack.enter_context(TensorParallelEngine(config, tp=2))
        engines = [] if engine is None else [engine]
        sync = stack.enter_context(wsync.connect(source, engines, options=OPTIONS))
        sync.update()
        sync.update()
        expected = draw(config, 2)
        weights = rows_of(expected)
        if not moved:
            kept = dict(zip(source.names, source.tensors(), strict=True))
            for name, tensor in weights.items():
                kept[name].copy_(tensor)
            weights = kept
        dist.barrier()
        begin = position()
        dist.barrier()
        report = sync.update(weights)
        dist.barrier()
        counts = calls(begin)
        dist.barrier()
        right = engine is None or same(engine.weights(), expected)
        pids = engine.pids if engine else []
    return {
        "right": right,
        "rounds": report.rounds,
        "tensors": report.tensors,
        "trainer": counts.get(os.getpid(), Counter()),
        "workers": [counts.get(pid, Counter()) for pid in pids],
    }


def by_own_gpus(config: Any, exchange: str) -> list[tuple[str, bool]]:
    """Updates by ranks with a GPU each: what rounds were exchanged by, and whether the engine holds
    what it should after each."""
    rank = dist.get_rank()
    found = []
    with contextlib.ExitStack() as stack, mock.patch.dict(os.environ):
        os.environ["WSYNC_DEVICE"] = f"cuda:{rank}"
        engine = None
        if rank == 0:
            engine = stack.enter_context(TensorParallelEngine(config, tp=1))
        engines = [] if engine is None else [engine]
        options = dataclasses.replace(OPTIONS, exchange=exchange, park=True)
        sync = stack.enter_context(
            wsync.connect(sharded(draw(config, 0)), engines, options=options)
        )
        for seed in range(3):
            expected = draw(config, seed)
            report = sync.update(rows_of(expected))
            found.append((report.exchange, engine is None or same(engine.weights(), expected)))
            dist.barrier()
    return found


SHAPES = {"a": (64, 96), "b": (3000,), "c": (40, 8)}


def _weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@contextlib.contextmanager
def _engine(
    shapes: dict[str, tuple[int, ...]] = SHAPES, **environment: str
) -> Iterator[ProcessEngine]:
    """An engine of one process with these variables; an empty one is unset."""
    before = dict(os.environ)
    os.environ.update(environment)
    for name, value in environment.items():
        if not value:
            del os.environ[name]
    try:
        engine = ProcessEngine({name: (shape, torch.float32) for name, shape in shapes.items()})
    finally:
        os.environ.clear()
        os.environ.update(before)
    with engine:
        yield engine


def _try(sync: wsync.Sync, weights: Weights) -> str:
    return error_of(lambda: sync.update(weights))


def plan_failure(call: str, k: int, code: int) -> None:
    """Has the k-th such call of this process fail from now on; -1: none."""
    driver = ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"])
    driver.fakecuda_fail(call.encode(), ctypes.c_long(k), code)


def fail_in_the_trainer(call: str, code: int) -> dict[str, Any]:
    """The first such call of the second update fails, or of the first update where later ones
    make none; one more update follows."""
    with _engine() as engine, wsync.connect(_weights(1), [engine], options=OPTIONS) as sync:
        if call != "cuMemcpyHtoDAsync":
            sync.update(_weights(1))
        plan_failure(call, 0, code)
        error = _try(sync, _weights(2))
        plan_failure(call, -1, 0)
        paused, version = engine.paused, engine.model_info(10.0)["weight_version"]
        kept = same(engine.weights(), _weights(1))
        after = _try(sync, _weights(3))
        return {
            "error": error,
            "paused": paused,
            "version": version,
            "kept": kept,
            "after": after,
            "right": same(engine.weights(), _weights(3)),
        }


def fail_in_the_worker(call: str, k: int, code: int) -> dict[str, Any]:
    """The k-th such call of the engine's process fails; one more update follows."""
    fails = f"{call}:{k}:{code}"
    with (
        _engine(WSYNC_FAKE_CUDA_FAIL=fails) as engine,
        wsync.connect(_weights(1), [engine], options=OPTIONS) as sync,
    ):
        error = _try(sync, _weights(2))
        state = engine.model_info(10.0)
        after = _try(sync, _weights(3))
        return {
            "error": error,
            "consistent": state["consistent"],
            "after": after,
            "right": same(engine.weights(), _weights(3)),
        }


def lose_the_worker_s(environment: dict[str, str]) -> dict[str, Any]:
    """The GPU is lost to an engine in an update; then another engine has its turn."""
    options = dataclasses.replace(OPTIONS, ring_nbytes=1 << 15)  # rounds share slots
    with _engine(**environment) as engine, _engine() as other:
        with wsync.connect(_weights(1), [engine], options=options) as sync:
            error, again = _try(sync, _weights(2)), _try(sync, _weights(2))
            paused = engine.paused
        with wsync.connect(_weights(1), [other], options=OPTIONS) as sync:
            after = _try(sync, _weights(3))
        right = same(other.weights(), _weights(3))
    return {"error": error, "again": again, "paused": paused, "after": after, "right": right}


def weights_on_the_gpu() -> list[bool]:
    """Whether two updates with weights on the GPU are right, of an engine that has its own in
    memory of the host; the second one's lie elsewhere."""
    source = source_of(list(SHAPES), [put(tensor) for tensor in _weights(1).values()])
    reaching = {"WSYNC_FAKE_CUDA_PAGEABLE": "1", "WSYNC_DEVICE": "cuda:0"}
    right = []
    with _engine(**reaching) as engine, wsync.Sync(source, [engine], options=OPTIONS) as sync:
        sync.update()
        right.append(same(engine.weights(), _weights(1)))
        sync.update({name: put(tensor) for name, tensor in _weights(2).items()})
        right.append(same(engine.weights(), _weights(2)))
    return right


def short_of_memory() -> dict[str, Any]:
    """Rings that the GPU has no room for, chosen by wsync and then asked for."""
    weights = {f"t{index}": torch.randn(1 << 20) for index in range(12)}
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    options = wsync.Options(deadline=60.0, progress=False, flush_cache=False)
    with ProcessEngine(shapes) as engine:
        with wsync.connect(weights, [engine], options=options) as sync:
            report = sync.update()
        right = same(engine.weights(), weights)
        asked = dataclasses.replace(options, ring_nbytes=48 << 20)
        with wsync.connect(weights, [engine], options=asked) as sync:
            error = _try(sync, weights)
    return {"ring": report.ring_nbytes, "rounds": report.rounds, "right": right, "error": error}


def chosen_rounds(cases: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a rank with a GPU of its own reports of an update for each case, and what the engine
    then says of itself.  A case: bytes of the first rank's GPU that others hold, and options."""
    rank, found = dist.get_rank(), list[dict[str, Any]]()
    with contextlib.ExitStack() as stack, mock.patch.dict(os.environ):
        os.environ["WSYNC_DEVICE"] = f"cuda:{rank}"
        engines = [stack.enter_context(_engine())] if rank == 0 else []
        for seed, (taken, options) in enumerate(cases):
            given = wsync.Options(deadline=60.0, progress=False, flush_cache=False, **options)
            with (
                hold(taken if rank == 0 else 0),
                wsync.connect(sharded(_weights(seed)), engines, options=given) as sync,
            ):
                report = sync.update()
            said = [
                (worker["rounds"], worker["ring_nbytes"])
                for engine in engines
                for worker in look(engine).workers
            ]
            right = [same(engine.weights(), _weights(seed)) for engine in engines]
            facts = {"round": report.round_nbytes, "rounds": report.rounds}
            found.append({**facts, "ring": report.ring_nbytes, "said": said, "right": right})
    return found


def start_engine(environment: dict[str, str]) -> str:
    """What an engine says that is started with these variables, and updated."""
    try:
        with (
            _engine(**environment) as engine,
            wsync.connect(_weights(1), [engine], options=OPTIONS) as sync,
        ):
            error = _try(sync, _weights(2))
            return error or ("right" if same(engine.weights(), _weights(2)) else "wrong bytes")
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}"


def lose_the_engine(shape: tuple[int, ...], rounds: int) -> str:
    """What the trainer says of an engine that is killed in its first update, when it has answered
    for rounds that its slow GPU has not passed: the trainer's GPU then waits for ever."""
    weights = {"w": torch.zeros(shape)}
    options = wsync.Options(
        deadline=5.0, progress=False, round_nbytes=rounds, ring_nbytes=2 * rounds, delivery="wsync"
    )
    acquire = WorkerSession.acquire
    slow = {"WSYNC_FAKE_CUDA_DELAY_US": "400000", "WSYNC_FAKE_CUDA_PAGEABLE": "1"}
    with _engine({"w": shape}, **slow) as engine:

        def strike(session: WorkerSession, round: int, *others: Any) -> None:
            acquire(session, round, *others)
            if round == 3:
                os.kill(engine.pids[0], signal.SIGKILL)

        with (
            mock.patch.object(WorkerSession, "acquire", strike),
            wsync.connect(weights, [engine], options=options) as sync,
        ):
            return _try(sync, weights)


def two_devices() -> dict[str, Any]:
    """Two engines on different GPUs for one rank; then each by itself."""
    with _engine() as first, _engine(WSYNC_DEVICE="cuda:1") as second:
        with wsync.connect(_weights(1), [first, second], options=OPTIONS) as sync:
            error = _try(sync, _weights(1))
        alone = []
        for engine in (first, second):
            with wsync.connect(_weights(2), [engine], options=OPTIONS) as sync:
                alone.append(_try(sync, _weights(2)))
                alone.append("" if same(engine.weights(), _weights(2)) else "wrong bytes")
    return {"error": error, "alone": alone}


class _Blocked:
    """Somebody else's stream of the GPU, which comes to no end before it is let go on."""

    def __init__(self) -> None:
        self._gate, context, self._stream = ctypes.c_uint64(0), ctypes.c_void_p(), ctypes.c_void_p()
        self._at = ctypes.c_uint64(ctypes.addressof(self._gate))
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        driver("cuCtxPushCurrent", context)
        driver("cuMemHostRegister", self._at, ctypes.c_size_t(8), 0)
        driver("cuStreamCreate", ctypes.byref(self._stream), 1)
        driver("cuStreamWaitValue64", self._stream, self._at, ctypes.c_uint64(1), 0)

    def __enter__(self) -> _Blocked:
        return self

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it will find there when it goes on."""
        found = torch.zeros_like(tensor)
        places = [ctypes.c_uint64(t.data_ptr()) for t in (found, tensor)]
        driver("cuMemcpyAsync", *places, ctypes.c_size_t(tensor.nbytes), self._stream)
        return found

    def go_on(self) -> None:
        self._gate.value = 1

    def __exit__(self, *_: object) -> None:
        self.go_on()
        driver("cuStreamSynchronize", self._stream)
        driver("cuStreamDestroy", self._stream)
        driver("cuMemHostUnregister", self._at)
        driver("cuCtxPopCurrent", None)


class _ReadingWorker(ModelWorker):
    """A forward pass is on its way on a stream of its own when an update reaches it, and reads the
    weights later."""

    def __init__(self) -> None:
        self._module = fused.Fused()
        self._read: list[bool] = []
        loader: Any = RecordedLoader(self._module)
        loader._chosen.device = find(uuid(0))  # as of a module whose memory the GPU's is
        super().__init__(loader)
        run = self.receiver._run

        def running(message: Control) -> None:
            held = dict(self._module.named_parameters())
            before = {name: tensor.clone() for name, tensor in held.items()}
            with _Blocked() as forward:
                read = {name: forward.copy(tensor) for name, tensor in held.items()}
                # by then, who does not wait for it has written everything
                threading.Timer(1.0, forward.go_on).start()
                run(message)
            self._read.append(same(read, before))

        self.receiver._run = running  # type: ignore[method-assign]

    def read(self) -> list[bool]:
        return self._read

    def held(self) -> bytes:
        torch.save(fused.held(self._module), data := io.BytesIO())
        return data.getvalue()


def forward_passes() -> dict[str, Any]:
    """Whether forward passes under three updates have read what was there before; and what the
    last update has brought."""
    with WorkersEngine(_ReadingWorker, [{}], name="reading") as engine:
        with wsync.connect(fused.draw(1), [engine], options=OPTIONS) as sync:
            for seed in (1, 2, 3):
                sync.update(fused.draw(seed))
        held = torch.load(io.BytesIO(engine._call("held", None, 60.0)[0]))
        expected = fused.Fused()
        expected.load_weights(list(fused.draw(3).items()))
        return {
            "read": engine._call("read", None, 60.0)[0],
            "right": same(held, fused.held(expected)),
        }


def stuck_in_the_trainer() -> tuple[str, float, bool]:
    """How an update ends, and after how many seconds, for whose weights a stream that does not go
    on may be running; and whether the next one is right when it has."""
    options = dataclasses.replace(OPTIONS, deadline=2.0)
    with _engine() as engine, wsync.connect(_weights(1), [engine], options=options) as sync:
        sync.update(_weights(1))
        with _Blocked():
            begin = time.monotonic()
            error = _try(sync, _weights(2))
            seconds = time.monotonic() - begin
        sync.update(_weights(3))
        return error, seconds, same(engine.weights(), _weights(3))


def quantise() -> dict[str, Any]:
    """Images of this rank's rows, which end inside blocks, filled twice by the GPU and once by the
    host; and what the second of the former asked of the driver."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = [100 * part // size for part in range(size + 1)]
    layouts = []
    for part in range(size):
        builder = _core.LayoutBuilder(part)
        extent = [rows[part + 1] - rows[part], 64]
        builder.add_shard("w", "bfloat16", [100, 64], [rows[part], 0], extent, 0, 0, [128, 2])
        layouts.append(builder.build())
    model = _core.Layout.merge(layouts)
    weights = _core.describe([whole[rows[rank] : rows[rank + 1]]], ["w"])
    found, asked = {}, Counter[str]()
    with contextlib.closing(TrainerGroup(timeout=60)) as group:
        for kind, *block in (("fp8_block", 32, 32), ("nvfp4", 1, 16), ("fp8_tensor", 0, 0)):
            second = "w_2" if kind == "nvfp4" else None
            rule = ("w", kind, True, *block, "w_codes", "w_scale", second, None, 0, 0)
            images = []
            for where in (uuid(0), ""):
                image = quantised_image.Image(model, rank, 1, [rule], 1)
                with (
                    mock.patch.object(quantised_image, "of", return_value=where),
                    mock.patch.object(torch, "empty", torch.zeros),  # between what is written
                ):
                    for _ in range(2):
                        begin = position()
                        table = image.fill(weights, group, 60)
                        if where:
                            asked = calls(begin).get(os.getpid(), Counter())
                address, *_, nbytes = table[len(table) - 1]
                images.append(ctypes.string_at(reach(address), nbytes))
                image.close()
            found[kind] = (images[0] == images[1], len(images[0]), dict(asked))
    return found
