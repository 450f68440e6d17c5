"""Whether the values that load_weights goes by are still what they were when it was recorded: their
forms, which C asks again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import re
import types
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from pathlib import PurePath
from typing import Any, Final

import torch

from wsync.engine.learn.module_memory import usable
from wsync.module_tensors.value_forms import (
    Form,
    at,
    atom,
    attribute,
    call,
    elements,
    items,
    place,
    typed,
)

Parts = Mapping[str, torch.nn.Module]
"""The parts of a module by their paths, itself as ""."""
TensorPlace = tuple[str, str, str]  # a part's path, where it keeps a tensor, the tensor's name
AttributePlace = tuple[str, str, str]  # a part's path, a tensor's name or "", an attribute's name
STORES: Final = ("_parameters", "_buffers", "__dict__")


class _Missing(enum.Enum):
    """What an attribute is that is not there, and a method of its owner's class."""

    ABSENT = "absent"
    INHERITED = "its class's"

    def __repr__(self) -> str:
        return self.value


ABSENT: Final = _Missing.ABSENT
INHERITED: Final = _Missing.INHERITED
# values that cannot change while they are the same object
ATOMS: Final = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(range, slice, enum.Enum, type, re.Pattern, PurePath, Fraction, Decimal),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(operator.itemgetter, operator.attrgetter),
)
_KEYS: Final = frozenset((bool, int, str, bytes, type(None)))
# by type: attributes that an object of it is made of
PARTS_OF_CALLABLES: Final[dict[type, tuple[str, ...]]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    types.BuiltinFunctionType: ("__qualname__", "__self__"),
}
_DEPTH: Final = 8  # of containers in containers
_CONTAINERS: Final = (list, tuple, deque, bytearray, set, frozenset)
# values that are asked for more than their type, wherever they are
KNOWN: Final[tuple[type, ...]] = (
    *ATOMS,
    *PARTS_OF_CALLABLES,
    types.FunctionType,
    torch.Tensor,
    torch.nn.Module,
)


