"""Uses Megatron-Bridge's mappings as a converter for wsync.families.probed_converter.

A mapping normally gathers a parameter from process groups and then converts it.  Here each mapping
gets a whole parameter, and a process group with only this rank.  Written for Megatron-Bridge 0.3.1
and 0.6.2 (`models/conversion/param_mapping.py`, `mapping_registry.py`).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.blocks import EXPERT

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from wsync.families.probed_converter import Convert


class _Alone:
    """Replaces Megatron's parallel_state: every group contains only this rank."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name == "is_initialized":
            return lambda: self._group is not None
        if name.startswith("get_") and name.endswith("_group"):
            return lambda *_, **__: self._group
        raise AttributeError(name)


def _of(registry: Any, name: str) -> Any:
    mapping = registry.megatron_to_hf_lookup(name)
    if mapping is None:
        raise _core.LayoutError(f"{name}: no mapping of Megatron-Bridge matches this name")
    return mapping


def _convert(
    registry: Any, finish: Callable[..., Any], module: Module, name: str, tensor: Tensor
) -> list[tuple[str, Tensor]]:
    """Converts a whole parameter.  finish: the bridge's last step of an export
    (maybe_modify_converted_hf_weight)."""
    mapping = _of(registry, name)
    found = mapping.megatron_to_hf(tensor, module)
    if ".experts." in name:  # finish would stack them
        return list(found.items())
    task = types.SimpleNamespace(
        **{"param_name": name, "global_param_name": name, "mapping": mapping},
        **{"megatron_module": module, "weight_dtype": tensor.dtype},
    )
    finished = finish(task, dict(found), {})  # finish may add copies under other names
    return [(target, finished[target]) for target in found]


def _index(registry: Any, name: str) -> int:
    """The expert's number if Megatron-Bridge stacks all experts under one name; -1 if it does
    not."""
    match = EXPERT.search(name)
    if match is None:
        return -1
    number, mapping = int(match[1]), _of(registry, name)
    other = f"{name[: match.start(1)]}{number + 1}{name[match.end(1) :]}"
    if mapping.hf_param != _of(registry, other).hf_param:
        return -1
    if getattr(mapping, "transpose_on_export", False):
        raise _core.LayoutError(
            f"{name}: Megatron-Bridge may transpose it, depending on the checkpoint's shape; "
            "wsync does not support this"
        )
    return number


@contextlib.contextmanager
def bridge_converter(
    bridge: Any, modules: Mapping[str, Module]
) -> Iterator[tuple[Convert, Callable[[str], int]]]:
    """Gives (converter, index) while the block runs.  index(name) is an expert's place in the
    tensor in which Megatron-Bridge stacks all experts, or -1 if there is no such tensor.

    bridge: an AutoBridge.  modules: the module of each parameter, by the parameter's global name.

    Raises:
        UnsupportedError: Megatron-Bridge is not installed, or wsync does not know its version.
    """
    import torch.distributed as dist

    try:
        from megatron.bridge.models.conversion import param_mapping

        maker, groups = bridge._model_bridge, param_mapping.mpu
        if not hasattr(maker, "hf_config"):  # 0.3.1 sets it on export only, but MTP needs it
            maker.hf_config = maker._hf_config = bridge.hf_pretrained.config
        make, finish = maker.mapping_registry, maker.maybe_modify_converted_hf_weight
    except (ImportError, AttributeError) as error:
        raise _core.UnsupportedError(
            f"{type(bridge).__name__} is not an AutoBridge of a known Megatron-Bridge: {error}"
        ) from None
    alone = None
    if dist.is_initialized():  # only this rank takes part
        rank = [dist.get_rank()]
        alone = dist.new_group(rank, backend="gloo", use_local_synchronization=True)
    param_mapping.mpu = _Alone(alone)
    try:
        mappings = make()
        yield (
            lambda name, tensor: _convert(mappings, finish, modules[name], name, tensor),
            functools.partial(_index, mappings),
        )
    finally:
        param_mapping.mpu = groups
        if alone is not None:
            dist.destroy_process_group(alone)
