"""Learns where a load puts tensors: numbers say it, random values prove it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.probing.computed import sources_of
from wsync.probing.lines import raw
from wsync.probing.numbering import Source, backwards
from wsync.probing.pieces import (
    COMPUTED,
    CONSTANT,
    LocalCopy,
    PlacedBox,
    as_computed,
    kept_as,
    once,
)
from wsync.probing.probe import Load, Overwriting, RaisedError, probe
from wsync.probing.verify import Expected, Values, is_made_of, verify


class NotLearntError(Exception):
    """Why a load cannot be replaced by copies.  pieces: what it does all the same, if known."""

    def __init__(self, text: str, pieces: Sequence[PlacedBox] = ()) -> None:
        self.pieces = pieces
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class LearntLoad:
    """What a load does.

    pieces: where each element of a tensor is copied to; copies: from there to further places.
    constants: what lies there whatever is loaded.  computed: tensors that the load itself has to be
    given, after all copies, and a place that it makes of each.  others: places of no element:
    unwritten or computed.
    """

    pieces: list[PlacedBox]
    copies: list[LocalCopy]
    constants: dict[PlacedBox, torch.Tensor]
    computed: dict[str, PlacedBox]
    others: list[PlacedBox]

    @property
    def written(self) -> list[PlacedBox]:
        """All places but those that are computed."""
        return [*self.pieces, *self.constants, *(copy.target for copy in self.copies)]


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
        RaisedError: the load has failed.
    """
    loads = Overwriting(load, targets)
    first, second = (_but_for(given, each) for each in values)
    try:
        pieces = probe(loads, sources, given)
        constants = {p: _constant(p.view(targets)) for p in pieces if p.why == CONSTANT}
        pieces = verify(loads, pieces, constants, sources, first)
        other = backwards(sources, given)
        pieces = verify(loads, pieces, constants, other, second, twins=True)
        pieces = _castable(pieces, targets, sources)
        constants = {piece: value for piece, value in constants.items() if piece in pieces}
        computed = _computed(loads, pieces, constants, sources, first, second)
    finally:
        loads.put_back()
    copied = [piece for piece in pieces if piece.name and piece.name not in computed]
    others = [piece for piece in pieces if piece.why and piece not in constants]
    return LearntLoad(*once(copied, targets), constants, computed, others)


def _but_for(given: Mapping[str, torch.Tensor], values: Values) -> Values:
    return lambda source: given[source.name] if source.name in given else values(source)


def _constant(place: torch.Tensor) -> torch.Tensor:
    """A copy; one element, if all are equal to the bit."""
    flat = place.reshape(-1)
    same = bool((raw(flat) == raw(flat)[:1]).all())
    return flat[:1].clone() if same else place.clone()


def _castable(
    pieces: Sequence[PlacedBox], targets: Sequence[torch.Tensor], sources: Sequence[Source]
) -> list[PlacedBox]:
    """With those marked as computed that copies cannot bring: by their dtypes, or because a tensor
    is delivered in one dtype, and others of its elements are kept in another."""
    dtypes = {source.name: source.dtype for source in sources}

    def kept(piece: PlacedBox) -> torch.dtype | None:
        return kept_as(dtypes[piece.name], targets[piece.target].dtype)

    named: dict[str, list[PlacedBox]] = {}
    for piece in pieces:
        if piece.name:
            named.setdefault(piece.name, []).append(piece)
    uncopied: set[PlacedBox] = set()
    for mine in named.values():
        uncopied.update(piece for piece in mine if kept(piece) is None)
        left = [piece for piece in mine if piece not in uncopied]
        if len({*map(kept, left)}) > 1 and len({*map(kept, once(left, targets)[0])}) > 1:
            uncopied.update(mine)
    return [as_computed(piece) if piece in uncopied else piece for piece in pieces]


def _computed(
    loads: Overwriting,
    pieces: Sequence[PlacedBox],
    constants: Mapping[PlacedBox, torch.Tensor],
    sources: Sequence[Source],
    values: Values,
    others: Values,
) -> dict[str, PlacedBox]:
    """The tensors that computed places are made of.  NotLearntError where a load of these alone
    makes something else of them, or writes to other places."""
    places = [piece for piece in pieces if piece.why == COMPUTED]
    if not places:
        return {}
    try:
        found = sources_of(loads, places, sources, values, others)
        made = is_made_of(loads, places, found, sources, values)
    except RaisedError as error:
        raise NotLearntError(f"given only what it computes with, {error}", pieces) from error
    if not made:
        raise NotLearntError(
            "what it computes depends on more than the tensors that change it", pieces
        )
    expected = Expected(loads, constants, sources, values)
    copied = (piece for piece in pieces if piece.name and piece.name not in found)
    if not all(map(expected.at, itertools.chain(copied, constants))):
        raise NotLearntError("given only what it computes with, it also writes elsewhere", pieces)
    return found
