"""What engines do after a load: run their own hooks in place, with the tensors that the module
had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from wsync._core import StateError
from wsync.module_tensors.held import Bound, bound_tensors, seen, usable


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
def in_place(module: torch.nn.Module, bound: Iterable[Bound] | None = None) -> Iterator[list[str]]:
    """Around what may bind other tensors to the module's attributes: in the end the tensors that
    were there are so again and take their values, as CUDA graphs go on reading them.

    bound: the tensors that it is done for; None: all.
    Gives what it is not done for, when it ends: those of another dtype or shape.
    """
    before = [
        (each, each[-1].detach())
        for each in (bound_tensors(module) if bound is None else bound)
        if each[-1].numel()
    ]
    other: list[str] = []
    with torch.no_grad():
        try:
            yield other
        finally:
            other += _put_back(before)


def _put_back(before: list[tuple[Bound, torch.Tensor]]) -> list[str]:
    """Binds tensors as they were, with the values of what is bound there now; as `in_place`."""
    places = {data.untyped_storage().data_ptr() for _, data in before}
    changes: list[tuple[torch.Tensor, torch.Tensor]] = []
    other = []
    for (path, slot, name, tensor), data in before:
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
