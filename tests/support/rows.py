"""Trainers of which each rank holds some rows of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from wsync import _core
from wsync.layout import TrainerLayout

Weights = Mapping[str, torch.Tensor]


def rows_of(whole: Weights) -> dict[str, torch.Tensor]:
    """This rank's rows of every tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        name: tensor[rank * len(tensor) // size : (rank + 1) * len(tensor) // size].contiguous()
        for name, tensor in whole.items()
    }


def sharded(whole: Weights, held: Mapping[str, Any] | None = None) -> TrainerLayout:
    """The layout of this rank.  held: its rows where they lie; None: in memory of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = list((rows_of(whole) if held is None else held).values())
    builder = _core.LayoutBuilder(rank)
    for index, ((name, tensor), mine) in enumerate(zip(whole.items(), tensors, strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        start = [rank * len(tensor) // size, *[0] * (tensor.dim() - 1)]
        strides = [stride * tensor.itemsize for stride in mine.stride()]
        builder.add_shard(name, dtype, tensor.shape, start, mine.shape, index, 0, strides)
    names = tuple(whole)
    table = _core.describe(tensors, names, gpu=True)
    return TrainerLayout(builder.build(), names, lambda: tensors, table, rank, size)
