"""Finds the tensors that computed places are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from wsync.module_tensors import name_of
from wsync.module_tensors.names import weight_of
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import COMPUTED, CONSTANT, PlacedBox
from wsync.probing.probe import RaisedError
from wsync.probing.verify import Proof, Values

_NUMBER: Final = re.compile(r"\d+")


class NotLearntError(Exception):
    """Why a load cannot be replaced by copies.  pieces: what it does all the same, if known."""

    def __init__(self, text: str, pieces: Sequence[PlacedBox] = ()) -> None:
        self.pieces = pieces
        super().__init__(text)


def computed(
    proof: Proof, pieces: Sequence[PlacedBox], values: Values, others: Values
) -> dict[str, PlacedBox]:
    """The tensors that computed places are made of, and a place of each.

    NotLearntError where a load of these alone makes something else of them, or writes elsewhere.
    """
    places = [piece for piece in pieces if piece.why == COMPUTED]
    if not places:
        return {}
    try:
        found = _sources_of(proof, places, values, others)
        proof.load(values)
        wanted = proof.sums(places)
        for place in places:
            raw(place.view(proof.loads.targets)).bitwise_not_()
        proof.load(values, found)
        made = proof.sums(places)
    except RaisedError as error:
        raise NotLearntError(f"given only what it computes with, {error}", pieces) from error
    if made != wanted:
        raise NotLearntError(
            "what it computes depends on more than the tensors that change it", pieces
        )
    known = [p for p in pieces if p.why == CONSTANT or (p.name and p.name not in found)]
    if not all(proof.holds(known, values)):
        raise NotLearntError("given only what it computes with, it also writes elsewhere", pieces)
    return found


def _sources_of(
    proof: Proof, places: Sequence[PlacedBox], values: Values, others: Values
) -> dict[str, PlacedBox]:
    """Tensors that change what lies in places, by groups, and a place that each changes."""
    groups: dict[str, list[str]] = {}
    for source in proof.sources:
        groups.setdefault(_group_of(source), []).append(source.name)
    proof.load(values)
    before = proof.sums(places)
    found: dict[str, PlacedBox] = {}
    for names in groups.values():
        proof.load(others, set(names))
        after = proof.sums(places)
        changed = [p for p, one, other in zip(places, before, after, strict=True) if one != other]
        if changed:
            found |= dict.fromkeys(names, changed[0])
        before = after
    return found


def _group_of(source: Source) -> str:
    """The same for all tensors that are called alike but for numbers, and for what belongs to one
    quantised weight."""
    weight = weight_of(source.name, name_of(source.dtype))
    return _NUMBER.sub("#", weight or source.name)
