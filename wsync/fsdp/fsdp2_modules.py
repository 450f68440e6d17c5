"""FSDP2's modules, whose parameters are shards but while a pass has them gathered."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from wsync import _core
from wsync.fsdp.parts import joined, plain_name
from wsync.module_tensors import same_bytes


def is_fsdp2(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class Fsdp2Module(NamedTuple):
    """One that has parameters of a model.  path: "" also where it is around that.  inside: the ids
    of the model's modules: of others nothing is read."""

    path: str
    module: Any
    inside: frozenset[int]


def fsdp2_modules(module: Any) -> list[Fsdp2Module]:
    """Those in a module, and those around it that have parameters of it."""
    inside = frozenset(id(part) for part in module.modules())
    parts = module.named_modules()
    found = [Fsdp2Module(path, part, inside) for path, part in parts if is_fsdp2(part)]
    states = sys.modules.get("torch.distributed._composable_state")
    for other in list(getattr(states, "_module_state_mapping", ())):
        if is_fsdp2(other) and id(other) not in inside:
            unit = Fsdp2Module("", other, inside)
            if any(_parameters(group, unit) for group in _groups(other)):
                found.append(unit)
    return found


def _groups(unit: Any) -> list[Any]:
    """The groups of parameters (FSDPParamGroup) that an FSDP2 module gathers."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several, in newer versions
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def _parameters(group: Any, unit: Fsdp2Module) -> list[Any]:
    """A group's parameters (FSDPParam) that the model has."""
    return [each for each in group.fsdp_params if id(each._module_info.module) in unit.inside]


def reshard(units: Sequence[Fsdp2Module]) -> None:
    """Has FSDP2 modules hold their shards.

    Raises StateError where what a pass has left gathered differs from them, or what a module holds
    is not what passes gather.  All are resharded nevertheless: not every rank sees a difference,
    and modules that are sharded on some ranks only wait for each other in the next pass.
    """
    try:
        wrong = next((text for unit in units if (text := _difference(unit))), "")
    finally:
        for unit in units:
            unit.module.reshard()
    if wrong:
        raise _core.StateError(wrong)


def _difference(unit: Fsdp2Module) -> str:
    """Which parameter of a module is another one than FSDP2 goes on with, or ""."""
    for group in _groups(unit.module):
        for parameter in _parameters(group, unit):
            info = parameter._module_info
            name = functools.partial(_name, unit.path, unit.module)
            first = info.module._parameters.get(info.param_name)
            for module, key in zip(info.shared_modules, info.shared_param_names, strict=True):
                if not _are_equal(module._parameters.get(key), first):
                    return (
                        f"{name(info.module, info.param_name)} and {name(module, key)}: were one "
                        "parameter when FSDP2 was applied, and are two now, of which it goes on "
                        "with one: write to the one that both have been"
                    )
            if group.is_sharded:
                # before its first pass it takes on what was replaced
                if getattr(group, "_reset_sharded_params", True) and not _is_its_own(parameter):
                    return (
                        f"{name(info.module, info.param_name)}: was replaced, and FSDP2 goes on "
                        "with the one that it knows: write to that one (copy_), or use "
                        "load_state_dict()"
                    )
            elif not _is_kept(parameter, group.is_unsharded):
                return (
                    f"{name(info.module, info.param_name)}: differs from its shard, though FSDP2 "
                    "had it gathered since a pass: it was changed while it was gathered, which "
                    "resharding undoes (it has now been done), or its shard was. Call reshard() of "
                    "FSDP2's modules before parameters are changed"
                )
    return ""


def _name(path: str, unit: Any, module: Any, key: str) -> str:
    inside = next((name for name, part in unit.named_modules() if part is module), "")
    return plain_name(joined(path, inside, key))


def _are_equal(one: Any, other: Any) -> bool:
    """Whether what two modules hold is one tensor, or two that this rank has the same of."""
    if one is other or one is None or other is None:
        return one is other
    return one.shape == other.shape and same_bytes(_local(one).detach(), _local(other).detach())


def _is_its_own(parameter: Any) -> bool:
    """Whether a module holds the shard that passes gather."""
    info, known = parameter._module_info, parameter.sharded_param
    if info.module._parameters.get(info.param_name) is not known:
        return False
    gathered, shard = parameter._sharded_param_data, known._local_tensor
    if hasattr(shard, "fsdp_pre_all_gather") or not shard.numel():
        return True
    return bool(gathered.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr())


def _is_kept(parameter: Any, whole: bool) -> bool:
    """Whether a module has of a parameter what this rank's shard says, where they meet.  What is
    gathered is the whole one, or the part of a smaller mesh (fully_shard's reshard_after_forward).
    Of that most has its shards on other ranks: there, torch's own count of writes has to do.
    """
    info, dimension = parameter._module_info, parameter.fsdp_placement.dim
    held = info.module._parameters.get(info.param_name)
    shard = parameter.sharded_param._local_tensor
    if held is None or hasattr(shard, "fsdp_pre_all_gather"):
        return True  # made of the shards
    if held.shape != parameter.sharded_param.shape or (not whole and _writes(held)):
        return False
    mine, kept = shard.detach(), _local(held).detach()
    each = parameter.padded_sharded_param_size[dimension]
    first = each * getattr(parameter.mesh_info, "shard_mesh_rank", 0)
    start = 0  # of what is gathered
    if not whole:
        mesh, smaller = parameter.mesh_info, parameter.post_forward_mesh_info
        if dimension:  # torch keeps rows of it
            mine = mine.narrow(0, len(kept) * smaller.shard_mesh_rank, len(kept))
        else:
            start = each * mesh.shard_mesh_size // smaller.shard_mesh_size * smaller.shard_mesh_rank
    low = max(first, start)
    count = min(first + mine.shape[dimension], start + kept.shape[dimension]) - low
    if count <= 0:
        return True
    mine = mine.narrow(dimension, low - first, count)
    kept = kept.narrow(dimension, low - start, count)
    return same_bytes(kept, mine.to(kept.device, kept.dtype))


def _writes(tensor: Any) -> int:
    """How many writes torch has counted; of what an inference pass has made, it counts none, and
    refuses most."""
    return sum(each._version for each in (tensor, _local(tensor)) if not each.is_inference())


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)
