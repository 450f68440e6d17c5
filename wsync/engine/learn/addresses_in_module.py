"""Where a module notes the places of its own tensors beside the tensors themselves: views of them,
and addresses.  When a tensor gets other memory these stay what they were, until load_weights runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from wsync.engine.learn.forms_of_values import tensors_of
from wsync.engine.learn.module_memory import ModuleMemory, usable

_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
_TABLE: Final = 1 << 20  # elements of tensors that may be tables of addresses, at most


def noted_addresses(held: ModuleMemory) -> dict[int, int]:
    """Areas whose places are noted, and where they start now.

    Looked at are the attributes of the module's parts and of their tensors, containers in these,
    and the elements of 64-bit integer tensors.
    """
    areas = sorted((area.start, area.end, number) for number, area in enumerate(held.areas))
    starts = [start for start, _, _ in areas]

    def within(address: int) -> int | None:
        place = bisect_right(starts, address) - 1
        return areas[place][2] if place >= 0 and address < areas[place][1] else None

    own = {id(tensor) for tensor in held.tensors}
    found = {
        number
        for value in _values(held)
        for address in _addresses(value, id(value) in own)
        if (number := within(address)) is not None
    }
    return {number: held.areas[number].start for number in found}


def _addresses(value: Any, own: bool) -> Iterable[int]:
    """What may be places of a value; own: it is a tensor of the module, which moves as it does."""
    if type(value) is int:
        return (value,)
    if not isinstance(value, torch.Tensor) or not usable(value):
        return ()
    found = [] if own or not value.numel() else [value.untyped_storage().data_ptr()]
    if value.dtype in (torch.int64, torch.uint64) and value.numel() <= _TABLE:
        found += value.detach().cpu().reshape(-1).tolist()
    return found


def _values(held: ModuleMemory) -> Iterator[Any]:
    """The module's tensors, its attributes and theirs, and what containers among them hold."""
    left: list[Any] = list(held.tensors)
    owners = (*held.parts.values(), *(tensor for *_, tensor in tensors_of(held.parts)))
    for owner in owners:
        left += vars(owner).values()
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            left += value
        elif not isinstance(value, torch.Tensor | int):
            continue
        seen.add(id(value))
        yield value
