"""An engine of SGLang's own model class in worker processes, updated by wsync or the peers' way."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from multiprocessing import current_process
from typing import Any

import torch
from support.worker_processes import WorkersEngine

from benchmarks.engines import TESTS
from wsync import sglang
from wsync.demo.engines.model_worker import ModelWorker
from wsync.module_tensors.held import bound_tensors

_SECONDS = 600.0


class SglangConsumer(WorkersEngine):
    """tp workers with a model of `family` of these sizes; path: as SglangEngine's."""

    def __init__(self, family: str, sizes: dict[str, Any], *, tp: int, path: Sequence[str]) -> None:
        # torch shares descriptors between processes that know the same key
        each = {"family": family, "sizes": sizes, "tp": tp, "key": bytes(current_process().authkey)}
        settings = [{**each, "rank": rank} for rank in range(tp)]
        super().__init__(
            _Worker, settings, name="SGLang", timeout=_SECONDS, path=(*path, str(TESTS))
        )

    def take(self, *payloads: bytes) -> None:
        """One bucket of the peers' way, a payload for each worker; returns when it was loaded."""
        self._call("bucket", payloads, _SECONDS)

    def set_threads(self, count: int) -> None:
        """How many threads torch uses in each worker from now on."""
        self._call("threads", [count] * self.workers, _SECONDS)

    def clear(self) -> None:
        """Fills every weight with bytes that no weight has."""
        self._call("clear", None, _SECONDS)

    def digest(self) -> str:
        """A hash of all that the workers hold."""
        return " ".join(self._call("digest", None, _SECONDS))

    def reasons(self) -> list[str]:
        """Why a worker's load_weights could not be replaced, or nothing."""
        return [text for text in self._call("unlearnt", None, _SECONDS) if text]


class _Worker(ModelWorker):
    """Takes SGLang's buckets, and control messages with the loader that wsync.sglang has."""

    def __init__(
        self, *, family: str, sizes: dict[str, Any], tp: int, rank: int, key: bytes
    ) -> None:
        from support import sglang_host, tiny_models

        current_process().authkey = key
        sglang_host.load()
        sglang_host.host(tp=tp, ep=1, rank=rank)
        self._model: Any = sglang_host.build(family, tiny_models.config(family, **sizes))
        loader = sglang.SglangLoader(self._model)
        super().__init__(loader, rank=rank)
        self._loader = loader

    def bucket(self, payload: bytes) -> None:
        self._load(pickle.loads(payload))

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def clear(self) -> None:
        for path, parameter in self._model.named_parameters():
            assert parameter.data_ptr(), path
            parameter.data.view(-1).view(torch.uint8).fill_(0xA5)

    def unlearnt(self) -> str:
        return self._loader.reason

    def _load(self, content: dict[str, Any]) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(
            flattened_tensor=content["flattened_tensor"], metadata=content["metadata"]
        )
        self._model.load_weights(bucket.reconstruct_tensors())

    def digest(self) -> str:
        total = hashlib.blake2b()
        for path, _, _, tensor in bound_tensors(self._model):
            total.update(path.encode())
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            total.update(data.numpy().data)
        return total.hexdigest()
