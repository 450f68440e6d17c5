"""FSDP2's modules: their parameters are shards, except while a pass has gathered them."""

from __future__ import annotations

import sys
from typing import Any


def fsdp2_modules(module: Any) -> list[Any]:
    """The FSDP2 modules within a module, and those around it that hold its parameters."""
    inside = {id(part) for part in module.modules()}
    states = sys.modules.get("torch.distributed._composable_state")
    around = list(getattr(states, "_module_state_mapping", ()))
    return [
        part for part in {*module.modules(), *around} if _is_fsdp2(part) and inside & _holders(part)
    ]


def _is_fsdp2(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _holders(unit: Any) -> set[int]:
    """The ids of the modules whose parameters an FSDP2 module gathers."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # newer versions of torch have several
    found = [state._fsdp_param_group] if groups is None else groups
    return {id(each._module_info.module) for group in found if group for each in group.fsdp_params}
