"""Parts of tensors: a DTensor's, from its placements and mesh, a ShardedTensor's, a plain one's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from wsync import _core
from wsync.families.rules import regions_of
from wsync.fsdp.parts import Part, Regions, Shape, check_local
from wsync.layout import check_unpartitioned

# (start, extent) of what a rank holds of one dimension, in the order in which it lies
Runs = tuple[tuple[int, int], ...]


class ShardedTensors:
    """Finds the parts of tensors; the boxes of equal placements once."""

    def __init__(self) -> None:
        self._known: dict[Any, Regions] = {}

    def parts(self, name: str, tensor: Any) -> Iterator[Part]:
        """What this rank holds of a tensor.

        Raises UnsupportedError, LayoutError and InvalidArgumentError as `layout` does.
        """
        if hasattr(tensor, "materialize"):  # torch's UninitializedTensorMixin
            raise _core.UnsupportedError(
                f"{name}: not initialised yet, as those of torch.nn's Lazy modules are until their "
                "first forward pass"
            )
        if not hasattr(tensor, "shape"):
            raise _core.InvalidArgumentError(
                f"{name} ({type(tensor).__name__}): not a torch tensor"
            )
        shape = tuple(tensor.shape)
        if hasattr(tensor, "placements"):
            yield Part(name, tensor._local_tensor, shape, self._regions(name, tensor, shape))
        elif hasattr(tensor, "local_shards"):
            for shard in tensor.local_shards():
                start = tuple(shard.metadata.shard_offsets)
                extent = tuple(shard.metadata.shard_sizes)
                check_local(name, shard.tensor, extent)
                regions = ((start, extent, (0,) * len(shape)),) if math.prod(extent) else ()
                yield Part(name, shard.tensor, shape, regions)
        else:
            check_unpartitioned(name, tensor)
            zeros = (0,) * len(shape)
            yield Part(name, tensor, shape, ((zeros, shape, zeros),))

    def _regions(self, name: str, tensor: Any, shape: Shape) -> Regions:
        """The boxes of a DTensor's local tensor."""
        own = _own_boxes(name, tensor, shape)
        if own is not None:
            return own
        mesh = tensor.device_mesh
        local = tuple(tensor._local_tensor.shape)
        order = _cut_order(name, tensor)
        key = (shape, local, tuple(tensor.placements), mesh, order)
        regions = self._known.get(key)
        if regions is None:
            coordinate = mesh.get_coordinate()
            if coordinate is None:  # the mesh belongs to other ranks
                regions = ()
            else:
                _check_ascending(name, tensor, coordinate)
                places = list(zip(tensor.placements, mesh.shape, coordinate, strict=True))
                for way in _ways_to_cut(tensor, order):
                    runs = _cut(name, shape, [(each, *places[each], way[each]) for each in way])
                    extents = tuple(sum(extent for _, extent in part) for part in runs)
                    if extents == local:
                        break
                check_local(name, tensor._local_tensor, extents)
                regions = regions_of(runs)
            self._known[key] = regions
        _check_boxes(name, tensor._local_tensor, regions)
        return regions


def _cut_order(name: str, tensor: Any) -> tuple[int, ...]:
    """The mesh dimensions of a DTensor in the order in which they cut it: Megatron-FSDP's meshes
    say it, or the specification of newer versions of torch does; else one after another."""
    plain = tuple(range(len(tensor.placements)))
    strided = any(hasattr(placement, "split_factor") for placement in tensor.placements)
    said = getattr(tensor.device_mesh, "_shard_order", None)
    if said is not None:
        order = tuple(said)
    else:
        entries = (not strided and getattr(tensor._spec, "shard_order", None)) or ()
        cutting = [number for entry in entries for number in entry.mesh_dims]
        order = (*cutting, *(number for number in plain if number not in cutting))
    if sorted(order) != list(plain) or (strided and order != plain):
        raise _core.UnsupportedError(
            f"{name}: mesh dims {order} are said to be the order in which {tensor.placements} cut "
            "it: each once, and not beside _StridedShard, which says it in another way"
        )
    return order


def _check_ascending(name: str, tensor: Any, coordinate: Sequence[int]) -> None:
    """LayoutError where a mesh dimension that cuts the tensor has its ranks in another order than
    their process group: torch cuts by the group, which sorts them, and writes checkpoints by the
    mesh."""
    mesh = tensor.device_mesh
    for number, placement in enumerate(tensor.placements):
        row: list[Any] = list(coordinate)
        row[number] = slice(None)
        ranks = mesh.mesh[tuple(row)].tolist()
        if not placement.is_replicate() and ranks != sorted(ranks):
            raise _core.LayoutError(
                f"{name}: dimension {number} of its mesh has ranks {ranks}, which do not ascend: "
                "which of them has which part is not certain; make the mesh with ascending ranks"
            )


