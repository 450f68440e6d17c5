"""Finds out which of a module's tensors load_weights may write to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from wsync._core import StateError
from wsync.machine import device
from wsync.messages.control import CHANGED
from wsync.module_tensors import ModuleTree
from wsync.module_tensors.held import Bound, bound_tensors, usable
from wsync.module_tensors.names import listed
from wsync.probing.codes import kind_of

_CACHE_NBYTES: Final = 16 << 20  # a plain attribute with more bytes is taken for a cache


def has_changed(module: str, change: str) -> StateError:
    return StateError(f"{module} {CHANGED}: {change}; the next attempt learns it anew")


class TensorTarget(NamedTuple):
    """A tensor of a module.  home: the dictionary that has the tensor under `key`."""

    path: str
    home: dict[str, Any]
    key: str
    parameter: bool


class LoadTargets:
    """The tensors of a module that load_weights may write to, at one moment.  This object keeps the
    submodules, but no tensors.

    targets: tensors that share no elements; parameters come first.  Buffers and plain attributes
    are targets if they hold floating-point values and are no caches.  Integers are targets only if
    they are parameters, because load_weights may depend on other integers.

    Raises:
        StateError: a parameter has no memory, for example because the engine sleeps.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._tree = type(module).__name__, ModuleTree([module])
        found = [
            (TensorTarget(path, home, key, isinstance(tensor, torch.nn.Parameter)), tensor)
            for path, home, key, tensor in bound_tensors(module)
            if tensor.numel()
        ]
        self.names: dict[int, list[str]] = {}  # the paths of all tensors at an address
        for target, tensor in found:
            self.names.setdefault(tensor.data_ptr(), []).append(target.path)
        found.sort(key=lambda each: (not each[0].parameter, -each[1].numel()))
        self.targets = list(_apart(found))

    def tensors(self) -> list[torch.Tensor]:
        """Returns the targets as they are now.

        Raises:
            StateError: the module's submodules, or the names of its tensors, have changed.
        """
        found = [target.home.get(target.key) for target in self.targets]
        if not self._tree.same() or not all(isinstance(each, torch.Tensor) for each in found):
            change = "its submodules or the names of its tensors have changed"
            raise has_changed(self._module, change)
        return found  # type: ignore[return-value]

    def bound(self) -> list[Bound]:
        """Returns the targets as they are now, and the dictionaries that have them."""
        return [(each.path, each.home, each.key, each.home[each.key]) for each in self.targets]


def _apart(found: Sequence[tuple[TensorTarget, torch.Tensor]]) -> Iterator[TensorTarget]:
    taken: dict[int, list[np.ndarray]] = {}  # by the address of the storage
    asleep: list[str] = []
    for target, tensor in found:
        if not _may_be_loaded(target, tensor):
            continue
        if not device.has_memory(tensor):
            asleep += [target.path] if target.parameter else []
            continue
        others = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
        elements = np.asarray(_Address(tensor))
        if not any(np.shares_memory(elements, other) for other in others):
            others.append(elements)
            yield target
    if asleep:
        raise StateError(
            f"{listed(asleep)}: no GPU memory is mapped there, for example because the engine "
            "sleeps; wake its weights before the update"
        )


class _Address:
    """A tensor's elements in a form for NumPy.  NumPy only compares their addresses."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _may_be_loaded(target: TensorTarget, tensor: torch.Tensor) -> bool:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if not kind_of(tensor.dtype) or any(step == 0 and extent > 1 for step, extent in steps):
        return False
    is_plain = "_parameters" in target.home  # then `home` is the __dict__ of a submodule
    cache = is_plain and tensor.nbytes > _CACHE_NBYTES
    return target.parameter or (tensor.is_floating_point() and not cache)


def wrapped_parameters(module: torch.nn.Module) -> list[str]:
    """Returns the paths of parameters that wrap other tensors.  They have values, but no memory of
    their own."""
    return [
        path
        for path, parameter in module.named_parameters()
        if not usable(parameter) and not is_lazy(parameter)
        if parameter.numel() and not parameter.is_meta
    ]
