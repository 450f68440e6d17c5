"""What an operator of torch reads, and what it writes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# operators that make views, though their schemas do not say so
VIEWS = {_aten._unsafe_view, _aten._reshape_alias, _aten.lift_fresh, _aten.detach, _aten.alias}
# operators that read the shape of a tensor alone
SHAPES = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full),
    _aten.new_empty_strided,
}
# operators that write to some elements of a tensor and read none of it
_PUTS = {_aten.index_copy_, _aten.index_fill_, _aten.masked_fill_, _aten.masked_scatter_}
# operators that write to all elements of a tensor and read none of it
FILLS = {_aten.copy_, _aten.fill_, _aten.zero_}
# operators that read nothing of what they write to
COPIES = {*_PUTS, *FILLS}
MOST_RUNS: Final = 1024  # of one index: more are as good as a computation


def _puts(packet: Any, args: Sequence[Any]) -> bool:
    """Whether an operator reads nothing of what it writes to."""
    accumulates = len(args) > 3 and args[3]
    return packet in _PUTS or (packet is _aten.index_put_ and not accumulates)


def arguments_read(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments whose values an operator reads, but for what it leaves of those that it writes
    to."""
    if "out" in kwargs:
        return tensors_in((args, {name: each for name, each in kwargs.items() if name != "out"}))
    written = 1 if packet in FILLS or _puts(packet, args) else 0
    return tensors_in((args[written:], kwargs))


def are_lists(args: Sequence[Any]) -> bool:
    """Whether an operator is given lists of several tensors, and no tensor of a number for each."""
    count = len(args[0]) if isinstance(args[0], list | tuple) else 0
    numbers = (value for value in args if isinstance(value, torch.Tensor))
    return count > 1 and all(value.numel() == 1 for value in numbers)


def indices_in(index: torch.Tensor, size: int) -> list[int]:
    """Where an index of one dimension of that size points to; none where it is no such index."""
    if index.dim() != 1:
        return []
    if index.dtype == torch.bool:
        return index.nonzero().reshape(-1).tolist() if len(index) == size else []
    if index.dtype not in (torch.int64, torch.int32):
        return []
    places = [int(place) for place in index.tolist()]
    inside = all(-size <= place < size for place in places)
    return [place % size for place in places] if inside else []


def index_of_put(
    packet: Any, args: Sequence[Any]
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor] | None:
    """(target, dimension, index, values) of an operator that puts values by one index."""
    if packet is _aten.index_copy_:
        target, dim, index, values = args
        return (target, dim % target.dim(), index, values) if target.dim() else None
    if packet is not _aten.index_put_ or not _puts(packet, args):
        return None
    target, indices, values = args[:3]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return (target, *given[0], values) if len(given) == 1 else None


def parts_written(packet: Any, args: Sequence[Any], target: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a tensor that an operator writes to, in the order in which they lie; the tensor
    itself where no index says parts, or very many."""
    found = index_of_put(packet, args)
    if found is None or found[0] is not target:
        return [target]
    _, dim, index, _ = found
    runs = list(runs_of(sorted({*indices_in(index, target.shape[dim])})))
    few = 0 < len(runs) <= MOST_RUNS
    return [target.narrow(dim, place, count) for _, place, count in runs] if few else [target]


def changed_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def parts_of_cat(
    whole: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Where each of the tensors lies in what they make one after another."""
    at = 0
    for tensor in with_elements(tensors):
        yield whole.narrow(dim, at, tensor.shape[dim]), tensor
        at += tensor.shape[dim]


def with_elements(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Without what torch.cat passes over, whatever its shape is: vectors of no elements."""
    return [tensor for tensor in tensors if tensor.dim() != 1 or tensor.numel()]


def as_cat(
    packet: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> tuple[Sequence[torch.Tensor], int]:
    """What torch.cat is to be given to make what torch.cat or torch.stack makes of these."""
    if packet is _aten.cat:
        return tensors, dim
    dim = dim % (tensors[0].dim() + 1)
    return [tensor.unsqueeze(dim) for tensor in tensors], dim


def runs_of(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first place, count) of places that follow each other."""
    start = 0
    for position in range(1, len(places) + 1):
        if position == len(places) or places[position] != places[position - 1] + 1:
            yield start, places[start], position - start
            start = position