class Forms:
    """Makes forms of values, as they are now.  Nothing changes while one is used: it looks at each
    function once.

    parts: those of a module.  Its parts and tensors are compared by where it has them, views of its
    tensors by what they are views of.  outside: where further storages start, of whose tensors it
    is compared which ones they are.
    """

    def __init__(self, parts: Parts | None = None, outside: Collection[int] = ()) -> None:
        self.parts: Parts = {} if parts is None else parts
        self._outside = outside
        self._functions: dict[tuple[types.FunctionType, int], Form] = {}

    def of(self, value: Any, depth: int = 0) -> Form:
        """Of what cannot be compared, and of what is too deep, the type."""
        kind: Any = type(value)
        if isinstance(value, float | complex):  # 0.0 == -0.0, and no nan is another
            return typed(kind, call("__repr__", atom(repr(value))))
        if isinstance(value, ATOMS):
            return atom(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, depth)
        if isinstance(value, torch.nn.Module):
            where = self._places.get(id(value))
            if where is not None:
                return place(where)
            return self._stranger(value, depth) if self.parts else typed(kind)
        if depth >= _DEPTH:
            return typed(kind)
        if isinstance(value, weakref.ref):
            return typed(kind, call("__call__", self.of(value(), depth + 1)))
        if isinstance(value, array | memoryview):
            return typed(kind, call("tobytes", atom(value.tobytes())))
        if isinstance(value, list | tuple | deque | bytearray):
            inside = elements(self.of(each, depth + 1) for each in tuple(value))
            return typed(kind, inside, *self._own(value, depth))
        if isinstance(value, set | frozenset):
            return typed(kind, ("apply", _ELEMENTS[depth], (atom(_ELEMENTS[depth](value)),)))
        if isinstance(value, dict | types.MappingProxyType):
            pairs = list(value.items())
            if all(type(key) in _KEYS for key, _ in pairs):
                held = items({key: self.of(v, depth + 1) for key, v in pairs})
                return typed(kind, held, *self._own(value, depth))
            forms = [elements(self.of(each, depth + 1) for each in pair) for pair in pairs]
            return typed(kind, call("items", elements(forms)))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        names = _names_of(value)
        if names:
            return typed(kind, *(self._attribute(value, name, depth + 1) for name in names))
        if _is_configuration(kind):
            more = [self._attribute(value, name, depth + 1) for name in slots_of(kind)]
            return typed(kind, self._attribute(value, "__dict__", depth), *more)
        if _is_array(value):
            return typed(kind, ("apply", _array, (atom(_array(value)),)))
        return typed(kind, *(self._own(value, depth) if is_plain(value, depth) else ()))

    def _own(self, value: Any, depth: int) -> tuple[Form, ...]:
        """Of the attributes of an object, or of a container of an engine's own class."""
        held = attributes_of(value)
        forms = () if held is None else (("own", None, (self.of(held, depth + 1),)),)
        if isinstance(value, defaultdict):
            return *forms, self._attribute(value, "default_factory", depth)
        return forms

    def _stranger(self, value: torch.nn.Module, depth: int) -> Form:
        """Of a module that is no part of this one: its plain attributes."""
        own = {name: v for name, v in vars(value).items() if isinstance(v, ATOMS)}
        forms = (("item", name, (self.of(v, depth + 1),)) for name, v in own.items())
        return typed(type(value), attribute("__dict__", *forms))

    def _tensor(self, value: torch.Tensor, depth: int) -> Form:
        """Which one of the module's it is, or what it is a view of.  Of others the shape is
        compared, in containers alone.  ModuleMemory knows what those are that have memory."""
        kind, where = type(value), self._places.get(id(value))
        looks = attribute("dtype", atom(value.dtype)), attribute("shape", atom(value.shape))
        if where is not None:
            return place(where) if usable(value) and value.numel() else place(where, *looks)
        if self._storages and usable(value):
            storage = value.untyped_storage().data_ptr()
            if storage in self._storages:
                start, steps = atom(value.data_ptr()), atom(value.stride())
                return typed(kind, *looks, call("data_ptr", start), call("stride", steps))
        return typed(kind, *looks) if depth else typed(kind)

    @cached_property
    def _places(self) -> dict[int, TensorPlace]:
        """Where the module has its parts and tensors, by their identities."""
        found: dict[int, TensorPlace] = {}
        for path, part in self.parts.items():
            found[id(part)] = path, "", ""
        for path, store, name, tensor in tensors_of(self.parts):
            found.setdefault(id(tensor), (path, store, name))
        return found

    @cached_property
    def _storages(self) -> set[int]:
        """Where memory starts whose tensors are compared by where they lie."""
        return storages_of(self.parts).union(self._outside) - {0}

    def _attribute(self, value: Any, name: str, depth: int) -> Form:
        """Of an attribute that there may be."""
        try:
            found = getattr(value, name)
        except (AttributeError, ValueError):  # ValueError: a cell that nothing has been put into
            return "absent", name, ()
        return attribute(name, self.of(found, depth + 1))

    def _function(self, value: types.FunctionType, depth: int) -> Form:
        found = self._functions.get((value, depth))
        if found is None:
            cells = [
                self._attribute(cell, "cell_contents", depth + 2)
                for cell in value.__closure__ or ()
            ]
            closure = elements(cells) if cells else atom(value.__closure__)
            same = typed(
                type(value),
                attribute("__code__", atom(value.__code__)),
                attribute("__closure__", closure),
                self._attribute(value, "__defaults__", depth + 1),
                self._attribute(value, "__kwdefaults__", depth + 1),
            )
            found = self._functions[value, depth] = ("once", None, (same,))
        return found


def tensors_of(parts: Parts) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """(path of a part, where it is kept there, under which name, tensor): parameters first."""
    for store in STORES:
        for path, part in parts.items():
            for name, tensor in getattr(part, store).items():
                if isinstance(tensor, torch.Tensor):
                    yield path, store, name, tensor


def owners_in(parts: Parts) -> dict[int, tuple[Any, str, str]]:
    """By their identities the parts and tensors that have attributes, and where they are: the path
    of a part, and a tensor's name or "".  They are kept: an address that is free may be used again.
    """
    found: dict[int, tuple[Any, str, str]] = {
        id(part): (part, path, "") for path, part in parts.items()
    }
    for path, _, name, tensor in tensors_of(parts):
        found.setdefault(id(tensor), (tensor, path, name))
    return found


