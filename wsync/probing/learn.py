"""Learns where a load puts tensors: numbers say it, random values prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.probing.computed import sources_of
from wsync.probing.numbering import Source, backwards
from wsync.probing.pieces import COMPUTED, CONSTANT, LocalCopy, PlacedBox, once
from wsync.probing.probe import Load, Overwriting, probe
from wsync.probing.verify import Values, is_made_of, verify


class NotLearntError(Exception):
    """Why a load cannot be replaced by copies."""


@dataclass(frozen=True, slots=True)
class LearntLoad:
    """What a load does.

    pieces: where each element of a tensor is copied to; copies: from there to further places.
    constants: what lies there whatever is loaded, before anything else is.  computed: tensors that
    the load itself has to be given, and a place that it makes of each; so have those that it was
    given as they are.  others: places of no element: unwritten or computed.
    """

    pieces: list[PlacedBox]
    copies: list[LocalCopy]
    constants: dict[PlacedBox, torch.Tensor]
    computed: dict[str, PlacedBox]
    others: list[PlacedBox]


def learn(
    load: Load,
    targets: Sequence[torch.Tensor],
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    values: tuple[Values, Values],
) -> LearntLoad:
    """What a load does with tensors.  What it does not write to targets is put back.

    targets: all that it may write to; they share no elements.  given: tensors whose values it looks
    at, such as shapes.  values: two sets of random ones.

    Raises:
        NotLearntError: what it computes cannot be told from some of the tensors.
    """
    loads = Overwriting(load, targets)
    first, second = (_but_for(given, each) for each in values)
    try:
        pieces = probe(loads, sources, given)
        constants = {p: p.view(targets).clone() for p in pieces if p.why == CONSTANT}
        pieces = verify(loads, pieces, constants, sources, first)
        other = backwards(sources, given)
        pieces = verify(loads, pieces, constants, other, second, twins=True)
        computed = _computed(loads, pieces, sources, first, second)
    finally:
        loads.put_back()
    copied = [piece for piece in pieces if piece.name and piece.name not in computed]
    kept = {p: value for p, value in constants.items() if p in pieces}
    return LearntLoad(
        *once(copied, targets), kept, computed, [p for p in pieces if p.why and p not in kept]
    )


def _but_for(given: Mapping[str, torch.Tensor], values: Values) -> Values:
    return lambda source: given[source.name] if source.name in given else values(source)


def _computed(
    loads: Overwriting,
    pieces: Sequence[PlacedBox],
    sources: Sequence[Source],
    values: Values,
    others: Values,
) -> dict[str, PlacedBox]:
    places = [piece for piece in pieces if piece.why == COMPUTED]
    if not places:
        return {}
    found = sources_of(loads, places, sources, values, others)
    if not is_made_of(loads, places, found, sources, values):
        raise NotLearntError("what it computes depends on more than the tensors that change it")
    return found
