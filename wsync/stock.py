"""Engines without wsync: one request per bucket, as slime sends them to SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wsync import _core, payload
from wsync.bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from wsync.bucket_session import BucketSession
from wsync.calls import result
from wsync.handles import EngineHandle

Check = Callable[[], object]

LOAD_FORMAT = "flattened_bucket"


class StockSession(BucketSession):
    """A stock engine: rounds are buckets in a shared file, each named in a request of its own.

    A bucket is free again when its request has been answered.  Such an engine takes on the
    version with its last bucket; it cannot refuse to run if an update ends before that, so the
    trainer does not continue it.
    """

    def __init__(self, worker: int, engine: EngineHandle, *, timeout: float) -> None:
        super().__init__(worker, "wsync-stock")
        self._engine = engine
        self._timeout = timeout
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._buckets: list[list[FlattenedTensorMetadata]] = []
        self._slots: list[tuple[int, int, int]] = []
        self._last = -1
        self._version = ""

    def attach(
        self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check
    ) -> tuple[int, int]:
        self._ring = payload.shared_bytes(max(plan.ring_nbytes(self.worker), 1))
        self._slots = [plan.slot(self.worker, k) for k in range(plan.round_count)]
        self._waits = [slot[2] for slot in self._slots]
        self._buckets = _buckets(plan.manifest(self.worker), self._slots)
        # where other engines take part, the last rounds may be theirs alone
        self._last = max((k for k, bucket in enumerate(self._buckets) if bucket), default=-1)
        return self._ring.data_ptr(), self._ring.numel()

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        super().begin(update, version, timeout, check)
        self._version = version

    def wait(self, round: int, timeout: float, check: Check) -> None:
        """Waits until the request of a round has been answered."""
        late = f"engine {self._engine.name}: bucket {round} was not loaded"
        result(self._sent[round], timeout, check, late)

    def _send(self, round: int) -> None:
        if self._given_up.is_set() or not self._buckets[round]:
            return
        offset, nbytes, _ = self._slots[round]
        bucket = FlattenedTensorBucket(
            flattened_tensor=self._ring[offset : offset + nbytes], metadata=self._buckets[round]
        )
        self._engine.update_weights(
            [payload.bucket(bucket) for _ in range(self._engine.workers)],
            load_format=LOAD_FORMAT,
            weight_version=self._version if round == self._last else None,
            timeout=self._timeout,
        )


def _buckets(
    manifest: _core.Layout, slots: list[tuple[int, int, int]]
) -> list[list[FlattenedTensorMetadata]]:
    """What lies in every round's slot, in SGLang's terms; offsets count from the slot."""
    buckets: list[list[FlattenedTensorMetadata]] = [[] for _ in slots]
    for index in range(manifest.tensor_count):
        name, dtype_name, shape, _ = manifest.tensor(index)
        dtype: Any = getattr(torch, dtype_name)
        size = torch.Size(shape)
        for _, round, offset, *_ in manifest.shards(index):
            start = offset - slots[round][0]
            nbytes = size.numel() * dtype.itemsize
            entry = FlattenedTensorMetadata(name, size, dtype, start, start + nbytes, nbytes)
            buckets[round].append(entry)
    return buckets
