"""FSDP2's modules, whose parameters are shards but while a pass has them gathered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple


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
    """Has FSDP2 modules hold their shards, from which each pass gathers its parameters."""
    for unit in units:
        unit.module.reshard()
