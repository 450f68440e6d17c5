"""The tensors that a module holds: parameters, buffers and plain attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Seen = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
# (path, where it is bound, under which name, tensor)
Bound = tuple[str, dict[str, Any], str, torch.Tensor]


def seen(tensor: torch.Tensor) -> Seen:
    """What memory a tensor is, and how it is seen."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def usable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, in which its elements lie at strides: not one on the
    meta device, sparse, nested, uninitialised, or a wrapper around others."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return False
    return True


def bound_tensors(module: torch.nn.Module) -> Iterator[Bound]:
    """Those that are usable."""
    for prefix, part in module.named_modules():
        for slot in (part._parameters, part._buffers, vars(part)):
            for name, tensor in slot.items():
                if isinstance(tensor, torch.Tensor) and usable(tensor):
                    yield (f"{prefix}.{name}" if prefix else name), slot, name, tensor
