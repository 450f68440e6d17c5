"""Which parts modules have, under which names, and what tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_Stores = list[dict[str, Any]]


class ModuleTree:
    """The parts of modules, and the names of their tensors, at one moment.

    Keeps the parts, but no tensors: an engine may replace its weights between updates.
    """

    def __init__(self, roots: Iterable[Module]) -> None:
        parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._children: _Stores = [part._modules for part in parts]
        self._stores: _Stores = [s for part in parts for s in (part._parameters, part._buffers)]
        self._names = _names(self._children), _names(self._stores)
        self._below, held = _values(self._children), _values(self._stores)
        self._count = len(_distinct(held))

    def same(self) -> bool:
        """Whether all parts are the same objects, with tensors of the same names."""
        return self._read() is not None

    def tensors(self) -> list[Tensor] | None:
        """The distinct tensors of all parts, in order; None where `same` is not true, or where
        there are more or fewer of them."""
        held = self._read()
        found = None if held is None else _distinct(held)
        return found if found is not None and len(found) == self._count else None

    def _read(self) -> list[Any] | None:
        names = _names(self._children), _names(self._stores)
        if names != self._names or _values(self._children) != self._below:
            return None
        return _values(self._stores)


def _names(stores: _Stores) -> list[tuple[object, ...]]:
    """Those in stores, and which have some: most have none, and are passed over in no time."""
    full = list(filter(None, stores))
    return [tuple(map(id, full)), *map(tuple, full)]


def _values(stores: _Stores) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, stores))))


def _distinct(values: Iterable[Any]) -> list[Any]:
    found = {id(value): value for value in values}
    found.pop(id(None), None)
    return list(found.values())
