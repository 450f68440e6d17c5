"""FSDP2's modules, whose parameters are shards but while a pass has them gathered."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from wsync import _core
from wsync.fsdp.parts import joined, plain_name
from wsync.module_tensors import same_bytes


def is_fsdp2(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def reshard(units: Iterable[tuple[str, Any]]) -> None:
    """Has FSDP2 modules hold their shards.

    Raises StateError where what a pass has left gathered differs from them.  All are resharded
    nevertheless: not every rank sees a difference, and modules that are sharded on some ranks only
    wait for each other in the next pass.
    """
    changed = ""
    for path, unit in units:
        changed = changed or _changed_part(path, unit)
        unit.reshard()
    if changed:
        raise _core.StateError(
            f"{changed}: differs from its shard, though FSDP2 had it gathered since a pass: it was "
            "changed while it was gathered, which resharding undoes (it has now been done), or its "
            "shard was. Call reshard() of FSDP2's modules before parameters are changed"
        )


def _changed_part(path: str, unit: Any) -> str:
    """The name of a parameter of a module that is not what its shard says, or ""."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several, in newer versions
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None or group.is_sharded else group.fsdp_params:
            if not _is_kept(parameter, group.is_unsharded):
                info = parameter._module_info
                inside = next((n for n, part in unit.named_modules() if part is info.module), "")
                return plain_name(joined(path, inside, info.param_name))
    return ""


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
    if held.shape != parameter.sharded_param.shape or (not whole and held._version):
        return False
    mine, kept = shard.detach(), getattr(held, "_local_tensor", held).detach()
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
