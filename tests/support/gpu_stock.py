"""An engine without wsync on a real GPU: torch rebuilds what SGLang's server would be sent."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import sys
import types
from multiprocessing.connection import Connection
from typing import Any

import torch

_SECONDS = 120.0
_BUCKETS = "sglang.srt.weight_sync.tensor_bucket"


class StockEngine:
    """Slime's engine methods before `workers` processes, each of which keeps all it is sent."""

    load_formats = ()

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, **_: Any
    ) -> tuple[bool, str]:
        assert load_format == "flattened_bucket"
        assert len(serialized_named_tensors) == self.workers
        for pipe, text in zip(self._pipes, serialized_named_tensors, strict=True):
            pipe.send(text)
        answers = [self._answer(pipe) for pipe in self._pipes]
        return not any(answers), "; ".join(filter(None, answers))

    def weights(self) -> list[dict[str, torch.Tensor]]:
        """What each worker has, on the host."""
        for pipe in self._pipes:
            pipe.send(None)
        return [self._answer(pipe) for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_SECONDS)

    def _answer(self, pipe: Any) -> Any:
        assert pipe.poll(_SECONDS), f"no answer within {_SECONDS:g} s"
        return pipe.recv()


class FlattenedTensorMetadata:
    """What SGLang calls the place of a tensor in a bucket; its fields come with the pickle."""


def _serve(pipe: Connection[Any, Any]) -> None:
    _play_sglang()
    kept: dict[str, torch.Tensor] = {}
    while True:
        try:
            text = pipe.recv()
        except EOFError:
            return
        if text is None:
            pipe.send({name: tensor.cpu() for name, tensor in kept.items()})
            continue
        try:
            kept |= _load(text)
            torch.cuda.synchronize()
            pipe.send("")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _play_sglang() -> None:
    """The class that buckets name, and devices by their UUIDs instead of their numbers."""
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync", _BUCKETS):
        sys.modules[name] = types.ModuleType(name)
    FlattenedTensorMetadata.__module__ = _BUCKETS
    sys.modules[_BUCKETS].FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    reductions: Any = torch.multiprocessing.reductions
    rebuild = reductions.rebuild_cuda_tensor
    uuids = [
        str(torch.cuda.get_device_properties(device).uuid)
        for device in range(torch.cuda.device_count())
    ]

    def by_uuid(*arguments: Any) -> Any:
        number = uuids.index(arguments[6])
        return rebuild(*arguments[:6], number, *arguments[7:])

    reductions.rebuild_cuda_tensor = by_uuid


def _load(text: str) -> dict[str, torch.Tensor]:
    """A bucket's tensors, copied: its memory is the trainer's."""
    bucket = pickle.loads(base64.b64decode(text))
    flat = bucket["flattened_tensor"]
    return {
        entry.name: flat[entry.start_idx : entry.end_idx]
        .view(entry.dtype)
        .reshape(entry.shape)
        .to("cuda", copy=True)
        for entry in bucket["metadata"]
    }
