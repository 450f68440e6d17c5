"""What a round and an update cost beside the bytes that they move: processor time of the thread
that updates, on both sides, with the tensors of Qwen3-30B-A3B, each of 64 bytes.

One engine has a part and a tensor for each, of all that an update asks about the most; the other
one is fused as real ones are (see benchmarks.fused_model), and was learnt.

The same tensors are moved in few rounds and in many.  A round is the slope between the two, and
what is left of an update without rounds is its fixed cost; so is all of one whose weights the
fused engine reads in place, beside the copies of its worker.  On the played GPU it is the time of
the stand-in for the driver, too; its kernels run in a thread that is not counted.

Weights that lie on the played GPU are in as many allocations as torch makes for the real ones.  Of
these updates the calls of the driver count: what Python answers about a played tensor takes longer
than what torch does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from support.weights_only_engine import BareWorker, ProcessEngine, Shapes

import wsync
from benchmarks import plan_shapes
from benchmarks.consumer import digest
from benchmarks.engines import played
from benchmarks.fused_model import FusedModel
from benchmarks.ranks import on_ranks
from wsync import _core
from wsync.demo.engines.model_worker import ModelWorker
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.trainer import lending

VALUES = 32  # of each tensor, in bfloat16
FEW, MANY = 8, 1032  # rounds that are asked for
ALLOCATIONS = 3145
MOST_CALLS = 10  # of the driver, beside those of a thread that waits
REPEATS = 11
GOALS = {"a round": 25e-6, "an update": 2e-3}
FUSED = ", a fused engine"
SIDES = {"trainer": "update", "worker": "handle"}  # and the step that is all others
SECONDS = 300.0  # that anything may take
_LOG = "WSYNC_FAKE_CUDA_LOG"

Seconds = dict[str, float]  # by step


def run() -> Iterator[dict[str, Any]]:
    yield from _at("the host")
    yield from in_place()
    with mock.patch.dict(os.environ, played()):
        yield from _at("the played GPU")
    yield from on_a_gpu()


def _at(place: str) -> Iterator[dict[str, Any]]:
    for kept in ("", FUSED):
        yield from on_ranks(1, _rows, place, kept)


def in_place() -> Iterator[dict[str, Any]]:
    """The same of weights in shared memory that the engine reads there."""
    yield from on_ranks(1, _rows, "the host", FUSED, True)


def on_a_gpu() -> Iterator[dict[str, Any]]:
    """The same of weights on the played GPU that the engine reads there."""
    with tempfile.TemporaryDirectory(prefix="wsync-benchmark-") as folder:
        settings = {_LOG: f"{folder}/calls", "WSYNC_FAKE_CUDA_MEMORY": str(8 << 30)}
        with mock.patch.dict(os.environ, {**played(), **settings}):
            yield from on_ranks(1, _rows, "the played GPU", FUSED, True)


def _put(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Copies of tensors in allocations of the played GPU, several in each."""
    from support.played_gpu import PlayedTensor

    found, each = {}, -(-len(weights) // ALLOCATIONS)
    for index, (name, tensor) in enumerate(weights.items()):
        if index % each == 0:
            memory = _core.IpcMemory(0, 2 << 20)
        found[name] = PlayedTensor(memory.address + index % each * 512, tensor, memory)
        found[name].fill(tensor)
    return found


def _rows(_: int, place: str, kept: str, shared: bool = False) -> list[dict[str, Any]]:
    weights = {
        weight.name: torch.full((VALUES,), index % 251, dtype=torch.bfloat16)
        for index, weight in enumerate(plan_shapes.qwen3_moe())
    }
    right, nbytes = digest(weights), sum(tensor.nbytes for tensor in weights.values())
    on_gpu = shared and _LOG in os.environ
    if on_gpu:
        weights = _put(weights)
    elif shared:  # in one piece
        block = torch.stack([*weights.values()]).share_memory_()
        weights = dict(zip(weights, block, strict=True))
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    worker = _FusedWorker if kept else _Worker
    with contextlib.ExitStack() as stack:
        if on_gpu:  # where torch counts what it frees
            stack.enter_context(mock.patch.object(lending, "frees", lambda gpu: 0))
        engine = stack.enter_context(ProcessEngine(shapes, worker=worker, timeout=SECONDS))
        few = many = _updates(weights, engine, FEW, shared)
        if not shared:
            many = _updates(weights, engine, MANY, shared)
    verified, more = few["right"] == many["right"] == right, many["rounds"] - few["rounds"]
    rows, calls = [], few.get("calls")
    kept += ", read in place" if shared else ""
    for side, whole in SIDES.items():
        found = {"an update": few[side][whole]}
        if more:
            a_round = (many[side][whole] - few[side][whole]) / more
            found = {"a round": a_round, "an update": few[side][whole] - few["rounds"] * a_round}
        steps = [f"{name} {1e3 * s:.2f}" for name, s in few[side].items() if name != whole]
        for what, seconds in found.items():
            figure = f"{1e6 * seconds:.0f} us of a processor"
            if what == "an update":
                figure += f"; ms of one of {few['rounds']} rounds: {', '.join(steps)}"
                figure += f"; {calls[side]} calls of the driver" if calls else ""
            rows.append(
                {
                    "benchmark": "control",
                    "case": f"{what}, {len(weights)} tensors{kept}, {place}, {side}",
                    "bytes": nbytes,
                    "seconds": seconds,
                    "peer": "none; the goal",
                    "peer_seconds": GOALS[what],
                    "ratio": GOALS[what] / max(seconds, 1e-9),
                    "verified": verified,
                    "figure": figure,
                    **({"calls": calls[side], "most_calls": MOST_CALLS} if calls else {}),
                }
            )
    return rows


def _updates(
    weights: dict[str, torch.Tensor], engine: ProcessEngine, rounds: int, shared: bool
) -> dict[str, Any]:
    """Median seconds of the steps of an update, by side; its rounds, and whether it was right."""
    size = len(weights) * 2 * VALUES // rounds // 64 * 64
    options = wsync.Options(
        round_nbytes=size,
        delivery="direct" if shared else "wsync",
        progress=False,
        deadline=SECONDS,
    )
    taken: dict[str, list[Seconds]] = {side: [] for side in SIDES}
    engine.fill(0xA5)
    with wsync.connect(weights, [engine], options=options) as sync:
        found: dict[str, Any] = {"rounds": sync.update().rounds}
        found["right"] = engine.digest()
        clock = Clock()
        with clock.on(_steps_of(sync)):
            for _ in range(REPEATS):
                engine._call("taken", None, SECONDS)
                sync.update()
                taken["trainer"].append(clock.read())
                taken["worker"].append(engine._call("taken", None, SECONDS)[0])
        if _LOG in os.environ:
            found["calls"] = _calls_of(sync, engine)
    return found | {side: _medians(each) for side, each in taken.items()}


def _calls_of(sync: Any, engine: ProcessEngine) -> dict[str, int]:
    """Calls of the driver in an update, by side, without those of a thread that waits."""
    from support.fakecuda import calls, position

    begin = position()
    sync.update()
    found = calls(begin)
    pids = {"trainer": os.getpid(), "worker": engine.pids[0]}
    return {side: found[pid].total() - found[pid]["cuStreamQuery"] for side, pid in pids.items()}


def _steps_of(sync: Any) -> list[tuple[str, Any, str]]:
    """(step, object, method) of the trainer's side."""
    connection = sync._connection
    return [
        ("bind", sync, "_bind"),
        ("lend", sync, "_lend"),
        ("open", sync, "_open"),
        ("start", connection, "start"),
        ("run", connection, "run"),
        ("prepared", connection, "prepared"),
        ("commit", connection, "commit"),
        ("update", sync, "update"),
    ]


def _medians(taken: list[Seconds]) -> Seconds:
    return {name: statistics.median(each[name] for each in taken) for name in taken[0]}


class Clock:
    """Processor time of a thread in methods, by step."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    @contextlib.contextmanager
    def on(self, steps: list[tuple[str, Any, str]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for step, owner, method in steps:
                call = functools.partial(self._timed, step, getattr(owner, method))
                stack.enter_context(mock.patch.object(owner, method, call))
            yield

    def read(self) -> Seconds:
        """What has come since this was asked last."""
        seconds, self._seconds = dict(self._seconds), Counter()
        return seconds

    def _timed(self, step: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        start = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            self._seconds[step] += time.thread_time() - start


class _Worker(BareWorker):
    """Bare weights whose worker counts its own processor time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._count()

    def _count(self) -> None:
        loader: Any = self.receiver._loader
        steps = [(name, loader, name) for name in ("begin", "finish", "confirm")]
        self._clock = Clock()
        self._on = self._clock.on([*steps, ("handle", self.receiver, "handle")])
        self._on.__enter__()

    def taken(self) -> Seconds:
        return self._clock.read()


class _FusedWorker(_Worker):
    """The same of a model that has fewer tensors than the trainer, and a load_weights."""

    def __init__(self, *, shapes: Shapes, threads: int) -> None:
        module = FusedModel(shapes, VALUES)
        self.tensors = module.pieces(shapes)
        ModelWorker.__init__(self, RecordedLoader(module, threads=threads))
        self._count()
