"""The destinations of an update: tensors, whose memory is kept until the last copy has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from wsync._core import (
    BufferTable,
    Layout,
    LayoutBuilder,
    LayoutError,
    StateError,
    TensorTable,
    describe,
)
from wsync.families.runtime_names import RuntimeNames
from wsync.module_tensors import ModuleTree, homes_of, same_bytes
from wsync.module_tensors.held import seen, usable
from wsync.module_tensors.names import listed, unfused


class MissingError(LayoutError):
    """The trainer does not deliver a tensor of the engine, which would keep its old values."""


class LoadTarget(Protocol):
    """The tensors that one update fills."""

    def layout(self) -> Layout:
        """The layout that gives each tensor its place in the buffers."""

    def buffers(self) -> BufferTable:
        """The memory of the layout's buffers."""

    def complete(self) -> None:
        """Finishes an update after its last byte.  Increments the tensors' versions, because torch
        does not see the copies, and caches depend on versions.  LayoutError: the values cannot be
        used."""

    def check_places(self) -> None:
        """Raises StateError if a tensor has moved to other memory."""


class Destination:
    """The tensors behind a layout's buffers, in order, during one update.  Keeps their memory, even
    if the module is given other tensors meanwhile.  names: the tensors' names in errors.  former: a
    table or form of the same tensors, which makes it faster to describe them."""

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str] = (),
        former: TensorTable | None = None,
    ) -> None:
        self._layout = layout
        self.tensors = list(tensors)
        self.names = names or [f"tensor {place}" for place in range(len(tensors))]
        self.table = describe(self.tensors, self.names, gpu=True, former=former)

    def layout(self) -> Layout:
        return self._layout

    def buffers(self) -> BufferTable:
        return BufferTable.of(self.table)

    def complete(self) -> None:
        increment_version(self.tensors)

    def check_places(self) -> None:
        if (place := self.table.moved(self.tensors)) is not None:
            raise StateError(f"{self.names[place]}: its memory was replaced while the update ran")


class NamedTensors(Destination):
    """The tensors of a module that are delivered, by name: one buffer for each.

    others: maps each further name of a tensor (a tied head) to the tensor's first name.  Values
    that come under a further name go to memory of their own, and are compared.

    count: the number of tensors without those under further names, which are the last.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], others: Mapping[str, str]) -> None:
        beside = {name: torch.empty_like(tensors[first]) for name, first in others.items()}
        self._every = every = {**tensors, **beside}
        self.count, self._others, builder = len(tensors), others, LayoutBuilder()
        builder.add_tensors(list(every), describe(list(every.values()), list(every), gpu=True))
        super().__init__(builder.build(), list(every.values()), list(every))

    def complete(self) -> None:
        """Raises LayoutError if two names of one tensor were delivered with different values."""
        super().complete()
        for name, first in self._others.items():
            if not same_bytes(self._every[name], self._every[first]):
                raise LayoutError(
                    f"{name} and {first} are one tensor of the module, but were delivered with "
                    "different values"
                )


class NamedPlaces:
    """Remembers where a module keeps the tensors of an update, so that the next update needs no
    state_dict.  Keeps no tensor alive."""

    def __init__(self, module: torch.nn.Module, found: NamedTensors) -> None:
        self._tree, self._names = ModuleTree([module]), found.names
        self._layout, self._form = found.layout(), found.table.form()
        places = {id(home[key]): (home, key) for _, home, key, _ in homes_of(module)}
        self._places = [places[id(each)] for each in found.tensors if id(each) in places]
        # one tensor under two names may become two, and a state_dict's views have no place
        self._one_each = len(module.state_dict()) == len(found.names) == len(self._places)

    def again(self) -> Destination | None:
        """Returns the destination, or None if the tensors must be looked up anew."""
        if not self._one_each or not self._tree.same():
            return None
        tensors = [home[key] for home, key in self._places]
        found = Destination(self._layout, tensors, self._names, self._form)
        return found if found.table.differs(self._form) is None else None


def named_tensors(
    module: torch.nn.Module, delivered: Mapping[str, tuple[int, ...]]
) -> NamedTensors:
    """Finds the tensors of a module that are delivered.  delivered: shapes by name.

    Raises:
        MissingError: a tensor of the module is not delivered.
        LayoutError: a name or a shape does not fit; the text says which.
    """
    who, state = type(module).__name__, state_of(module)
    unknown = delivered.keys() - state.keys()
    if unknown:
        raise LayoutError(f"{listed(unknown)}: {who} has no such tensor{unfused(unknown)}")
    found: dict[str, torch.Tensor] = {}
    others: dict[str, str] = {}
    missing: list[str] = []
    for group in aliases(state):
        given = [name for name in group if name in delivered]
        if not given and state[group[0]].numel():
            missing.append(group[0])
        for name in given:
            if tuple(state[name].shape) != delivered[name]:
                raise LayoutError(
                    f"{name}: the trainer delivers shape {delivered[name]}, but {who} has "
                    f"{tuple(state[name].shape)}"
                )
        if given and state[given[0]].numel():
            found[given[0]] = state[given[0]]
            others |= dict.fromkeys(given[1:], given[0])
    if missing:
        raise MissingError(f"{listed(missing)}: {who} has it, but the trainer does not deliver it")
    return NamedTensors(found, others)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and persistent buffers themselves, because their storage may change.
    Tensors that transformers has fused come as views under the names of the model's checkpoint."""
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    known = RuntimeNames.of_config(getattr(module, "config", None))
    return {
        plain: view
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        for plain, view in known.views(name, value).items()
    }


def aliases(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups the names that stand for one tensor.  Names and groups keep the order of `state`."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        key = seen(tensor) if usable(tensor) and tensor.numel() else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())
