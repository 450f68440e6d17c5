"""Finds the tensors that computed places depend on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from wsync.module_tensors.quantised_names import weight_of
from wsync.probing.numbering import Made, Source
from wsync.probing.pieces import PlacedBox
from wsync.probing.probe import Overwriting
from wsync.probing.verify import Values, sum_of

_NUMBER: Final = re.compile(r"\d+")


def group_of(source: Source) -> str:
    """The same for all tensors that are called alike but for numbers, and for what belongs to one
    quantised weight."""
    dtype = str(source.dtype).removeprefix("torch.")
    return _NUMBER.sub("#", weight_of(source.name, dtype) or source.name)


def sources_of(
    loads: Overwriting,
    computed: Sequence[PlacedBox],
    sources: Sequence[Source],
    values: Values,
    others: Values,
) -> dict[str, PlacedBox]:
    """Tensors that change what lies in computed places, by groups, and a place that each changes.

    values, others: two sets of values.
    """
    groups: dict[str, list[Source]] = {}
    for source in sources:
        groups.setdefault(group_of(source), []).append(source)
    loads.load(Made(sources, values))
    found: dict[str, PlacedBox] = {}
    for group in groups.values():
        before = [sum_of(piece, loads) for piece in computed]
        loads.load(Made(group, others))
        after = [sum_of(piece, loads) for piece in computed]
        changed = [p for p, one, other in zip(computed, before, after, strict=True) if one != other]
        if changed:
            found |= dict.fromkeys((source.name for source in group), changed[0])
    return found
