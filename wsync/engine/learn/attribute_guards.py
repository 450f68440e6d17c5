"""Attributes that load_weights reads, and whether they have changed since.

Seen are those of the module, of its parts and of its parameters whose values are plain: numbers,
words, None, enumerations, dtypes, arrays of numpy, functions by their code and what they are bound
to, containers of such, and configurations (objects with to_dict, dataclasses) by what they hold.
Of a tensor in a container the shape is compared, of anything else there, and of anything deeper
than a few containers, the type; so it is of parts and parameters themselves.  Not seen is what is
read by way of `__dict__` or `vars`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import reprlib
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

# values that cannot change while they are the same object
_ATOMS: Final = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(range, slice, enum.Enum, torch.dtype, torch.device, type),
)
# what every module has, and ModuleMemory knows of
_OWN: Final = vars(torch.nn.Module()).keys() - {"training"}
_DEPTH: Final = 8  # of containers in containers


Parts = Mapping[str, torch.nn.Module]
"""The parts of a module by their paths, itself as ""."""


class _Absent(enum.Enum):
    """What an attribute is that is not there, and a value that is not compared."""

    ABSENT = "absent"
    OTHER = "other"

    def __repr__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a part of a module, or of the part's parameter of that name, as it was.

    frozen: see `_freeze`.  atom: the value itself, where it cannot change.
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

    def difference(self, parts: Parts) -> str:
        """How it differs now, or ""."""
        value = self._value(parts)
        if value is self.atom or (frozen := _freeze(value)) == self.frozen:
            return ""
        name = ".".join(filter(None, (self.part, self.parameter, self.name)))
        text = type(value).__name__ if frozen is _Absent.OTHER else _words(value)
        if text == self.text:
            text = "another"
        return f"{name}, which load_weights goes by, was {self.text} and is {text}"

    def _value(self, parts: Parts) -> Any:
        owner: Any = parts.get(self.part)
        if owner is not None and self.parameter:
            owner = owner._parameters.get(self.parameter)
        return _Absent.ABSENT if owner is None else getattr(owner, self.name, _Absent.ABSENT)


def _forms(value: Any) -> tuple[Any, Any, str]:
    """An Attribute's frozen, atom and text."""
    return _freeze(value), value if isinstance(value, _ATOMS) else _Absent, _words(value)


class _Words(reprlib.Repr):
    """Never the values of tensors: a recording would take that for the loader's doing."""

    def repr_instance(self, value: Any, level: int) -> str:
        if isinstance(value, _ATOMS):
            return super().repr_instance(value, level)
        return f"a {type(value).__name__}"


_words: Final = _Words().repr


def _freeze(value: Any, depth: int = 0) -> Any:
    """What equals another one's if the values are the same, and does not change with them;
    OTHER for what cannot be compared.  Of such a value in a container, the type is compared."""
    kind = type(value)
    if isinstance(value, float | complex):
        return kind, repr(value)  # 0.0 == -0.0, and no nan is another
    if isinstance(value, _ATOMS):
        return kind, value
    if depth == _DEPTH or isinstance(value, torch.nn.Module | torch.Tensor):
        return _Absent.OTHER
    if isinstance(value, list | tuple | deque | bytearray):
        return kind, tuple(_inner(each, depth) for each in tuple(value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(_inner(each, depth) for each in tuple(value))
    if isinstance(value, dict | types.MappingProxyType):
        pairs = list(value.items())
        return kind, tuple((_inner(k, depth), _inner(v, depth)) for k, v in pairs)
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        bound = (cells, value.__defaults__, value.__kwdefaults__)
        return kind, value.__code__, _inner(bound, depth)
    if isinstance(value, types.MethodType):
        return kind, _inner((value.__func__, value.__self__), depth)
    if isinstance(value, functools.partial):
        return kind, _inner((value.func, value.args, value.keywords), depth)
    if isinstance(value, types.BuiltinFunctionType):
        return kind, value.__qualname__, _inner(value.__self__, depth)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        slots = {name: getattr(value, name, _Absent.ABSENT) for name in names}
        return kind, _inner({**slots, **getattr(value, "__dict__", {})}, depth)
    if hasattr(kind, "to_dict") or kind is types.SimpleNamespace:
        return kind, _inner(getattr(value, "__dict__", None), depth)
    dtype = getattr(value, "dtype", None) if kind.__module__ == "numpy" else None
    if dtype is not None and not dtype.hasobject:
        return kind, str(dtype), value.shape, value.tobytes()
    return _Absent.OTHER


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has set the variable
        return _Absent.ABSENT


def _inner(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape
    found = _freeze(value, depth + 1)
    return type(value) if found is _Absent.OTHER else found


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
            or name in _OWN
            or name.startswith("__")
        ):
            return
        seen.add(key)
        _, part, parameter = owners[key[0]]
        own = value is _Absent.ABSENT or name in owner.__dict__ or name == "requires_grad"
        if own or not (parameter or callable(value)):
            attribute = Attribute.of(part, parameter, name, value)
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
