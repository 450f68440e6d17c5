"""An engine worker's part in updates over process groups, with SGLang's semantics."""

import math
from collections.abc import Sequence
from typing import Final

import torch

from wsync._core import InvalidArgumentError, LayoutError
from wsync.bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from wsync.engine.loaders import dtype_of
from wsync.update_group import UpdateGroup

BUCKET: Final = "flattened_bucket"
_KEPT_NBYTES: Final = 64 << 20

Named = list[tuple[str, torch.Tensor]]


class UpdateGroups:
    """The groups that trainers had this worker join, by name.

    rank: the worker's, in its engine.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._groups: dict[str, UpdateGroup] = {}
        self._kept = torch.empty(0, dtype=torch.uint8)

    def init(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Joins a group; returns when all its members have."""
        if not group_name:
            raise InvalidArgumentError("group_name is empty")
        if rank_offset < 1:
            raise InvalidArgumentError(f"rank_offset {rank_offset}: rank 0 is the trainer's")
        if group_name in self._groups:
            raise InvalidArgumentError(f"group {group_name}: this worker is in it")
        self._groups[group_name] = UpdateGroup(
            master_address,
            master_port,
            rank=rank_offset + self._rank,
            size=world_size,
            name=group_name,
            backend=backend,
            timeout=timeout,
        )

    def receive(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> Named:
        """Takes one broadcast of a bucket, or one of each tensor; (name, tensor) in order, which
        are valid until the next call.

        dtypes are torch's names.  A flattened bucket has no gaps, so that each tensor has to
        start at a multiple of its item size.
        """
        group = self._group(group_name)
        if not len(names) == len(dtypes) == len(shapes) or not names:
            raise InvalidArgumentError(
                f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes"
            )
        if load_format is None:
            tensors = [
                torch.empty(tuple(shape), dtype=dtype_of(dtype))
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            group.broadcast(tensors)
            return list(zip(names, tensors, strict=True))
        if load_format != BUCKET:
            raise InvalidArgumentError(f"load_format {load_format!r}: None or {BUCKET!r}")
        metadata, start = [], 0
        for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
            dtype = dtype_of(dtype_name)
            if start % dtype.itemsize:
                raise LayoutError(f"{name}: {dtype_name} at byte {start} of a bucket")
            size = math.prod(shape) * dtype.itemsize
            metadata.append(
                FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, start + size, size)
            )
            start += size
        flat = self._flat(start)
        group.broadcast([flat])
        return FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata).reconstruct_tensors()

    def _flat(self, nbytes: int) -> torch.Tensor:
        """Room for a bucket, valid until the next one: fresh pages cost more than their bytes."""
        if nbytes > _KEPT_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        if self._kept.numel() < nbytes:
            self._kept = torch.empty(nbytes, dtype=torch.uint8)
        return self._kept[:nbytes]

    def destroy(self, group_name: str) -> None:
        """Leaves a group."""
        self._group(group_name).close()
        del self._groups[group_name]

    def _group(self, name: str) -> UpdateGroup:
        if name not in self._groups:
            raise InvalidArgumentError(
                f"group {name!r}: this worker is in none of that name; "
                "init_weights_update_group comes first"
            )
        return self._groups[name]
