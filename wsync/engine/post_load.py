"""What engines do around a load: wait for the module's device before it, and run their own hooks
after it in place, with the tensors that the module had."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch

from wsync._core import DeadlineError, StateError
from wsync.engine.learn.module_memory import bound_tensors, seen


def wait_for_device(module: torch.nn.Module, timeout: float = 60.0) -> None:
    """Waits until a module's device is idle: an engine paused in place may be at work on it.

    Raises:
        DeadlineError: it is not after `timeout` seconds.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    if device is None:
        return
    waiting = threading.Thread(
        target=torch.get_device_module(device).synchronize, args=(device,), daemon=True
    )
    waiting.start()
    waiting.join(timeout)
    if waiting.is_alive():
        raise DeadlineError(f"{device} is still at work after {timeout:.0f} s")


def run_in_place(module: torch.nn.Module, hook: Callable[[], object]) -> None:
    """Calls a hook that may bind other tensors to the module's attributes, and has the tensors
    that were there take their values: CUDA graphs go on reading the old ones.

    Raises:
        StateError: a tensor has become one of another dtype or shape.
    """
    before = [
        (path, slot, name, tensor, tensor.detach())
        for path, slot, name, tensor in bound_tensors(module)
    ]
    places = {data.untyped_storage().data_ptr() for *_, data in before}
    changes: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        hook()
        for path, slot, name, tensor, data in before:
            now = slot.get(name)
            if not isinstance(now, torch.Tensor) or (now is tensor and seen(now) == seen(data)):
                continue
            if now.dtype != data.dtype or now.shape != data.shape:
                raise StateError(
                    f"{path} was {data.dtype} {tuple(data.shape)} and becomes {now.dtype} "
                    f"{tuple(now.shape)}"
                )
            if seen(now) != seen(data):
                # what lies in the module's memory is read before that is written
                moved = now.untyped_storage().data_ptr() not in places
                changes.append((data, now.detach() if moved else now.detach().clone()))
            tensor.data = data
            slot[name] = tensor
        for data, now in changes:
            data.copy_(now)
