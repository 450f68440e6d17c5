"""What engines do after a load: run their own hooks in place, with the tensors that the module
had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wsync._core import StateError
from wsync.module_tensors.held import bound_tensors, seen, usable

# (path, where it is bound, under which name, tensor, what memory it was)
_Bound = tuple[str, dict[str, Any], str, torch.Tensor, torch.Tensor]


def run_in_place(module: torch.nn.Module, hook: Callable[[], object]) -> None:
    """Calls a hook, in place.

    Raises:
        StateError: a tensor has become one of another dtype or shape.
    """
    with in_place(module) as other:
        hook()
    if other:
        raise StateError(other[0])


@contextlib.contextmanager
def in_place(module: torch.nn.Module) -> Iterator[list[str]]:
    """Around what may bind other tensors to the module's attributes: in the end the tensors that
    were there are so again and take their values, as CUDA graphs go on reading them.

    Gives what it is not done for, when it ends: those of another dtype or shape.
    """
    before = [
        (path, slot, name, tensor, tensor.detach())
        for path, slot, name, tensor in bound_tensors(module)
        if tensor.numel()
    ]
    other: list[str] = []
    with torch.no_grad():
        try:
            yield other
        finally:
            other += _put_back(before)


def _put_back(before: list[_Bound]) -> list[str]:
    """Binds tensors as they were, with the values of what is bound there now; as `in_place`."""
    places = {data.untyped_storage().data_ptr() for *_, data in before}
    changes: list[tuple[torch.Tensor, torch.Tensor]] = []
    other = []
    for path, slot, name, tensor, data in before:
        now = slot.get(name)
        if not isinstance(now, torch.Tensor) or (now is tensor and seen(now) == seen(data)):
            continue
        if not usable(now) or now.dtype != data.dtype or now.shape != data.shape:
            other.append(
                f"{path} was {data.dtype} {tuple(data.shape)} and becomes {now.dtype} "
                f"{tuple(now.shape)}"
            )
            continue
        if seen(now) != seen(data):
            # what lies in the module's memory is read before that is written
            moved = now.untyped_storage().data_ptr() not in places
            changes.append((data, now.detach() if moved else now.detach().clone()))
        tensor.data = data
        slot[name] = tensor
    for data, now in changes:
        data.copy_(now)
    return other
