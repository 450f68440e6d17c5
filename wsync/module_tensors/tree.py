"""Which parts modules have, under which names, and what tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from wsync._core import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class ModuleTree:
    """The parts of modules, and the names of their tensors, at one moment.

    Keeps the parts, but no tensors: an engine may replace its weights between updates.
    """

    def __init__(self, roots: Iterable[Module]) -> None:
        parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
        if script := next((p for p in parts if not isinstance(p._parameters, dict)), None):
            raise UnsupportedError(
                f"{type(script).__name__} is TorchScript: what it holds is not Python's"
            )
        self._parts, self._kinds = parts, list(map(type, parts))
        self._children: list[dict[str, Any]] = [part._modules for part in parts]
        self._stores: list[dict[str, Any]] = [
            store for part in parts for store in (part._parameters, part._buffers)
        ]
        self._keys = list(map(tuple, self._children)), list(map(tuple, self._stores))
        self._below = list(chain.from_iterable(map(dict.values, self._children)))
        held = list(chain.from_iterable(map(dict.values, self._stores)))
        self._count, self._empty = len(_distinct(held)), _nowhere(held)

    def same(self) -> bool:
        """Whether all parts are the same objects of the same classes, with tensors of the same
        names."""
        return self._read() is not None

    def tensors(self) -> list[Tensor] | None:
        """The distinct tensors of all parts, in order; None where `same` is not true, or where
        there are more or fewer of them."""
        held = self._read()
        found = None if held is None else _distinct(held)
        return found if found is not None and len(found) == self._count else None

    def _read(self) -> list[Any] | None:
        held = list(chain.from_iterable(map(dict.values, self._stores)))
        below = list(chain.from_iterable(map(dict.values, self._children)))
        if (list(map(tuple, self._children)), list(map(tuple, self._stores))) != self._keys:
            return None
        if below != self._below:
            return None
        same = list(map(type, self._parts)) == self._kinds and _nowhere(held) == self._empty
        return held if same else None


def _nowhere(held: list[Any]) -> list[int]:
    return [number for number, value in enumerate(held) if value is None]


def _distinct(values: Iterable[Any]) -> list[Any]:
    found = {id(value): value for value in values}
    found.pop(id(None), None)
    return list(found.values())
