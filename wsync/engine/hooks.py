"""What engines do to a module beside loading it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wsync._core import StateError
from wsync.engine.held import slots


def wait_for_device(module: torch.nn.Module) -> None:
    """Waits until a module's device is idle: an engine paused in place may be at work on it."""
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type != "cpu":
        torch.get_device_module(parameter.device).synchronize(parameter.device)


def run_in_place(module: torch.nn.Module, hook: Callable[[], object]) -> None:
    """Calls a hook that may bind other tensors to the module's attributes, and has the tensors
    that were there take their values: CUDA graphs go on reading the old ones.

    Raises:
        StateError: a tensor has become one of another dtype or shape.
    """
    before = [
        (f"{prefix}.{name}" if prefix else name, slot, name, tensor, tensor.detach())
        for prefix, part in module.named_modules()
        for slot in slots(part)
        for name, tensor in slot.items()
        if isinstance(tensor, torch.Tensor)
    ]
    with torch.no_grad():
        hook()
        for path, slot, name, tensor, data in before:
            now = slot.get(name)
            if not isinstance(now, torch.Tensor) or (now is tensor and _same(now, data)):
                continue
            if now.dtype != data.dtype or now.shape != data.shape:
                raise StateError(
                    f"{path} was {data.dtype} {tuple(data.shape)} and becomes {now.dtype} "
                    f"{tuple(now.shape)}"
                )
            if not _same(now, data):
                data.copy_(now)
            tensor.data = data
            slot[name] = tensor


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
