"""What a trainer process does in tests/test_stock_memory.py: its weights are on a GPU that
tests/fakecuda plays, and its engines run without wsync."""

from __future__ import annotations

import base64
from typing import Any

import torch
from support import gpu_reader
from support.played_gpu import put, reserve, source_of

import wsync
from wsync.messages.gpu_payload import GpuTensor

SHAPES = {"a": (40, 5), "b": (300,), "c": (7, 7, 7)}


class StockEngine:
    """Slime's engine methods: it keeps what it is sent, or where that lies."""

    load_formats = ()

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.where: set[str] = set()
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, **_: Any
    ) -> tuple[bool, str]:
        assert len(serialized_named_tensors) == self.workers
        for loaded, text in zip(self.loaded, serialized_named_tensors, strict=True):
            bucket: Any = gpu_reader.load(base64.b64decode(text))
            flat = bucket["flattened_tensor"]
            if isinstance(flat, GpuTensor):
                self.where.add("gpu")
                gpu_reader.count_down(*flat.counter)
                continue
            self.where.add("host")
            for entry in bucket["metadata"]:
                data = flat[entry.start_idx : entry.end_idx].clone()
                loaded[entry.name] = data.view(entry.dtype).reshape(entry.shape)
        return True, ""


def update(
    workers: int, memory: str | None, offsets: list[int] | None
) -> tuple[str, list[str], bool]:
    """The error of two updates; where the engine found its buckets; and whether these were right,
    as far as they lie in host memory."""
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    source = source_of(list(weights), [put(tensor) for tensor in weights.values()])
    chosen: dict[str, Any] = {} if memory is None else {"stock_memory": memory}
    options = wsync.Options(
        deadline=30.0, progress=False, round_nbytes=2048, ring_nbytes=4096, **chosen
    )
    engine = StockEngine(workers)
    try:
        with wsync.Sync(source, [engine], engine_gpu_offsets=offsets, options=options) as sync:
            sync.update()
            sync.update()
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}", sorted(engine.where), False
    right = all(
        loaded.keys() == weights.keys()
        and all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
        for loaded in engine.loaded
    )
    return "", sorted(engine.where), right


def paused() -> list[str]:
    """What an update says of a tensor whose memory is gone, at first and after one that went
    well; the last one goes well again."""
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    played: dict[str, Any] = {name: put(tensor) for name, tensor in weights.items()}
    gone = {**played, "b": reserve(weights["b"])}
    options = wsync.Options(deadline=30.0, progress=False)
    source = source_of(list(weights), list(played.values()))
    said = []
    with wsync.Sync(source, [StockEngine(1)], options=options) as sync:
        for given in (gone, played, gone, played):
            try:
                sync.update(given)
                said.append("")
            except wsync.WsyncError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said
