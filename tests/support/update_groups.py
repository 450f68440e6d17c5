"""A stock engine worker's part in updates over process groups, with SGLang's semantics."""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from wsync._core import InvalidArgumentError, LayoutError
from wsync.bucket import FlattenedTensorBucket, metadata_at
from wsync.demo.engines.model_worker import ModelWorker, Named
from wsync.exchange.update_group import Rendezvous, UpdateGroup, device_of
from wsync.machine.deadline import Deadline
from wsync.messages.control import FLATTENED_BUCKET

BROADCAST_SECONDS: Final = 120.0
"""The most that a broadcast may take where an engine is not told otherwise: as many seconds as a
trainer waits for it by default.  SGLang has no such deadline of its own."""


class UpdateGroups:
    """The groups that trainers had this worker join, by name.

    rank: the worker's, in its engine.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._groups: dict[str, UpdateGroup] = {}

    def init(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        meeting: float,
        timeout: float = BROADCAST_SECONDS,
    ) -> None:
        """Joins a group; returns when all its members have.

        meeting: seconds until they have; timeout: the most seconds that a broadcast may take.

        Raises:
            DeadlineError: they have not.
        """
        if rank_offset < 1:
            raise InvalidArgumentError(f"rank_offset {rank_offset}: rank 0 is the trainer's")
        if group_name in self._groups:
            raise InvalidArgumentError(f"group {group_name}: this worker is in it")
        place = Rendezvous(master_address, master_port, world_size, backend, group_name)
        self._groups[group_name] = place.join(
            rank_offset + self._rank,
            meeting,
            bool,
            device=device_of(backend),  # this thread's
            collective_timeout=timeout,
        )

    def receive(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        timeout: float = math.inf,
    ) -> Named:
        """Takes one broadcast of a bucket, or one of each tensor; (name, tensor) in order.

        dtypes are torch's names.  A flattened bucket has no gaps, so that each tensor has to
        start at a multiple of its item size.  timeout: seconds, where the group's are more.
        """
        group = self._member(group_name)
        if load_format not in (None, FLATTENED_BUCKET):
            raise InvalidArgumentError(f"load_format {load_format!r}: None or {FLATTENED_BUCKET!r}")
        metadata, start = [], 0
        for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
            entry = metadata_at(start, name, dtype_name, shape)
            if load_format and start % entry.dtype.itemsize:
                raise LayoutError(f"{name}: {dtype_name} at byte {start} of a bucket")
            metadata.append(entry)
            start = entry.end_idx
        flat = torch.empty(start, dtype=torch.uint8, device="cpu")
        each = [flat[entry.start_idx : entry.end_idx] for entry in metadata]
        deadline, late = Deadline(timeout), f"group {group_name}: a broadcast was not done"
        group.broadcast([flat] if load_format else each, lambda: deadline.check(late))
        return FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata).reconstruct_tensors()

    def destroy(self, group_name: str) -> None:
        """Leaves a group."""
        group = self._member(group_name)
        del self._groups[group_name]
        group.close()

    def _member(self, name: str) -> UpdateGroup:
        if name not in self._groups:
            raise InvalidArgumentError(
                f"group {name!r}: this worker is in none of that name; "
                "init_weights_update_group comes first"
            )
        return self._groups[name]


def take(
    worker: ModelWorker,
    groups: UpdateGroups,
    *,
    group_name: str,
    end: Deadline,
    weight_version: str | None = None,
    **bucket: Any,
) -> None:
    """Has a worker load what a trainer broadcasts.  A worker that fails stays in the group, as in
    SGLang."""
    with worker._bucket(end, weight_version):
        worker.load_weights(groups.receive(group_name=group_name, timeout=end.left, **bucket))
