"""Where what lies in memory comes from, as a tracer follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from wsync.engine.learn.regions import Move, UnexpressedError, compose

SOURCE: Final = "source"  # a tensor of the model
HELD: Final = "held"  # a tensor of the module, read when the recording's clock was `clock`
CONSTANT: Final = "constant"  # values that do not depend on the model's
COMPUTED: Final = "computed"  # anything else


@dataclass(frozen=True, slots=True)
class Write:
    """Where part of a tensor's content comes from.

    dtypes: as it was read at its origin, then what it was converted to on its way.
    clock: when it was read at its origin.  time: when it was written to the module.
    names: tensors of the model that a computed value may depend on.  flow: those whose values
    operators have brought there, where a tracer computes everything; None where it does not.
    keep: memory that a constant's address lies in.
    """

    move: Move
    kind: str
    dtypes: tuple[torch.dtype, ...] = ()
    clock: int = 0
    names: frozenset[str] = frozenset()
    flow: frozenset[str] | None = None
    reason: str = ""
    keep: torch.Tensor | None = None
    time: int = 0


def continued(write: Write, move: Move, seen: torch.dtype, into: torch.dtype) -> Write:
    """A write that goes on from a temporary to where it was read."""
    dtypes = write.dtypes
    if write.kind != COMPUTED:
        if dtypes[-1] != seen and len(dtypes) == 1:
            dtypes = (seen,)  # the same bytes by another name
        elif dtypes[-1] != seen:
            raise UnexpressedError(f"{dtypes[-1]} read as {seen}")
        if seen != into:
            dtypes = (*dtypes, into)
    return replace(write, move=move, dtypes=dtypes)


def last_written(read: Move, writes: Sequence[Write]) -> list[Write]:
    """Of writes, in order, those whose values a read finds: the last one of each place."""
    found = list[Write]()
    rest = [read]
    for write in reversed(writes):
        if not rest:
            break
        low, high = write.move.span()
        left = list[Move]()
        for part in rest:
            start, end = part.reversed().span()
            if end <= low or high <= start:
                left.append(part)
                continue
            try:
                moves, outside = compose(part, write.move)
            except UnexpressedError:  # perhaps
                moves, outside = [part], [part]
            left += outside
            if moves and (not found or found[-1] is not write):
                found.append(write)
        rest = left
    return found


def found_by(tensor: torch.Tensor, writes: Sequence[Write]) -> Sequence[Write]:
    """Of writes, in order, those whose values lie in a tensor."""
    return last_written(place_of(tensor), writes) if in_memory(tensor) else writes


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether it has elements, which lie at addresses."""
    return tensor.numel() > 0 and tensor.layout == torch.strided and not tensor.is_meta


def place_of(tensor: torch.Tensor) -> Move:
    """A tensor, as a move to itself."""
    return move_to(tensor, tensor.data_ptr(), byte_strides(tensor), tensor.dtype)


def byte_strides(tensor: torch.Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def move_to(
    tensor: torch.Tensor, destination: int, strides: Sequence[int], into: torch.dtype
) -> Move:
    """A tensor's elements, moved to an address: with strides in bytes, and converted to a dtype."""
    dims = tuple(zip(tensor.shape, byte_strides(tensor), strides, strict=True))
    return Move(tensor.data_ptr(), destination, dims, tensor.element_size(), into.itemsize)
