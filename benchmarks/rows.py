"""Trainers of synthetic tensors: every rank holds a block of rows of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wsync import _core
from wsync.layout import TrainerLayout

Shape = tuple[int, int]


def shapes_of(tensors: int, nbytes: int, columns: int = 64) -> dict[str, Shape]:
    """So many equal bfloat16 tensors of together about so many bytes; rows divide by 8."""
    rows = max(nbytes // tensors // columns // 2 // 8, 1) * 8
    return {f"layers.{index}.weight": (rows, columns) for index in range(tensors)}


def described(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """As engines take shapes: with dtypes."""
    return {name: (shape, torch.bfloat16) for name, shape in shapes.items()}


def nbytes_of(shapes: Mapping[str, Shape]) -> int:
    return sum(2 * rows * columns for rows, columns in shapes.values())


def values(shapes: Mapping[str, Shape], seed: int = 1) -> dict[str, torch.Tensor]:
    """Whole tensors of random bits; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-30000, 30000, shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, shape in shapes.items()
    }


def trainer_layout(whole: Mapping[str, torch.Tensor], rank: int, ranks: int) -> TrainerLayout:
    """The layout of a rank that keeps rows [rank * n, (rank + 1) * n) of every tensor."""
    names = tuple(whole)
    parts = [whole[name].chunk(ranks)[rank].clone() for name in names]
    builder = _core.LayoutBuilder(rank)
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        rows, columns = part.shape
        builder.add_shard(
            name,
            "bfloat16",
            tuple(whole[name].shape),
            (rank * rows, 0),
            (rows, columns),
            index,
            0,
            (2 * columns, 2),
        )
    table = _core.describe(parts, names)
    return TrainerLayout(builder.build(), names, lambda: parts, table, rank=rank, ranks=ranks)
