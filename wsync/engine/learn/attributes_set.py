"""Attributes that every load_weights leaves at one value: flags that say that what was derived from
weights is stale, and caches that it drops.  An update leaves them so, too.

Seen are plain attributes of a module's parts that are set in the usual way, to True, False, words
or None.  A number may come of the weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

from wsync.engine.learn.attributes_read import Parts

Place = tuple[str, str]  # the path of a part, and an attribute's name
_NONE: Final = object()
_WORDS: Final = (bool, str, type(None))


@contextlib.contextmanager
def attributes_set(module: torch.nn.Module) -> Iterator[set[Place]]:
    """The attributes of the module's parts that this thread sets in the block."""
    mine = threading.get_ident()
    paths = {id(part): path for path, part in module.named_modules()}
    found: set[Place] = set()
    kind: Any = torch.nn.Module
    former = kind.__setattr__

    def note(part: Any, name: str, value: Any) -> None:
        if threading.get_ident() == mine and id(part) in paths:
            found.add((paths[id(part)], name))
        former(part, name, value)

    kind.__setattr__ = note
    try:
        yield found
    finally:
        kind.__setattr__ = former


class LeftValues:
    """What attributes are when a load has ended."""

    def __init__(self, places: set[Place], parts: Parts) -> None:
        values = {place: _value(place, parts) for place in sorted(places)}
        self._values = {p: v for p, v in values.items() if isinstance(v, _WORDS)}

    def common(self, other: LeftValues) -> LeftValues:
        """Those that are the same after another load."""
        kept = LeftValues(set(), {})
        kept._values = {
            place: value
            for place, value in self._values.items()
            if _same(value, other._values.get(place, _NONE))
        }
        return kept

    def drop_caches(self, parts: Parts) -> None:
        """Has tensors be None again."""
        for place, value in self._values.items():
            if value is None and isinstance(_value(place, parts), torch.Tensor):
                setattr(parts[place[0]], place[1], None)

    def put_back(self, parts: Parts) -> None:
        """Has all of them be what a load leaves."""
        for place, value in self._values.items():
            now = _value(place, parts)
            if now is not _NONE and not _same(now, value):
                setattr(parts[place[0]], place[1], value)


def _value(place: Place, parts: Parts) -> Any:
    part = parts.get(place[0])
    return _NONE if part is None else vars(part).get(place[1], _NONE)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _WORDS) and one == other)
