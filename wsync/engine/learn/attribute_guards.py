"""Attributes that load_weights reads, and whether they have changed since.

Seen are those of the module, of its parts and of its parameters whose values are plain: numbers,
words, None, enumerations, dtypes, arrays of numpy, functions by their code and what they are bound
to, containers of such, and configurations (objects with to_dict, dataclasses) by what they hold.
Of a tensor in a container the shape is compared, of anything else there, and of anything deeper
than a few containers, the type; so it is of parts and parameters themselves.  Of a method of the
part's class it is seen that nothing on the part takes its place.  Not seen is what is read by way
of `__dict__` or `vars`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import reprlib
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

# values that cannot change while they are the same object
_ATOMS: Final = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(range, slice, enum.Enum, torch.dtype, torch.device, type),
)
_PLAIN: Final = frozenset((bool, int, str, bytes, type(None)))  # the most frequent of them
_HELD: Final = frozenset(("_parameters", "_buffers", "_modules"))  # ModuleMemory knows of these
_DEPTH: Final = 8  # of containers in containers


Parts = Mapping[str, torch.nn.Module]
"""The parts of a module by their paths, itself as ""."""


class _Absent(enum.Enum):
    """What an attribute is that is not there, a method of its owner's class, and a value that is
    not compared."""

    ABSENT = "absent"
    INHERITED = "its class's"
    OTHER = "other"

    def __repr__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a part of a module, or of the part's parameter of that name, as it was.

    frozen: see `_Freezer`.  atom: the value itself, where it cannot change.
    """

    part: str
    parameter: str
    name: str
    frozen: Any
    atom: Any
    text: str

    @staticmethod
    def of(part: str, parameter: str, name: str, value: Any) -> Attribute:
        return Attribute(part, parameter, name, *_forms(value))

    def renewed(self, parts: Parts) -> Attribute:
        """As it is now."""
        return Attribute.of(self.part, self.parameter, self.name, self._value(parts))

    def difference(self, parts: Parts, freezer: _Freezer | None = None) -> str:
        """How it differs now, or ""."""
        value = self._value(parts)
        if value is self.atom:
            return ""
        frozen = (freezer or _Freezer()).freeze(value)
        if frozen == self.frozen:
            return ""
        name = ".".join(filter(None, (self.part, self.parameter, self.name)))
        text = type(value).__name__ if frozen is _Absent.OTHER else _words(value)
        if text == self.text:
            text = "another"
        return f"{name}, which load_weights goes by, was {self.text} and is {text}"

    def owner(self, parts: Parts) -> Any:
        """What it is an attribute of, or None."""
        part = parts.get(self.part)
        if part is None or not self.parameter:
            return part
        return part._parameters.get(self.parameter)

    def _value(self, parts: Parts) -> Any:
        owner = self.owner(parts)
        if owner is None:
            return _Absent.ABSENT
        return _own(owner, self.name, getattr(owner, self.name, _Absent.ABSENT))


class AttributeGuards:
    """Attributes that are compared at every update: those of one owner together."""

    def __init__(self, attributes: Iterable[Attribute] = ()) -> None:
        self._others: list[Attribute] = []  # compared one by one
        self._groups: list[_Group] = []
        groups: dict[tuple[str, str], list[Attribute]] = {}
        for each in attributes:
            made_up = each.atom is _Absent.ABSENT and not each.parameter  # by Module.__getattr__
            if each.atom is _Absent or made_up or "." in each.name:
                self._others.append(each)
            else:
                groups.setdefault((each.part, each.parameter), []).append(each)
        self._groups = [_Group(members) for members in groups.values()]

    def difference(self, parts: Parts) -> str:
        """How the first one that differs now does, or ""."""
        freezer = _Freezer()
        defined: dict[type, set[str]] = {}
        doubtful = (m for g in self._groups if not g.holds(parts, defined) for m in g.members)
        for each in (*doubtful, *self._others):
            if difference := each.difference(parts, freezer):
                return difference
        return ""


class _Group:
    """Attributes of one owner that are there and cannot change while they are the same objects,
    and names that it does not have, or that only its class has."""

    def __init__(self, members: list[Attribute]) -> None:
        self.members = members
        there = [each for each in members if not isinstance(each.atom, _Absent)]
        # asked for two and more names, an attrgetter gives a tuple
        names = ("__class__", "__class__", *(each.name for each in there))
        self._get: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*names)
        self._atoms = [each.atom for each in there]
        self._unset = {each.name for each in members if isinstance(each.atom, _Absent)}
        self._absent = {each.name for each in members if each.atom is _Absent.ABSENT}

    def holds(self, parts: Parts, defined: dict[type, set[str]]) -> bool:
        """Whether nothing has changed; False where it takes longer to tell.

        defined: the names that classes define, of those that were asked for.
        """
        owner = self.members[0].owner(parts)
        try:
            kind, _, *values = self._get(owner)
        except AttributeError:
            return False
        if not all(map(operator.is_, values, self._atoms)):
            return False
        if not vars(owner).keys().isdisjoint(self._unset):
            return False
        if not self._absent:
            return True
        if kind not in defined:
            defined[kind] = {name for base in kind.__mro__ for name in vars(base)}
        known = defined[kind]
        if "__getattr__" in known:  # it may make up others
            return False
        return self._absent.isdisjoint(known)


