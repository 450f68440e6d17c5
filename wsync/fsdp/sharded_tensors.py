"""Finds which parts of a tensor this rank holds: of a DTensor (from its placements and mesh), a
ShardedTensor or a plain tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from wsync import _core
from wsync.fsdp.parts import Part, Shape
from wsync.layout import check_unpartitioned


def parts_of(name: str, tensor: Any) -> Iterator[Part]:
    """The parts of a tensor that this rank holds.

    Raises UnsupportedError, LayoutError and InvalidArgumentError as `layout` does.
    """
    if hasattr(tensor, "materialize"):  # torch's UninitializedTensorMixin
        raise _core.UnsupportedError(
            f"{name}: not initialised yet: run a forward pass first, which initialises the "
            "parameters of torch.nn's Lazy modules"
        )
    if not hasattr(tensor, "shape"):
        raise _core.InvalidArgumentError(f"{name} ({type(tensor).__name__}): not a torch tensor")
    shape = tuple(tensor.shape)
    if hasattr(tensor, "placements"):
        yield _part(name, tensor._local_tensor, shape, *_box(name, tensor, shape))
    elif hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            start, extent = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            yield _part(name, shard.tensor, shape, start, extent)
    else:
        check_unpartitioned(name, tensor)
        yield _part(name, tensor, shape, (0,) * len(shape), shape)


def _part(name: str, local: Any, shape: Shape, start: Sequence[int], extent: Sequence[int]) -> Part:
    """A local tensor that is one box."""
    if tuple(local.shape) != tuple(extent):
        raise _core.LayoutError(
            f"{name}: local shape {tuple(local.shape)} != {tuple(extent)}, the share of this rank "
            "(if Megatron-FSDP has cut it unevenly, pass the tensors of its state_dict())"
        )
    region = tuple(start), tuple(extent), (0,) * len(shape)
    return Part(name, local, shape, (region,) if math.prod(extent) else ())


def _box(name: str, tensor: Any, shape: Shape) -> tuple[Sequence[int], Sequence[int]]:
    """(start, extent) of a DTensor's local tensor.

    Each placement cuts the part that the earlier placements have left, like torch.chunk: all parts
    are equal, except that the last ones may be smaller or empty.
    """
    local, mesh = tensor._local_tensor, tensor.device_mesh
    said = getattr(local, "__create_chunk_list__", None)
    if said is not None:  # Megatron-FSDP cuts unevenly; this is its interface for checkpoints
        (chunk,) = said()
        return chunk.offsets, chunk.sizes
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # the mesh belongs to other ranks
        return (0,) * len(shape), local.shape
    start, extent = [0] * len(shape), list(shape)
    for number in _cut_order(name, tensor):
        placement = tensor.placements[number]
        if placement.is_partial():
            raise _core.UnsupportedError(
                f"{name}: mesh dim {number} has placement {placement!r}, which is not supported: "
                "use Shard or Replicate"
            )
        if not placement.is_replicate():
            dim = placement.dim
            size = -(-extent[dim] // mesh.size(number))
            before = min(size * coordinate[number], extent[dim])
            start[dim] += before
            extent[dim] = min(size, extent[dim] - before)
    return start, extent


def _cut_order(name: str, tensor: Any) -> list[int]:
    """The mesh dimensions of a DTensor in the order in which they cut it.  Megatron-FSDP's meshes
    tell the order.  Other meshes' dimensions cut one after another, except that a _StridedShard of
    FSDP2 cuts after the dimensions within it, for example those of tensor parallelism."""
    said = getattr(tensor.device_mesh, "_shard_order", None)
    if said is not None:
        return list(said)
    plain, strided = list[int](), list[int]()
    for number, placement in enumerate(tensor.placements):
        (strided if hasattr(placement, "split_factor") else plain).append(number)
    for number in strided:
        placement = tensor.placements[number]
        inner = range(number + 1, len(tensor.placements))
        same = (n for n in inner if getattr(tensor.placements[n], "dim", None) == placement.dim)
        if placement.split_factor != math.prod(map(tensor.device_mesh.size, same)):
            raise _core.UnsupportedError(
                f"{name}: {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)} are "
                "not placements of FSDP2"
            )
    return [*plain, *reversed(strided)]
