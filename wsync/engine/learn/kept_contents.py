"""What values hold that can be changed while they stay the same objects, to put it back."""

from __future__ import annotations

import itertools
import operator
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Final

import torch

from wsync.engine.learn.forms_of_values import (
    ABSENT,
    ATOMS,
    KNOWN,
    PARTS_OF_CALLABLES,
    attributes_of,
    inside_of,
    is_plain,
    slots_of,
)
from wsync.engine.learn.module_memory import bytes_of, usable

# bytes of memory that tensors lie in: an engine's caches are larger
_MOST: Final = 1 << 20
# what holds other values for good
_FIXED: Final = (tuple, frozenset, types.MappingProxyType, *PARTS_OF_CALLABLES)


class Content:
    """What a container, an array of numpy, a small tensor or a plain object holds."""

    def __init__(self, value: Any, way: _Way) -> None:
        self._value, self._way, self._held = value, way, way.take(value)

    def inside(self) -> list[Any]:
        """The values in it."""
        held = list(self._held) if isinstance(self._held, list) else []
        attributes = attributes_of(self._value)  # of a container, whose class an engine may define
        return held if attributes is None else [*held, attributes]

    def span(self) -> tuple[int, int]:
        """Where the memory of a tensor or of an array starts, and its size."""
        if isinstance(self._held, torch.Tensor):
            storage = self._value.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        if _is_array(self._held):
            return self._value.__array_interface__["data"][0], self._value.nbytes
        return 0, 0

    def put_back(self) -> bool:
        """Whether anything had changed."""
        if self._way.fill is None or _same(self._way.take(self._value), self._held):
            return False
        self._way.fill(self._value, self._held)
        return True


def content_of(value: Any, storages: Set[int]) -> Content | None:
    """What it holds now.  None where that cannot be changed; and of modules, of tensors that are
    large or lie in one of these storages, and of objects that hold others than plain ones."""
    kind = type(value)  # not what it says that it is, as a proxy does
    if issubclass(kind, ATOMS):
        return None
    way = next((way for known, way in _WAYS.items() if issubclass(kind, known)), None)
    if way is None and _is_array(value):
        owner = _owner(value)
        way = _ARRAY if owner is value else _Way(lambda _: [owner], None)
    if issubclass(kind, torch.Tensor) and usable(value):
        storage = value.untyped_storage()
        way = _TENSOR if storage.nbytes() <= _MOST and storage.data_ptr() not in storages else None
    if way is None and issubclass(kind, _FIXED):
        way = _Way(inside_of, None)
    if way is None and not issubclass(kind, KNOWN) and is_plain(value):
        way = _OBJECT
    return None if way is None else Content(value, way)


@dataclass(frozen=True, slots=True)
class _Way:
    """How it is found what a value holds, and how that is put back: by methods of the built-in
    class, as those of a subclass may do more."""

    take: Callable[[Any], Any]  # a list of values, an array, a tensor, or bytes
    fill: Callable[[Any, Any], object] | None


def _sliced(kind: Any) -> _Way:
    """Of the same length, this also fills what somebody has a view of."""

    def fill(value: Any, held: Any) -> None:
        kind.__setitem__(value, slice(None), held)

    return _Way(lambda value: kind.__getitem__(value, slice(None)), fill)


def _gathered(kind: Any, add: Callable[[Any, Any], None]) -> _Way:
    def fill(value: Any, held: Any) -> None:
        kind.clear(value)
        add(value, held)

    return _Way(lambda value: list(kind.__iter__(value)), fill)


def _mapped(kind: Any) -> _Way:
    """Keys, and after each its value."""

    def fill(value: Any, held: Any) -> None:
        found, keys = list(kind.keys(value)), held[::2]
        # threads that look at the others find them meanwhile
        same = list(map(operator.is_, found, keys))
        for key in found[(*same, False).index(False) :]:
            kind.__delitem__(value, key)
        for key, each in zip(keys, held[1::2], strict=True):
            kind.__setitem__(value, key, each)

    return _Way(lambda value: list(itertools.chain.from_iterable(kind.items(value))), fill)


_WAYS: Final[dict[Any, _Way]] = {
    **{kind: _mapped(kind) for kind in (OrderedDict, dict)},
    **{kind: _sliced(kind) for kind in (list, bytearray, array)},
    **{set: _gathered(set, set.update), deque: _gathered(deque, deque.extend)},
}


def _fill_array(value: Any, held: Any) -> None:
    value.flags.writeable = True
    if value.shape != held.shape:
        value.resize(held.shape, refcheck=False)
    type(held).__setitem__(value, ..., held)
    value.flags.writeable = held.flags.writeable


def _copy_of_array(value: Any) -> Any:
    found = sys.modules["numpy"].array(value, copy=True, subok=False)
    found.flags.writeable = value.flags.writeable
    return found


_ARRAY: Final = _Way(_copy_of_array, _fill_array)


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def _owner(value: Any) -> Any:
    """The array that an array's memory is; None where it is not numpy's own."""
    while _is_array(value.base):
        value = value.base
    return value if value.flags.owndata else None


def _memory(value: torch.Tensor) -> torch.Tensor:
    """All of it: of one element there may be several in a tensor."""
    storage = value.untyped_storage()
    return bytes_of(storage, 0, storage.nbytes())


_TENSOR: Final = _Way(
    lambda value: _memory(value).clone(), lambda value, held: _memory(value).copy_(held)
)


def _places(value: Any) -> list[str]:
    """Where an object keeps its attributes: in one dict, if it has one, and a dataclass's slots."""
    return [*(() if attributes_of(value) is None else ("__dict__",)), *slots_of(type(value))]


def _fill_object(value: Any, held: Any) -> None:
    for name, each in zip(_places(value), held, strict=True):
        if each is not ABSENT:
            object.__setattr__(value, name, each)
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _in_places(value: Any) -> list[Any]:
    return [getattr(value, name, ABSENT) for name in _places(value)]


_OBJECT: Final = _Way(_in_places, _fill_object)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(operator.is_, one, other))
    if _is_array(one):  # of objects these bytes are their identities
        same = one.shape == other.shape and one.tobytes() == other.tobytes()
        return bool(same and one.flags.writeable == other.flags.writeable)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bytes(one) == bytes(other)
