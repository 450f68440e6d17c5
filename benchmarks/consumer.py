"""An engine process of bare weights, updated by wsync or in the peers' way."""

from __future__ import annotations

from multiprocessing import current_process
from typing import Any

import torch
from support.weights_only_engine import BareWorker, ProcessEngine, Shapes, digest

from benchmarks import peers, sglang_bucket

__all__ = ["Consumer", "digest"]

_SECONDS = 600.0


class Consumer(ProcessEngine):
    """A process engine that takes the peers' buckets as well."""

    def __init__(self, shapes: Shapes, bucket_class: Any = None) -> None:
        super().__init__(shapes, name="consumer", worker=_Worker)
        # torch shares descriptors between processes that know the same key
        self._call("peer", [(bytes(current_process().authkey), bucket_class)], _SECONDS)

    def take(self, payload: bytes) -> None:
        """One call of the peers' way: returns when the bucket has been loaded."""
        self._call("bucket", [payload], _SECONDS)

    def set_threads(self, count: int) -> None:
        """How many threads torch uses there from now on."""
        self._call("threads", [count], _SECONDS)

    def clear(self) -> None:
        """Fills every weight with bytes that no weight has."""
        self.fill(0xA5)


class _Worker(BareWorker):
    def peer(self, key: bytes, bucket_class: Any) -> None:
        current_process().authkey, self._bucket_class = key, bucket_class
        sglang_bucket.pose()

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def bucket(self, payload: bytes) -> None:
        peers.load(payload, self.tensors, self._bucket_class)