def storages_of(parts: Parts) -> set[int]:
    """Where the memory of the module's tensors starts."""
    tensors = (tensor for *_, tensor in tensors_of(parts) if usable(tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def store_of(part: torch.nn.Module, tensor: str) -> str:
    """Where a part keeps the tensor of a name; "" where it has none."""
    stores = (s for s in STORES if isinstance(getattr(part, s).get(tensor), torch.Tensor))
    return next(stores, "")


def owner_of(path: str, tensor: str, parts: Parts) -> Any:
    """A part, or its tensor of that name if there is a name; None where it is not there."""
    part = parts.get(path)
    if part is None or not tensor:
        return part
    store = store_of(part, tensor)
    return getattr(part, store)[tensor] if store else None


def finder(parts: Parts) -> Callable[[TensorPlace], tuple[str, object]]:
    """What asks whether a value is what the module has at a place now."""

    def find(where: TensorPlace) -> tuple[str, object]:
        path, store, name = where
        part = parts.get(path)
        if part is None:
            return "at", 0  # where nothing lies
        return ("held", (getattr(part, store), name)) if store else ("at", id(part))

    return find


def paths_in(groups: Iterable[Iterable[Form]]) -> set[str]:
    """Of the parts by which forms find places."""
    left, seen, found = [form for forms in groups for form in forms], set[int](), set[str]()
    while left:
        form = left.pop()
        if id(form) not in seen:
            seen.add(id(form))
            left += form[2]
            if form[0] == "place":
                found.add(form[1][0])
    return found


class _Members(Forms):
    """Of elements of sets, which have no places: tensors and modules are only themselves."""

    def of(self, value: Any, depth: int = 0) -> Form:
        if isinstance(value, torch.Tensor | torch.nn.Module):
            return at(value)
        return super().of(value, depth)


def _elements(depth: int, value: Any) -> frozenset[Form]:
    forms = _Members()
    return frozenset(forms.of(each, depth + 1) for each in tuple(value))


def _names_of(value: Any) -> tuple[str, ...]:
    found = (names for kind, names in PARTS_OF_CALLABLES.items() if issubclass(type(value), kind))
    return next(found, ())


def slots_of(kind: Any) -> list[str]:
    """Fields of a dataclass that are kept beside `__dict__`."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    slot = types.MemberDescriptorType
    return [field.name for field in fields if isinstance(getattr(kind, field.name, None), slot)]


def _is_configuration(kind: Any) -> bool:
    known = dataclasses.is_dataclass(kind) or kind is types.SimpleNamespace
    return known or hasattr(kind, "to_dict")


def _is_array(value: Any) -> bool:
    dtype = getattr(value, "dtype", None) if type(value).__module__ == "numpy" else None
    return dtype is not None and not dtype.hasobject


def attributes_of(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether an object, and all that it holds, is compared by more than its type.  An engine's own
    objects, of threads, locks or files, change all the time."""
    if issubclass(type(value), KNOWN) or _is_array(value) or _is_configuration(type(value)):
        return True
    if depth >= _DEPTH or isinstance(value, types.ModuleType):
        return False
    inside = inside_of(value)
    return inside is not None and all(is_plain(each, depth + 1) for each in inside)


def inside_of(value: Any) -> list[Any] | None:
    """The values in a container, in what is called, or in another object's `__dict__`, if any."""
    kind = type(value)
    if issubclass(kind, dict | types.MappingProxyType):
        items = dict.items(value) if issubclass(kind, dict) else value.items()
        return [each for pair in list(items) for each in pair]
    known: Any = next((known for known in _CONTAINERS if issubclass(kind, known)), None)
    if known is not None:  # as it is, whatever a class of its own shows
        return list(known.__iter__(value))
    if names := _names_of(value):
        return [getattr(value, name) for name in names]
    held = attributes_of(value)
    return None if held is None else list(held.values())


def _array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), value.shape, value.tobytes()


_ELEMENTS: Final = [functools.partial(_elements, depth) for depth in range(_DEPTH)]
