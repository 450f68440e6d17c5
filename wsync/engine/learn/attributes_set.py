"""Attributes that every load_weights leaves at one value: flags that say that what was derived from
weights is stale, and caches that it drops.  An update leaves them so, too.

Seen are plain attributes of a module's parts that are set in the usual way, to True, False, words,
None or an empty container, or that are removed.  A number may come of the weights.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import torch

from wsync.engine.learn.attribute_watch import watching
from wsync.engine.learn.forms_of_values import (
    ABSENT,
    ATOMS,
    AttributePlace,
    Parts,
    owner_of,
    owners_in,
)
from wsync.engine.learn.module_memory import slots

_WORDS: Final = (bool, str, type(None), enum.Enum)
_CONTAINERS: Final = (
    *(list, dict, set, deque, bytearray, OrderedDict, defaultdict, Counter),
    *(tuple, frozenset),
)


@contextlib.contextmanager
def attributes_set(module: torch.nn.Module) -> Iterator[Callable[[], set[AttributePlace]]]:
    """Yields what says which attributes of the module's parts, and of its tensors, were set in the
    block, and which of the parts' are gone since it began."""
    parts = dict(module.named_modules())
    owners = owners_in(parts)
    former = _names(parts)
    found: set[AttributePlace] = set()

    def note(owner: Any, name: str) -> None:
        if id(owner) in owners:
            found.add((*owners[id(owner)][1:], name))

    with watching(changed=note):
        yield lambda: found | (former - _names(parts))


class LeftValues:
    """What attributes are when a load has ended.

    places: of those that it sets or removes.  reset: of those that it has found otherwise, and
    made what they always were when it began before; these may be numbers.
    """

    def __init__(
        self,
        places: Collection[AttributePlace],
        parts: Parts,
        reset: Collection[AttributePlace] = (),
    ) -> None:
        values = {place: _value(place, parts) for place in sorted({*places, *reset})}
        self._values = {
            place: copy.copy(value) if _is_empty(value) else value
            for place, value in values.items()
            if value is ABSENT
            or isinstance(value, ATOMS if place in reset else _WORDS)
            or _is_empty(value)
        }
        self._emptied = {*reset} - {*places}  # containers that stay the same ones

    def __contains__(self, place: AttributePlace) -> bool:
        return place in self._values

    def common(self, other: LeftValues) -> LeftValues:
        """Those that are the same after another load."""
        kept = copy.copy(self)
        kept._values = {
            place: value
            for place, value in self._values.items()
            if place in other and _same(value, other._values[place])
        }
        return kept

    def drop_caches(self, parts: Parts) -> Callable[[], None] | None:
        """Has tensors be gone again; the answer puts them back, or is None where there are none."""
        dropped = []
        for place, value in self._values.items():
            slot, name = _slot(place, parts), place[2]
            if slot is None or not isinstance(slot[name], torch.Tensor):
                continue
            dropped.append((slot, name, slot[name]))
            if value is ABSENT:
                del slot[name]
            else:
                slot[name] = copy.copy(value)

        def put_back() -> None:
            for slot, name, tensor in dropped:
                slot[name] = tensor

        return put_back if dropped else None

    def put_back(self, parts: Parts) -> None:
        """Has all of them be what a load leaves."""
        for place, value in self._values.items():
            owner = owner_of(*place[:2], parts)
            now = _value(place, parts)
            if owner is None or _same(now, value):
                continue
            if value is ABSENT:
                delattr(owner, place[2])
            elif place in self._emptied and type(now) is type(value) and hasattr(now, "clear"):
                now.clear()
            else:
                setattr(owner, place[2], copy.copy(value))


def _slot(place: AttributePlace, parts: Parts) -> dict[str, Any] | None:
    """Where an attribute is kept."""
    owner = owner_of(*place[:2], parts)
    if owner is None:
        return None
    found = slots(owner) if isinstance(owner, torch.nn.Module) else (vars(owner),)
    return next((slot for slot in found if place[2] in slot), None)


def _value(place: AttributePlace, parts: Parts) -> Any:
    slot = _slot(place, parts)
    return ABSENT if slot is None else slot[place[2]]


def _names(parts: Parts) -> set[AttributePlace]:
    return {
        (path, "", name) for path, part in parts.items() for slot in slots(part) for name in slot
    }


def _is_empty(value: object) -> bool:
    return type(value) in _CONTAINERS and not value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one, of which the second is an atom or an empty container."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return repr(one) == repr(other) if isinstance(other, ATOMS) else _is_empty(one)
