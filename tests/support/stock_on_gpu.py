"""A trainer whose weights, and buckets for a stock engine, lie on a GPU of tests/fakecuda."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.engines import SglangReceiver
from support.played_gpu import put, source_of
from support.sglang_receiver import digest

import wsync
from wsync.messages import gpu_payload
from wsync.trainer.sessions.stock import StockSession

SHAPES = {"a": (40, 5), "b": (300,), "c": (7, 7, 7), "d": (256,), "e": (300, 1)}


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
    options = wsync.Options(
        round_nbytes=1408, ring_nbytes=2816, delivery="stock", deadline=60, stock_memory="gpu"
    )
    right = []
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    source = source_of(list(tensors), [put(tensor) for tensor in tensors.values()])
    try:
        with wsync.Sync(source, [engine], options=options) as sync:
            for _ in range(2):
                tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
                sync.update({name: put(tensor) for name, tensor in tensors.items()})
                right.append(
                    engine.loaded
                    == {n: ["torch.float32", list(t.shape), digest(t)] for n, t in tensors.items()}
                )
        return right, engine.opened, gpu_payload.collect() == 0
    finally:
        engine.receiver.close()


class _Failing:
    """An engine, as it has been checked, that fails a bucket in some way."""

    name = "E"
    workers = 1

    def __init__(self, how: str) -> None:
        self._how = how

    def update_weights(self, payloads: Callable[[], object], **_: object) -> None:
        if self._how == "not asked":
            raise wsync.RemoteError("it reports another version")
        payloads()
        if self._how == "refused":
            raise wsync.RemoteError("HTTP 400")
        raise wsync.PeerClosedError(self._how)


def left_by(how: str) -> None:
    """Closes a session whose only bucket has failed in some way."""
    session = StockSession(0, _Failing(how), timeout=5, on_gpu=True)  # type: ignore[arg-type]
    session.make_ring(OneSlot(), gpu())  # type: ignore[arg-type]
    session.attach(OneSlot(), gpu(), 5, bool)  # type: ignore[arg-type]
    session.begin(1, "7", 5, bool)
    stream = wsync._core.Stream()
    session.acquire(0, stream, 5, bool)
    session.post(0, stream, 5, bool)
    with contextlib.suppress(wsync.WsyncError):
        session.wait(0, 60, bool)
    session.close()
