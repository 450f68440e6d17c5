"""The tensors that a module holds: parameters, buffers and plain attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Seen = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
# (path, dict in which it is bound, its key there, tensor)
Bound = tuple[str, dict[str, Any], str, torch.Tensor]


def seen(tensor: torch.Tensor) -> Seen:
    """Returns a tensor's memory and how the tensor views it."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def usable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, with its elements at strides.  A tensor on the meta
    device, a sparse, nested or uninitialised one, and a wrapper around others have none."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return False
    return True


def bound_tensors(module: torch.nn.Module) -> Iterator[Bound]:
    """Yields the usable tensors that a module's parts hold."""
    for prefix, part in module.named_modules():
        for slot in (part._parameters, part._buffers, vars(part)):
            for name, tensor in slot.items():
                if isinstance(tensor, torch.Tensor) and usable(tensor):
                    yield (f"{prefix}.{name}" if prefix else name), slot, name, tensor
