"""What lies in the rounds of one worker of a plan, and where."""

from __future__ import annotations

import functools
import math

from wsync import _core
from wsync.bucket import FlattenedTensorMetadata, metadata_at
from wsync.trainer.fused_experts import name_of

Bucket = list[FlattenedTensorMetadata]


class WorkerRounds:
    """A worker's part of a plan, as the trainer sees it.

    Attributes:
        manifest: what is delivered; buffer k is round k.
        ring_nbytes: of the worker's ring.
        slots: by round.
    """

    def __init__(self, plan: _core.Plan, worker: int) -> None:
        self.manifest = plan.manifest(worker)
        self.ring_nbytes = max(plan.ring_nbytes(worker), 1)
        self.slots = [plan.slot(worker, k) for k in range(plan.round_count)]

    @functools.cached_property
    def buckets(self) -> list[Bucket]:
        """The tensors of every round in SGLang's terms, whole or an expert's: they start in the
        round's slot.  What has no elements comes with the last of them: engines say whether they
        take it."""
        buckets: list[Bucket] = [[] for _ in self.slots]
        empty: Bucket = []
        for index in range(self.manifest.tensor_count):
            name, dtype, shape, _ = self.manifest.tensor(index)
            if math.prod(shape) == 0:
                empty.append(metadata_at(0, name, dtype, shape))
            for shard in self.manifest.shards(index):
                start = shard.offset - self.slots[shard.buffer].offset
                part = (name, dtype, shape)
                if shard.extent != shape:
                    part = (name_of(name, shard.start), dtype, shard.extent[1:])
                buckets[shard.buffer].append(metadata_at(start, *part))
        if empty and (filled := [bucket for bucket in buckets if bucket]):
            filled[-1] += empty
        return buckets

    @functools.cached_property
    def broadcasts(self) -> list[Bucket]:
        """The same, largest item size first: the bucket that engines make of names and shapes has
        no gaps, and each tensor must start at a multiple of its item size."""
        return [
            sorted(bucket, key=lambda entry: (-entry.dtype.itemsize, entry.start_idx))
            for bucket in self.buckets
        ]
