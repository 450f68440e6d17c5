"""Which parts modules have, under which names, and what tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

_Stores = list[dict[str, Any]]


class ModuleTree:
    """The parts of modules, and the names of their tensors, at one moment.

    Keeps the parts, but no tensors: an engine may replace its weights between updates.
    """

    def __init__(self, roots: Iterable[Module]) -> None:
        parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._children: _Stores = [part._modules for part in parts]
        tensors = (store for part in parts for store in (part._parameters, part._buffers))
        self._stores: _Stores = [*self._children, *tensors]
        self._seen = self._see()

    def same(self) -> bool:
        """Whether all parts are the same objects, with tensors of the same names."""
        return self._see() == self._seen

    def _see(self) -> tuple[object, ...]:
        """Names, in which stores they are, and parts.  Most stores are empty, and passed over."""
        full = list(filter(None, self._stores))
        parts = chain.from_iterable(map(dict.values, filter(None, self._children)))
        return list(map(tuple, full)), list(map(id, full)), list(parts)
