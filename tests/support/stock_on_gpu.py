"""A trainer whose buckets for a stock engine lie on a GPU of tests/fakecuda: its addresses are the
host's, so that a stream of the host fills them."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.engines import SglangReceiver
from support.sglang_receiver import digest

import wsync
from wsync.messages import gpu_payload
from wsync.trainer import connection
from wsync.trainer.sessions import stock

SHAPES = {"a": (40, 5), "b": (300,), "c": (7, 7, 7), "d": (256,), "e": (300, 1)}


class OnGpu(stock.StockSession):
    """The fake's GPU, though the connection's stream is the host's."""

    def __init__(self, worker: int, engine: Any, *, timeout: float, on_gpu: bool) -> None:
        assert not on_gpu  # the weights are the host's
        super().__init__(worker, engine, timeout=timeout, on_gpu=True)

    def attach(self, plan: Any, device: Any, timeout: float, check: Any) -> tuple[int, int]:
        return super().attach(plan, gpu(), timeout, check)


def gpu() -> Any:
    return SimpleNamespace(uuid=wsync._core.cuda_devices()[1][0][0], ordinal=0)


class StockEngine:
    """SGLang's unpickler behind slime's engine methods."""

    workers = 2
    load_formats = ()

    def __init__(self, tree: Path, *uuids: str) -> None:
        self.receiver = SglangReceiver(tree, *uuids)
        self.loaded: dict[str, list[object]] = {}
        self.opened: list[Any] = []

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, **_: Any
    ) -> tuple[bool, str]:
        assert len(serialized_named_tensors) == self.workers
        for text in serialized_named_tensors:
            answer = self.receiver(base64.b64decode(text))
            if "error" in answer:
                return False, answer["error"]
            self.loaded |= {row[0]: row[1:] for row in answer["tensors"]}
            self.opened += answer["opened"]
        return True, ""


class OneSlot:
    """The plan of a worker whose two rounds share a slot."""

    round_count = 2

    def ring_nbytes(self, worker: int) -> int:
        return 64

    def slot(self, worker: int, round: int) -> wsync._core.Slot:
        return wsync._core.Slot((0, 16, round - 1))

    def manifest(self, worker: int) -> wsync.Layout:
        builder = wsync._core.LayoutBuilder()
        builder.add_shard("a", "float32", [4], [0], [4], 0, 0, [4])
        return builder.build()


def update_twice(tree: Path, uuid: str) -> tuple[list[bool], list[Any], bool]:
    """Whether each update brought every byte; what the engine opened; whether it let all go."""
    engine = StockEngine(tree, uuid)
    options = wsync.Options(round_nbytes=1408, ring_nbytes=2816, delivery="stock", deadline=60)
    right = []
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    try:
        with (
            mock.patch.object(connection, "StockSession", OnGpu),
            wsync.connect(tensors, [engine], options=options) as sync,
        ):
            for _ in range(2):
                for tensor in tensors.values():
                    tensor.copy_(torch.randn(tensor.shape))
                sync.update()
                right.append(
                    engine.loaded
                    == {n: ["torch.float32", list(t.shape), digest(t)] for n, t in tensors.items()}
                )
        return right, engine.opened, gpu_payload.collect() == 0
    finally:
        engine.receiver.close()
