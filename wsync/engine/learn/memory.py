"""The tensors of a module that load_weights may write to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from wsync._core import StateError
from wsync.machine import device
from wsync.module_tensors import ModuleTree
from wsync.module_tensors.held import Bound, bound_tensors, usable
from wsync.module_tensors.names import listed
from wsync.probing.codes import kind_of

_CACHE_NBYTES: Final = 16 << 20  # an engine's caches are larger


class TensorTarget(NamedTuple):
    """A tensor of a module: home[key]."""

    path: str
    home: dict[str, Any]
    key: str
    parameter: bool


class ModuleMemory:
    """The tensors of a module that load_weights may write to, at one moment.  Keeps none of them,
    but the parts of the module.

    targets: they share no elements.  Parameters come first.  Plain attributes are among them, but
    for caches; integers are not, if they are no parameters: loaders go by them.

    Raises:
        StateError: there is no memory for a parameter, as while an engine sleeps.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._tree = ModuleTree([module])
        found = [
            (TensorTarget(path, home, key, isinstance(tensor, torch.nn.Parameter)), tensor)
            for path, home, key, tensor in bound_tensors(module)
            if tensor.numel()
        ]
        self.names: dict[int, list[str]] = {}  # of all that begin at one address
        for target, tensor in found:
            self.names.setdefault(tensor.data_ptr(), []).append(target.path)
        found.sort(key=lambda each: (not each[0].parameter, -each[1].numel()))
        self.targets = list(_apart(found))

    def tensors(self) -> list[torch.Tensor] | None:
        """The targets as they are now; None where the module has other parts, or other names."""
        if not self._tree.same():
            return None
        found = [target.home.get(target.key) for target in self.targets]
        return found if all(isinstance(each, torch.Tensor) for each in found) else None  # type: ignore[return-value]

    def bound(self) -> list[Bound]:
        """The targets as they are now, and where they are bound."""
        return [(each.path, each.home, each.key, each.home[each.key]) for each in self.targets]


def _apart(found: Sequence[tuple[TensorTarget, torch.Tensor]]) -> Iterator[TensorTarget]:
    taken: dict[int, list[torch.Tensor]] = {}  # by storage
    asleep: list[str] = []
    for target, tensor in found:
        if not _may_be_loaded(target, tensor):
            continue
        if not device.has_memory(tensor):
            asleep += [target.path] if target.parameter else []
            continue
        others = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
        if not any(_meet(tensor, other) for other in others):
            others.append(tensor)
            yield target
    if asleep:
        raise StateError(
            f"{listed(asleep)}: no memory of a GPU lies there, as while an engine sleeps: wake its "
            "weights before the update"
        )


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have bytes in common."""
    spans = [_span(tensor) for tensor in (one, other)]
    base, end = min(start for start, _ in spans), max(end for _, end in spans)
    if max(start for start, _ in spans) >= min(end for _, end in spans):
        return False
    later = spans[0][0] <= spans[1][0]
    if (one if later else other).is_contiguous():  # it has the first byte of the other one
        return True
    unit = math.gcd(one.element_size(), other.element_size(), spans[0][0] - spans[1][0])
    marks = torch.zeros((end - base) // unit, dtype=torch.bool, device="cpu")

    def part(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size() // unit
        strides = *(size * stride for stride in tensor.stride()), 1
        return marks.as_strided((*tensor.shape, size), strides, (tensor.data_ptr() - base) // unit)

    part(one).fill_(True)
    return bool(part(other).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * step for extent, step in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _may_be_loaded(target: TensorTarget, tensor: torch.Tensor) -> bool:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if not kind_of(tensor.dtype) or any(step == 0 and extent > 1 for step, extent in steps):
        return False
    is_plain = "_parameters" in target.home  # which holds all that a part has
    cache = is_plain and tensor.nbytes > _CACHE_NBYTES
    return target.parameter or (tensor.is_floating_point() and not cache)


def wrapped_parameters(module: torch.nn.Module) -> list[str]:
    """Parameters that have values, but no memory of their own: wrappers around other tensors."""
    return [
        path
        for path, parameter in module.named_parameters()
        if not usable(parameter) and not is_lazy(parameter)
        if parameter.numel() and not parameter.is_meta
    ]
