"""Megatron-Bridge's mappings as a converter of whole parameters (wsync.families.converter).

Its mappings gather a parameter from process groups before they convert it.  Here they are given
whole ones, and a group that has this rank alone.  After Megatron-Bridge 0.3.1 and 0.6.2
(`models/conversion/param_mapping.py`, `mapping_registry.py`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wsync import _core

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from wsync.families.converter import Convert

__all__ = ["bridge_converter"]


class _Alone:
    """Stands for Megatron's parallel_state: every group is this rank's own."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name == "is_initialized":
            return lambda: self._group is not None
        if name.startswith("get_") and name.endswith("_group"):
            return lambda *_, **__: self._group
        raise AttributeError(name)


@contextlib.contextmanager
def bridge_converter(bridge: Any, modules: Mapping[str, Module]) -> Iterator[Convert]:
    """A converter, for as long as the block lasts.

    bridge: an AutoBridge.  modules: by the global names of parameters, those that hold them.

    Raises:
        UnsupportedError: Megatron-Bridge is not installed, or is another one.
    """
    import torch.distributed as dist

    try:
        from megatron.bridge.models.conversion import param_mapping

        maker, groups = bridge._model_bridge, param_mapping.mpu
        if not hasattr(maker, "hf_config"):  # 0.3.1 sets it when it exports; without, it has no MTP
            maker.hf_config = maker._hf_config = bridge.hf_pretrained.config
        make, finish = maker.mapping_registry, maker.maybe_modify_converted_hf_weight
    except (ImportError, AttributeError) as error:
        raise _core.UnsupportedError(
            f"{type(bridge).__name__} is no AutoBridge of a known Megatron-Bridge: {error}"
        ) from None
    alone = None
    if dist.is_initialized():  # only this rank takes part
        rank = [dist.get_rank()]
        alone = dist.new_group(rank, backend="gloo", use_local_synchronization=True)
    param_mapping.mpu = _Alone(alone)
    try:
        registry = make()

        def convert(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
            mapping = registry.megatron_to_hf_lookup(name)
            if mapping is None:
                raise _core.LayoutError("no mapping of Megatron-Bridge matches it")
            found = mapping.megatron_to_hf(tensor, modules[name])
            if ".experts." in name:  # it would put them together
                return list(found.items())
            task = types.SimpleNamespace(
                **{"param_name": name, "global_param_name": name, "mapping": mapping},
                **{"megatron_module": modules[name], "weight_dtype": tensor.dtype},
            )
            finished = finish(task, dict(found), {})  # and may add copies under other names
            return [(target, finished[target]) for target in found]

        yield convert
    finally:
        param_mapping.mpu = groups
        if alone is not None:
            dist.destroy_process_group(alone)
