"""How the ranks of a Megatron-Core model share a parameter, where no family's rules say it.

The class of the module that holds a parameter says along which dimension it is cut, by the names
that Megatron-Core 0.16 gives to such classes (`tensor_parallel/layers.py`,
`extensions/transformer_engine.py`); what Megatron says of a parameter is asked of other modules
only, because some of it is wrong and some parameters are not described at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.rules import Cut, ShardPlacement, regions_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["share_of"]

# Parts of the names of classes, and the dimension along which they cut their weight.
_CUTS = (
    ("VocabParallelEmbedding", 0),
    ("ColumnParallel", 0),
    ("RowParallel", 1),
    ("DotProductAttention", 0),  # one softmax offset for each head
)
# Megatron's own layers know both sizes: the attributes that hold them, by the dimension.
_SIZES = (
    ("output_size", "output_size_per_partition"),
    ("input_size", "input_size_per_partition"),
)
# Modules whose parameters consist of several that are cut each on its own.
_JOINED = ("GatedDeltaNet", "MambaMixer")


def share_of(
    name: str, tensor: Tensor, modules: Sequence[Module], cut: Cut
) -> tuple[tuple[int, ...], ShardPlacement]:
    """(shape of the whole parameter, what this rank holds of it).

    name: the global one.  modules: the one that holds the parameter, the one that holds that, and
    so on.  cut: this rank's place among those that share parameters of this kind.

    Raises:
        LayoutError: it is not certain how it is cut.
    """
    shape = tuple(tensor.shape)
    axis = -1 if cut.ranks == 1 else _axis(name, tensor, modules, cut)
    if axis < 0:
        return shape, ShardPlacement(shape, regions_of([[(0, extent)] for extent in shape]))
    halves = 2 if _is_gated(name, modules) else 1
    if shape[axis] % halves:
        raise _core.LayoutError(
            f"{name}: {shape[axis]} rows of a gated layer are not as many of the gate as others"
        )
    part = shape[axis] // halves
    whole = part * cut.ranks
    held = [[(0, extent)] for extent in shape]
    held[axis] = [(half * whole + cut.rank * part, part) for half in range(halves)]
    full = (*shape[:axis], halves * whole, *shape[axis + 1 :])
    return full, ShardPlacement(shape, regions_of(held))


def _axis(name: str, tensor: Tensor, modules: Sequence[Module], cut: Cut) -> int:
    """The dimension along which a parameter is cut, or -1."""
    classes = _classes(modules[0])
    key = name.rsplit(".", 1)[-1]
    joined = [kind for module in modules for kind in _JOINED if kind in _classes(module)]
    found = next((axis for text, axis in _CUTS if any(text in kind for kind in classes)), None)
    if "GroupedMLP" in classes:
        raise _core.LayoutError(f"{name}: experts that lie transposed in one parameter")
    if found is None:  # TELinear is what both parallel layers are made of; alone, it is not cut
        found = -1 if "TELinear" in classes else _described(name, tensor)
    elif key.startswith("layer_norm_") or (found == 1 and tensor.dim() == 1):
        found = -1  # a norm within the layer, or the bias of what the ranks sum up
    elif found < len(_SIZES) and not _is_cut(name, modules[0], found, cut):
        found = -1
    if found >= 0 and joined:
        raise _core.LayoutError(
            f"{name}: part of a {joined[0]}, in which a rank holds parts of several tensors: their "
            "order is known to a family's rules only"
        )
    return found


def _classes(module: Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]


def _is_cut(name: str, module: Any, axis: int, cut: Cut) -> bool:
    """Whether a parallel layer is cut after all: some are told to be of a group of one rank."""
    whole, part = (getattr(module, size, None) for size in _SIZES[axis])
    if not isinstance(whole, int) or not isinstance(part, int) or not part:
        return True
    if whole // part not in (1, cut.ranks):
        raise _core.LayoutError(
            f"{name}: cut over {whole // part} ranks, where {cut.ranks} ranks share parameters"
        )
    return whole != part


def _described(name: str, tensor: Tensor) -> int:
    """What Megatron says of a parameter."""
    if getattr(tensor, "parallel_mode", None) == "duplicated":
        return -1
    if not getattr(tensor, "tensor_model_parallel", False):
        return -1
    axis = getattr(tensor, "partition_dim", -1)
    if not isinstance(axis, int) or not 0 <= axis < tensor.dim():
        raise _core.LayoutError(
            f"{name}: tensor_model_parallel is True, but partition_dim is {axis}: it is not known "
            "how it is cut"
        )
    return axis


def _is_gated(name: str, modules: Sequence[Module]) -> bool:
    """Whether a rank holds rows of the gate, then as many of what it is multiplied with."""
    if ".linear_fc1" not in name:
        return False
    for module in modules:
        gated = getattr(getattr(module, "config", None), "gated_linear_unit", None)
        if gated is not None:
            return bool(gated)
    raise _core.LayoutError(f"{name}: no config says whether the layer is gated")