def _own(owner: Any, name: str, value: Any) -> Any:
    """A value that was found on an owner, or INHERITED."""
    inherited = (
        callable(value)
        and isinstance(owner, torch.nn.Module)
        and not isinstance(value, torch.nn.Module | type)
        and name not in vars(owner)
    )
    return _Absent.INHERITED if inherited else value


def _forms(value: Any) -> tuple[Any, Any, str]:
    """An Attribute's frozen, atom and text."""
    return _Freezer().freeze(value), value if isinstance(value, _ATOMS) else _Absent, _words(value)


class _Words(reprlib.Repr):
    """Never the values of tensors: a recording would take that for the loader's doing."""

    def repr_instance(self, value: Any, level: int) -> str:
        if isinstance(value, _ATOMS):
            return super().repr_instance(value, level)
        return f"a {type(value).__name__}"


_words: Final = _Words().repr


class _Freezer:
    """Makes of values what can be compared later.  Nothing changes while one is used: it looks at
    each function once."""

    def __init__(self) -> None:
        self._functions: dict[tuple[types.FunctionType, int], Any] = {}

    def freeze(self, value: Any, depth: int = 0) -> Any:
        """What equals another one's if the values are the same, and does not change with them;
        OTHER for what cannot be compared.  Of such a value in a container, the type is
        compared."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, float | complex):
            return kind, repr(value)  # 0.0 == -0.0, and no nan is another
        if isinstance(value, _ATOMS):
            return kind, value
        if depth == _DEPTH or isinstance(value, torch.nn.Module | torch.Tensor):
            return _Absent.OTHER
        if isinstance(value, list | tuple | deque | bytearray):
            return kind, tuple(self._inner(each, depth) for each in tuple(value))
        if isinstance(value, set | frozenset):
            return kind, frozenset(self._inner(each, depth) for each in tuple(value))
        if isinstance(value, dict | types.MappingProxyType):
            pairs = list(value.items())
            return kind, tuple((self._inner(k, depth), self._inner(v, depth)) for k, v in pairs)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return kind, self._inner((value.__func__, value.__self__), depth)
        if isinstance(value, functools.partial):
            return kind, self._inner((value.func, value.args, value.keywords), depth)
        if isinstance(value, types.BuiltinFunctionType):
            return kind, value.__qualname__, self._inner(value.__self__, depth)
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            slots = {name: getattr(value, name, _Absent.ABSENT) for name in names}
            return kind, self._inner({**slots, **getattr(value, "__dict__", {})}, depth)
        if hasattr(kind, "to_dict") or kind is types.SimpleNamespace:
            return kind, self._inner(getattr(value, "__dict__", None), depth)
        dtype = getattr(value, "dtype", None) if kind.__module__ == "numpy" else None
        if dtype is not None and not dtype.hasobject:
            return kind, str(dtype), value.shape, value.tobytes()
        return _Absent.OTHER

    def _function(self, value: types.FunctionType, depth: int) -> Any:
        found = self._functions.get((value, depth))
        if found is None:
            cells = [_content(cell) for cell in value.__closure__ or ()]
            bound = (cells, value.__defaults__, value.__kwdefaults__)
            found = types.FunctionType, value.__code__, self._inner(bound, depth)
            self._functions[value, depth] = found
        return found

    def _inner(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return type(value), value.dtype, value.shape
        found = self.freeze(value, depth + 1)
        return type(value) if found is _Absent.OTHER else found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has set the variable
        return _Absent.ABSENT


@contextmanager
def attributes_read(module: torch.nn.Module) -> Iterator[list[Attribute]]:
    """The attributes that this thread reads in the block, with the values that they had first, and
    those that it looks for in vain."""
    mine = threading.get_ident()
    # the objects are kept: the address of a freed parameter may be used again
    owners: dict[int, tuple[Any, str, str]] = {}
    for path, part in module.named_modules():
        owners[id(part)] = (part, path, "")
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), (parameter, path, name))
    seen: set[tuple[int, str]] = set()
    found = [
        Attribute.of(path, name, "__class__", type(owner)) for owner, path, name in owners.values()
    ]

    def note(owner: Any, name: str, value: Any) -> None:
        key = (id(owner), name)
        if (
            threading.get_ident() != mine
            or key in seen
            or key[0] not in owners
            or name in _HELD
            or name.startswith("__")
        ):
            return
        seen.add(key)
        _, part, parameter = owners[key[0]]
        own = value is _Absent.ABSENT or name in owner.__dict__ or name == "requires_grad"
        if own or not parameter:
            attribute = Attribute.of(part, parameter, name, _own(owner, name, value))
            if attribute.frozen is not _Absent.OTHER:
                found.append(attribute)

    def reading(kind: type) -> Any:
        find: Any = kind.__getattribute__

        def read(owner: Any, name: str) -> Any:
            try:
                value = find(owner, name)
            except AttributeError:
                # a tensor or a part of its own, or what a __getattr__ makes up, is found next
                note(owner, name, _Absent.ABSENT)
                raise
            note(owner, name, value)
            return value

        return read

    kinds: tuple[Any, ...] = (torch.nn.Module, torch.nn.Parameter)
    with _patching:
        for kind in kinds:
            kind.__getattribute__ = reading(kind)
        try:
            yield found
        finally:
            for kind in kinds:
                del kind.__getattribute__


_patching = threading.RLock()