def _said_boxes(local: Any) -> list[tuple[Shape, Shape]] | None:
    """(offsets, sizes) in a local tensor's own metadata, as Megatron-FSDP has checkpoints written
    by it; None where it has none."""
    make = getattr(local, "__create_chunk_list__", None)
    if make is None:
        return None
    found = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in make()]
    return [box for box in found if math.prod(box[1])]


def _own_boxes(name: str, tensor: Any, shape: Shape) -> Regions | None:
    """The boxes that a local tensor's own metadata says, where one dimension of the mesh has cut
    it, as Megatron-FSDP does it unevenly; None where there is none, or where placements tell more:
    in which order several dimensions have cut it."""
    said = _said_boxes(tensor._local_tensor)
    cuts = [placement for placement in tensor.placements if not placement.is_replicate()]
    if said is None or len(said) > 1 or len(cuts) != 1 or not cuts[0].is_shard():
        return None
    start, extent = said[0] if said else ((0,) * len(shape), (0, *shape[1:]))
    check_local(name, tensor._local_tensor, extent)
    return ((start, extent, (0,) * len(shape)),) if said else ()


def _check_boxes(name: str, local: Any, regions: Regions) -> None:
    """LayoutError where a local tensor's own metadata says other boxes than its placements do."""
    said = _said_boxes(local)
    placed = {(start, extent) for start, extent, _ in regions}
    if said is not None and set(said) != placed:
        raise _core.LayoutError(
            f"{name}: its own metadata has (offsets, sizes) {sorted(said)}, its placements "
            f"{sorted(placed)}"
        )


def _ways_to_cut(tensor: Any, order: Iterable[int]) -> list[dict[int, int]]:
    """The split factors of a DTensor's mesh dimensions, in the order in which they cut it; the last
    way is that of its placements one after another.

    A _StridedShard says that inner mesh dimensions have cut before it.  Where rows do not divide,
    FSDP2 over tensor parallelism (and full_tensor()) has what that order gives,
    distribute_tensor(src_data_rank=None) what the placements' own does.
    """
    placements, sizes = tensor.placements, tensor.device_mesh.shape
    factors = {number: int(getattr(placements[number], "split_factor", 1)) for number in order}
    inner_first: list[int] = []
    for number in reversed(factors):
        dim = getattr(placements[number], "dim", None)
        inner = [sizes[n] for n in inner_first if getattr(placements[n], "dim", None) == dim]
        if factors[number] == 1:
            inner_first.insert(0, number)
        elif factors[number] == math.prod(inner):
            inner_first.append(number)
        else:
            return [factors]
    return [dict.fromkeys(inner_first, 1), factors]


def _cut(name: str, shape: Shape, places: Iterable[tuple[int, Any, int, int, int]]) -> list[Runs]:
    """What a rank holds of every dimension.

    `places`: (mesh dimension, placement, ranks there, this rank's index, split factor) in the order
    in which they cut.  Each placement cuts what those before it have left, as torch.chunk does:
    equal parts but for the last ones, which may be smaller or empty.
    """
    runs: list[Runs] = [((0, size),) for size in shape]
    for number, placement, ranks, index, factor in places:
        if placement.is_replicate():
            continue
        if placement.is_partial() or not isinstance(getattr(placement, "dim", None), int):
            raise _core.UnsupportedError(
                f"{name}: mesh dim {number} has placement {placement!r}, which is no weight: "
                "Shard and Replicate are"
            )
        runs[placement.dim] = _share(runs[placement.dim], ranks, index, factor)
    return runs


def _share(runs: Runs, ranks: int, index: int, factor: int) -> Runs:
    """A rank's share of a dimension.

    `factor` is _StridedShard's: the dimension is first cut into so many parts, as an inner mesh
    dimension will cut it (tensor-parallel ranks inside FSDP), and each of them over the ranks.
    """
    count = sum(extent for _, extent in runs)
    found: list[tuple[int, int]] = []
    for piece in range(factor):
        start, extent = _chunk(count, factor, piece)
        offset, extent = _chunk(extent, ranks, index)
        found += _slice(runs, start + offset, extent)
    return tuple(found)


def _chunk(count: int, parts: int, index: int) -> tuple[int, int]:
    """(start, extent) of a part of torch.chunk; those that it does not return are empty."""
    size = -(-count // parts)
    start = min(size * index, count)
    return start, min(size, count - start)


def _slice(runs: Runs, start: int, extent: int) -> Iterator[tuple[int, int]]:
    """`extent` elements from the start-th on of what the runs hold one after another."""
    for first, count in runs:
        low, high = max(start, 0), min(start + extent, count)
        if low < high:
            yield first + low, high - low
        start -= count
