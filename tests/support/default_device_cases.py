"""What trainer ranks do in tests/test_default_device.py, where torch's default device is none that
a CPU can write to; rank 0 also runs the engine."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from support.errors import error_of
from support.weights_only_engine import BareWorker, ProcessEngine
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

ELSEWHERE = torch.device("meta")
SHAPES = {
    "a": ((3,), torch.uint8),
    "b": ((5, 7), torch.bfloat16),
    "c": ((0, 4), torch.float32),
    "d": ((40, 70), torch.float32),
}
COUNT = 2  # of each, one a rank
OPTIONS = {"deadline": 60.0, "progress": False}


def held(rank: int) -> dict[str, torch.Tensor]:
    """What a rank's tensors are after an update."""
    return {
        f"{name}{rank}": torch.full(shape, 3 + rank, dtype=dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def bucket() -> list[str]:
    """Tensors that a bucket gives back otherwise; with gaps between them."""
    weights = held(0)
    with ELSEWHERE:
        made = wsync.FlattenedTensorBucket(named_tensors=list(weights.items()))
        found = made.reconstruct_tensors()
    return [name for name, tensor in found if not torch.equal(tensor, weights[name])]


class Worker(BareWorker):
    def update(self, *given: Any, **named: Any) -> str:
        with ELSEWHERE:
            return super().update(*given, **named)


def update_inferring(options: dict[str, str]) -> list[str]:
    """The same where the first update runs in torch's inference mode, and in messages to several
    peers of a rank."""
    shapes = {f"{name}{rank}": form for rank in range(COUNT) for name, form in SHAPES.items()}
    with contextlib.ExitStack() as stack:
        engines = []
        if dist.get_rank() == 0:
            engines = [stack.enter_context(ProcessEngine(shapes)) for _ in range(2)]

        def act() -> None:
            mine = held(dist.get_rank())
            with wsync.connect(mine, engines, options=wsync.Options(**OPTIONS, **options)) as sync:
                with torch.inference_mode():
                    sync.update()
                sync.update()

        error = error_of(act)
        if error or not engines:
            return [error] if error else []
        found = engines[1].weights()
    expected = held(0) | held(1)
    return [name for name in shapes if not torch.equal(found[name], expected[name])]


def update_in(dtype: torch.dtype, options: dict[str, str]) -> list[str]:
    """The same in trainers whose default dtype is another one than the engine's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return update_with(options)
    finally:
        torch.set_default_dtype(before)


def update_with(options: dict[str, str]) -> list[str]:
    """The error of two updates, or the tensors that the engine has otherwise."""
    shapes = {f"{name}{rank}": form for rank in range(COUNT) for name, form in SHAPES.items()}
    with contextlib.ExitStack() as stack:
        engines = []
        if dist.get_rank() == 0:
            engines.append(stack.enter_context(ProcessEngine(shapes, worker=Worker)))
        error = error_of(lambda: _update_twice(engines, wsync.Options(**OPTIONS, **options)))
        if error or not engines:
            return [error] if error else []
        found = engines[0].weights()
    expected = held(0) | held(1)
    return [name for name in shapes if not torch.equal(found[name], expected[name])]


def _update_twice(engines: list[Any], options: wsync.Options) -> None:
    mine = held(dist.get_rank())
    with ELSEWHERE, wsync.connect(mine, engines, options=options) as sync:
        sync.update()
        sync.update()


def write(folder: str) -> str:
    mine = held(dist.get_rank())

    def act() -> None:
        with ELSEWHERE, wsync.DiskSync(mine, folder=folder) as sync:
            sync.update()

    return error_of(act)


class Fused(torch.nn.Module):
    """A loader that is learnt, but for `b`, which it computes."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in (("qkv", 24), ("b", 4)):
            data = torch.zeros(rows, 8)
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name == "b":
                self.b.data.copy_(tensor * 2)
            elif name != "none":
                self.qkv.data["qkv".index(name) * 8 :][:8].copy_(tensor)


def learn() -> tuple[str, dict[str, bool]]:
    """Why a loader of rank 0 was not learnt, and what of its module is as it should be."""
    module = Fused()
    loader = RecordedLoader(module)
    engine = ThreadEngine([loader])
    (receiver,) = engine.receivers
    handle = receiver.handle

    def elsewhere(*arguments: Any, **more: Any) -> Any:
        with ELSEWHERE:
            return handle(*arguments, **more)

    receiver.handle = elsewhere  # type: ignore[method-assign]
    rows = {"q": 8, "k": 8, "v": 8, "b": 4, "none": 0}
    weights = {name: torch.full((rows[name], 8), ord(name[0])) + 0.5 for name in rows}
    engines = [engine] if dist.get_rank() == 0 else []
    with wsync.connect(weights, engines, options=wsync.Options(**OPTIONS)) as sync:
        sync.update()
        sync.update()
    expected = {"qkv": torch.cat([weights[name] for name in "qkv"]), "b": weights["b"] * 2}
    held = dict(module.named_parameters())
    return loader.reason, {name: torch.equal(held[name], expected[name]) for name in expected}
