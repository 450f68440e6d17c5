"""Whether the values that load_weights goes by are still what they were when it was recorded: their
forms, which C asks again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import deque
from typing import Any, Final

import torch

from wsync.module_tensors.value_forms import Form, atom, attribute, call, elements, items, typed

# values that cannot change while they are the same object
ATOMS: Final = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(range, slice, enum.Enum, torch.dtype, torch.device, type),
)
_KEYS: Final = frozenset((bool, int, str, bytes, type(None)))
# by type: attributes that an object of it is made of
_NAMES: Final[dict[type, tuple[str, ...]]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    types.BuiltinFunctionType: ("__qualname__", "__self__"),
}
_DEPTH: Final = 8  # of containers in containers


class Forms:
    """Makes forms of values, as they are now.  Nothing changes while one is used: it looks at each
    function once."""

    def __init__(self) -> None:
        self._functions: dict[tuple[types.FunctionType, int], Form] = {}

    def of(self, value: Any, depth: int = 0) -> Form:
        """Of what cannot be compared, and of what is too deep, the type."""
        kind: Any = type(value)
        if isinstance(value, float | complex):  # 0.0 == -0.0, and no nan is another
            return typed(kind, call("__repr__", atom(repr(value))))
        if isinstance(value, ATOMS):
            return atom(value)
        if isinstance(value, torch.Tensor) and depth > 0:
            looks = attribute("dtype", atom(value.dtype)), attribute("shape", atom(value.shape))
            return typed(kind, *looks)
        if depth >= _DEPTH or isinstance(value, torch.nn.Module | torch.Tensor):
            return typed(kind)
        if isinstance(value, list | tuple | deque | bytearray):
            return typed(kind, elements(self.of(each, depth + 1) for each in tuple(value)))
        if isinstance(value, set | frozenset):
            return typed(kind, ("apply", _ELEMENTS[depth], (atom(_ELEMENTS[depth](value)),)))
        if isinstance(value, dict | types.MappingProxyType):
            pairs = list(value.items())
            if all(type(key) in _KEYS for key, _ in pairs):
                return typed(kind, items({key: self.of(v, depth + 1) for key, v in pairs}))
            forms = [elements(self.of(each, depth + 1) for each in pair) for pair in pairs]
            return typed(kind, call("items", elements(forms)))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        names = next((found for known, found in _NAMES.items() if isinstance(value, known)), ())
        if names:
            return typed(kind, *(self._attribute(value, name, depth + 1) for name in names))
        plain = dataclasses.is_dataclass(kind)
        if plain or hasattr(kind, "to_dict") or kind is types.SimpleNamespace:
            slots = [field.name for field in dataclasses.fields(value)] if plain else []
            slots = [name for name in slots if _is_slot(kind, name)]
            more = [self._attribute(value, name, depth + 1) for name in slots]
            return typed(kind, self._attribute(value, "__dict__", depth), *more)
        dtype = getattr(value, "dtype", None) if kind.__module__ == "numpy" else None
        if dtype is not None and not dtype.hasobject:
            return typed(kind, ("apply", _array, (atom(_array(value)),)))
        return typed(kind)

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


def _elements(depth: int, value: Any) -> frozenset[Form]:
    forms = Forms()
    return frozenset(forms.of(each, depth + 1) for each in tuple(value))


def _is_slot(kind: Any, name: str) -> bool:
    """Whether an attribute is kept beside `__dict__`."""
    return isinstance(getattr(kind, name, None), types.MemberDescriptorType)


def _array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), value.shape, value.tobytes()


_ELEMENTS: Final = [functools.partial(_elements, depth) for depth in range(_DEPTH)]
