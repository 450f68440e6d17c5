"""What lies in the rounds of one receiver of a plan, and where."""

from __future__ import annotations

import functools

from wsync import _core
from wsync.bucket import FlattenedTensorMetadata, metadata_at

Bucket = list[FlattenedTensorMetadata]


class Manifest:
    """A receiver's part of a plan.

    Attributes:
        layout: what is delivered; buffer k is round k.
        nbytes: of the receiver's ring.
        slots: by round.
    """

    def __init__(self, plan: _core.Plan, receiver: int) -> None:
        self.layout = plan.manifest(receiver)
        self.nbytes = max(plan.ring_nbytes(receiver), 1)
        self.slots = [plan.slot(receiver, k) for k in range(plan.round_count)]

    @functools.cached_property
    def buckets(self) -> list[Bucket]:
        """The whole tensors of every round, in SGLang's terms: they start in the round's slot."""
        buckets: list[Bucket] = [[] for _ in self.slots]
        for index in range(self.layout.tensor_count):
            name, dtype, shape, _ = self.layout.tensor(index)
            for shard in self.layout.shards(index):
                start = shard.offset - self.slots[shard.buffer].offset
                buckets[shard.buffer].append(metadata_at(start, name, dtype, shape))
        return buckets

    @functools.cached_property
    def broadcasts(self) -> list[Bucket]:
        """The same, largest item size first: the bucket that engines make of names and shapes has
        no gaps, and each tensor must start at a multiple of its item size."""
        return [
            sorted(bucket, key=lambda entry: (-entry.dtype.itemsize, entry.start_idx))
            for bucket in self.buckets
        ]
