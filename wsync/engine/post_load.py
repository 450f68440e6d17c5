"""Runs an engine's hooks after a load, in place: the module keeps the tensors that it had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from wsync._core import StateError
from wsync.module_tensors.held import Bound, bound_tensors, seen, usable


def run_in_place(module: torch.nn.Module, hook: Callable[[], object]) -> None:
    """Calls a hook, then binds the module's former tensors again, with the new values (see
    `in_place`).

    Raises:
        StateError: the hook has changed a tensor's dtype or shape.
    """
    with in_place(module) as other:
        hook()
    if other:
        raise StateError(other[0])


@contextlib.contextmanager
def in_place(module: torch.nn.Module, bound: Iterable[Bound] | None = None) -> Iterator[list[str]]:
    """Lets the block bind other tensors to the module's attributes.  Afterwards the former tensors
    are bound again and take the new values, because CUDA graphs go on reading them.

    bound: the tensors to bind again; None: all.
    Yields a list.  At the end it names the tensors whose dtype or shape has changed; these are not
    bound again.
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
    """Binds the former tensors again and gives them the new values; see `in_place`."""
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
            # values in the module's own memory are copied before that memory is written
            moved = now.untyped_storage().data_ptr() not in places
            changes.append((data, now.detach() if moved else now.detach().clone()))
        tensor.data = data
        slot[name] = tensor
    for data, now in changes:
        data.copy_(now)
    return other
