"""How the ranks of a Megatron-Core model share a parameter, for models without a family's rules.

The class name of a parameter's module tells along which dimension the parameter is cut.  The names
are those of Megatron-Core 0.16 (`tensor_parallel/layers.py`, `extensions/transformer_engine.py`).
For all other modules, wsync reads the attributes that Megatron sets on parameters.  Class names go
first, because some of these attributes are wrong or missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wsync import _core
from wsync.families.rules import Cut, ShardPlacement

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class _Kind(NamedTuple):
    """How a module is cut if its class name contains `text`: its weight is cut along `axis`.  The
    module's attributes `whole` and `part` hold the whole and the local extent of that axis.
    `repeats`: whether several ranks may hold the same part."""

    text: str
    axis: int
    whole: str = ""
    part: str = ""
    repeats: bool = False


_KINDS = (
    _Kind("VocabParallelEmbedding", 0),
    _Kind("ColumnParallel", 0, "output_size", "output_size_per_partition"),
    _Kind("RowParallel", 1, "input_size", "input_size_per_partition"),
    _Kind("DotProductAttention", 0),  # one softmax offset for each head
    # Megatron-Bridge's norm over all heads (0.6.2, `models/minimax_m2/minimax_m2_provider.py`).
    _Kind("FullDimRMSNorm", 0, "global_dim", "local_dim", repeats=True),
)
# Parameters that join several tensors, each cut on its own.  By the parameter's name in its module:
# the module's attributes with each tensor's whole extent (or its factors), in the tensors' order
# (Megatron-Core 0.16, `ssm/gated_delta_net.py` and `ssm/mamba_mixer.py`).
_HEADS = ("num_value_heads",)
_CONVOLVED = ("qk_dim", "qk_dim", "v_dim")
_DELTA_NET = {
    "in_proj.weight": (*_CONVOLVED, "v_dim", *_HEADS, *_HEADS),
    "conv1d.weight": _CONVOLVED,
    "conv1d.bias": _CONVOLVED,
    "A_log": _HEADS,
    "dt_bias": _HEADS,
    "out_proj.weight": ("v_dim",),
}
_X_B_C = ("d_inner", "ngroups*d_state", "ngroups*d_state")
_MAMBA = {
    "in_proj.weight": ("d_inner", *_X_B_C, "nheads"),
    **{f"conv1d{join}{kind}": _X_B_C for kind in ("weight", "bias") for join in "._"},
    **dict.fromkeys(("A_log", "D", "dt_bias"), ("nheads",)),
    **dict.fromkeys(("norm.weight", "out_proj.weight"), ("d_inner",)),
}
# Megatron's settings that make gate and up rows alternate, by a part of the parameter's name.
_ALTERNATING = {
    ".experts.": "moe_mlp_glu_interleave_size",
    ".shared_experts.": "moe_shared_expert_glu_interleave_size",
}
_JOINED = {"GatedDeltaNet": _DELTA_NET, "MambaMixer": _MAMBA}


def share_of(
    name: str, tensor: Tensor, modules: Sequence[Module], cut: Cut, *, rows_of_ranks: bool = False
) -> tuple[tuple[int, ...], ShardPlacement]:
    """(shape of the whole parameter, this rank's part of it).

    name: the global name.  modules: the parameter's module, then the module around that one, and
    so on.  cut: this rank's place among the ranks that share parameters of this kind.
    rows_of_ranks: a joined parameter is taken as each rank's rows, one rank after another.

    Raises:
        LayoutError: the modules do not tell for certain how the parameter is cut.
    """
    shape = tuple(tensor.shape)
    held = [[(0, extent, 0)] for extent in shape]
    axis, cut = (-1, cut) if cut.ranks == 1 else _axis(name, tensor, modules, cut)
    if axis < 0:
        return shape, ShardPlacement.of(shape, held)
    extent, (kind, owner, place) = shape[axis], _home(name, modules)
    factors = _JOINED[kind][place] if kind else ()
    wholes = [math.prod(getattr(owner, f, 0) for f in each.split("*")) for each in factors]
    if not kind:
        halves = 2 if _has_halves(name, modules) else 1
        wholes = [extent * cut.ranks // halves] * halves
    parts = [whole // cut.ranks for whole in wholes]
    if sum(parts) != extent or sum(wholes) != extent * cut.ranks:
        raise _core.LayoutError(
            f"{name}: this rank has {extent} rows or columns, which is not its part of "
            f"{' + '.join(map(str, wholes))} over {cut.ranks} ranks"
        )
    if kind and rows_of_ranks:
        parts = [extent]
    starts = itertools.accumulate(parts, initial=0)
    held[axis] = [
        (start * cut.ranks + cut.rank * part, part, start)
        for start, part in zip(starts, parts, strict=False)
    ]
    full = (*shape[:axis], extent * cut.ranks, *shape[axis + 1 :])
    return full, ShardPlacement.of(shape, held)


def _home(name: str, modules: Sequence[Module]) -> tuple[str, Any, str]:
    """(class, module, name in that module) if the parameter is in a module of _JOINED, else ""."""
    for depth, module in enumerate(modules):
        found = next((text for text in _JOINED if text in _classes(module)), "")
        if found:
            return found, module, ".".join(name.split(".")[-depth - 1 :])
    return "", None, ""


def _axis(name: str, tensor: Tensor, modules: Sequence[Module], cut: Cut) -> tuple[int, Cut]:
    """(dimension along which a parameter is cut, this rank's place among the parts).  If the
    parameter is not cut, the dimension is -1."""
    classes = _classes(modules[0])
    joined, _, place = _home(name, modules)
    if place in _JOINED.get(joined, {}):
        return int(place == "out_proj.weight"), cut
    if "GroupedMLP" in classes:
        raise _core.LayoutError(f"{name}: transposed experts in one parameter are not supported")
    kind = next((kind for kind in _KINDS if any(kind.text in text for text in classes)), None)
    if kind is None:  # both parallel layers are a TELinear, which is not cut itself
        axis = -1 if "TELinear" in classes else _described(name, tensor)
    elif "layer_norm_" in name.rsplit(".", 1)[-1] or (kind.axis and tensor.dim() == 1):
        axis = -1  # a norm within the layer, or a bias added after the ranks' sum
    else:
        axis, cut = kind.axis, _parts(name, modules[0], kind, cut)
    if axis >= 0 and joined:
        raise _core.LayoutError(
            f"{name}: it belongs to a {joined}, where a rank holds parts of several tensors; only "
            "a family's rules know their order"
        )
    return axis, cut


def _classes(module: Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]


def _parts(name: str, module: Any, kind: _Kind, cut: Cut) -> Cut:
    """This rank's place among the parts of a layer, which may be cut over fewer ranks than `cut`
    says."""
    whole, part = getattr(module, kind.whole, None), getattr(module, kind.part, None)
    if not isinstance(whole, int) or not isinstance(part, int) or not part:
        return cut
    parts = whole // part
    if parts not in (1, cut.ranks) and (not kind.repeats or not parts or cut.ranks % parts):
        raise _core.LayoutError(
            f"{name}: its layer is cut into {parts} parts, but {cut.ranks} ranks share it"
        )
    return Cut(cut.rank * parts // cut.ranks, parts)


def _described(name: str, tensor: Tensor) -> int:
    """The dimension of a parameter that Megatron's attributes call cut; -1 if they call none
    cut."""
    duplicated = getattr(tensor, "parallel_mode", None) == "duplicated"
    if duplicated or not getattr(tensor, "tensor_model_parallel", False):
        return -1
    axis = getattr(tensor, "partition_dim", -1)
    if not isinstance(axis, int) or not 0 <= axis < tensor.dim():
        raise _core.LayoutError(
            f"{name}: tensor_model_parallel is True, but partition_dim is {axis}; wsync cannot "
            "tell how the parameter is cut"
        )
    return axis


def _has_halves(name: str, modules: Sequence[Module]) -> bool:
    """Whether a rank holds gate rows and then as many up rows.  If both alternate (Megatron-Core
    0.19's moe_mlp_glu_interleave_size), all rows of a rank are one part."""
    if ".linear_fc1" not in name:
        return False
    configs = (getattr(module, "config", None) for module in modules)
    config = next((c for c in configs if getattr(c, "gated_linear_unit", None) is not None), None)
    if config is not None:
        alternating = (getattr(config, s, None) for part, s in _ALTERNATING.items() if part in name)
        return bool(config.gated_linear_unit) and not any(alternating)
    raise _core.LayoutError(f"{name}: no module around it has a config with gated_linear_unit")
