"""Learns where a load puts tensors: numbers say it, random values prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.probing.computed import NotLearntError, computed
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import (
    CONSTANT,
    UNWRITTEN,
    LocalCopy,
    PlacedBox,
    as_computed,
    kept_as,
    once,
)
from wsync.probing.probe import Load, Overwriting, probe
from wsync.probing.verify import Proof, Values

__all__ = ["LearntLoad", "NotLearntError", "learn"]


@dataclass(frozen=True, slots=True)
class LearntLoad:
    """What a load does.

    pieces: where each element of a tensor is copied to; copies: from there to further places.
    constants: what lies there whatever is loaded.  computed: tensors that the load itself has to be
    given, after all copies, and a place that it makes of each.  unwritten: where it writes nothing.
    """

    pieces: list[PlacedBox]
    copies: list[LocalCopy]
    constants: dict[PlacedBox, torch.Tensor]
    computed: dict[str, PlacedBox]
    unwritten: list[PlacedBox]

    @property
    def written(self) -> list[PlacedBox]:
        """All places but those that are computed."""
        return [*self.pieces, *self.constants, *(copy.target for copy in self.copies)]

    @property
    def used(self) -> set[str]:
        """The tensors that it copies from, or computes with."""
        return {piece.name for piece in self.pieces} | self.computed.keys()


def learn(
    load: Load,
    targets: Sequence[torch.Tensor],
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    values: tuple[Values, Values],
) -> LearntLoad:
    """What a load does with tensors.  In the end places hold what it has put there, or, where it
    writes nothing, what they held before.

    targets: all that it may write to; they share no elements.  given: tensors whose values it looks
    at, such as shapes.  values: two sets of random ones, which have the given ones, too; those of
    the second one are of a size that can be computed with.

    Raises:
        NotLearntError: what it computes cannot be told from some of the tensors.
        RaisedError: the load has failed.
    """
    loads = Overwriting(load, targets)
    try:
        pieces = probe(loads, sources, given)
        constants = {p: _constant(p.view(targets)) for p in pieces if p.why == CONSTANT}
        proof = Proof(loads, sources, constants)
        for each in values:
            pieces = proof.refute(pieces, each)
        pieces = _castable(pieces, targets, sources)
        aside = computed(proof, pieces, values[1], values[0])
    except BaseException:
        loads.put_back()
        raise
    unwritten = [piece for piece in pieces if piece.why == UNWRITTEN]
    loads.put_back(piece.view(targets) for piece in unwritten)
    copied = [piece for piece in pieces if piece.name and piece.name not in aside]
    constants = {piece: constants[piece] for piece in pieces if piece.why == CONSTANT}
    return LearntLoad(*once(copied, targets), constants, aside, unwritten)


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
