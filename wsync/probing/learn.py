"""Learns where a load puts tensors: numbers say it, and random values prove it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from wsync.module_tensors import checksum_of, name_of
from wsync.module_tensors.names import key_of, weight_of
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import (
    COMPUTED,
    CONSTANT,
    UNWRITTEN,
    LocalCopy,
    PlacedBox,
    as_kept,
    by_name,
    kept_as,
    once,
)
from wsync.probing.probe import Load, Overwriting, RaisedError, probe

# Returns random values of a tensor, the same ones at each call.
Values = Callable[[Source], torch.Tensor]


class NotLearntError(Exception):
    """Copies cannot replace a load.  pieces: what it does all the same, if that is known."""

    def __init__(self, text: str, pieces: Sequence[PlacedBox] = ()) -> None:
        self.pieces = pieces
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class LearntLoad:
    """What a load does.

    pieces: where it copies the elements of tensors to; copies: from there to further places.
    constants: the values of places that are the same whatever is loaded.  computed: the tensors
    that the load itself has to be given, after all copies, and for each a place that it computes.
    unwritten: places that it does not write to.
    """

    pieces: list[PlacedBox]
    copies: list[LocalCopy]
    constants: dict[PlacedBox, torch.Tensor]
    computed: dict[str, PlacedBox]
    unwritten: list[PlacedBox]

    @property
    def written(self) -> list[PlacedBox]:
        """All places that it writes to, without the computed ones."""
        return [*self.pieces, *self.constants, *(copy.target for copy in self.copies)]

    @property
    def used(self) -> set[str]:
        """The names of tensors that it copies or computes with."""
        return {piece.name for piece in self.pieces} | self.computed.keys()


def learn(
    load: Load,
    targets: Sequence[torch.Tensor],
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    values: tuple[Values, Values],
) -> LearntLoad:
    """Returns what a load does with tensors.  Afterwards the targets hold values that the load has
    written; places that it does not write to hold what they held before.

    targets: all tensors that it may write to; they share no elements.  given: tensors whose values
    it looks at, such as shapes.  values: two sets of random values, in both of which the given
    tensors are as they are.  The second set's are near 1, so that they can be computed with.

    Raises:
        NotLearntError: it computes something from an unknown set of tensors.
        RaisedError: the load has failed.
    """
    loads = Overwriting(load, targets)
    try:
        pieces = probe(loads, sources, given)
        constants = {p: _constant(p.view(targets)) for p in pieces if p.why == CONSTANT}
        proof = _Proof(loads, sources, constants)
        for each in values:
            pieces = proof.refute(pieces, each)
        pieces = _castable(pieces, targets, sources)
        computed = proof.computed(pieces, *reversed(values))
    except BaseException:
        loads.put_back()
        raise
    unwritten = [piece for piece in pieces if piece.why == UNWRITTEN]
    loads.put_back(piece.view(targets) for piece in unwritten)
    copied = [piece for piece in pieces if piece.name and piece.name not in computed]
    constants = {piece: constants[piece] for piece in pieces if piece.why == CONSTANT}
    return LearntLoad(*once(copied, targets), constants, computed, unwritten)


def _constant(place: torch.Tensor) -> torch.Tensor:
    """A copy of a place, or of one element if all have equal bits."""
    flat = place.reshape(-1)
    same = bool((raw(flat) == raw(flat)[:1]).all())
    return flat[:1].clone() if same else place.clone()


def _castable(
    pieces: Sequence[PlacedBox], targets: Sequence[torch.Tensor], sources: Sequence[Source]
) -> list[PlacedBox]:
    """Marks as computed what is made of a tensor that no single dtype can be delivered in."""
    dtypes = {source.name: source.dtype for source in sources}
    uncopied = set[PlacedBox]()
    for name, mine in by_name(piece for piece in pieces if piece.name).items():
        first, _ = once(mine, targets)
        kept = {kept_as(dtypes[name], targets[piece.target].dtype) for piece in first}
        if None in kept or len(kept) > 1:
            uncopied.update(mine)
    return _as_computed(pieces, uncopied)


def _as_computed(pieces: Sequence[PlacedBox], those: Collection[PlacedBox]) -> list[PlacedBox]:
    return [replace(p, name="", why=COMPUTED) if p in those else p for p in pieces]


@dataclass(frozen=True, slots=True)
class _Proof:
    """Loads random values, and compares them with what is in the targets afterwards."""

    loads: Overwriting
    sources: Sequence[Source]
    constants: Mapping[PlacedBox, torch.Tensor]

    def _load(self, values: Values, names: Collection[str] | None = None) -> None:
        """names: of the tensors that are loaded; None: all."""
        sources = [each for each in self.sources if names is None or each.name in names]
        self.loads.load(sources, values)

    def _sums(self, places: Sequence[PlacedBox]) -> list[int]:
        return [checksum_of(place.view(self.loads.targets)) for place in places]

    def _wrong(self, pieces: Sequence[PlacedBox], values: Values) -> set[PlacedBox]:
        """Constants and copies of these values that are not in their places."""
        known = {source.name: source for source in self.sources}
        found = set()
        for piece in pieces:
            place = piece.view(self.loads.targets)
            if piece.why == CONSTANT:
                wanted = self.constants[piece]
            elif piece.name:
                wanted = as_kept(piece.of(values(known[piece.name])), place.dtype)
            else:
                continue
            if not torch.equal(raw(place), raw(wanted.to(place.device).expand(place.shape))):
                found.add(piece)
        return found

    def refute(self, pieces: Sequence[PlacedBox], values: Values) -> list[PlacedBox]:
        """Loads values, and marks as computed what they refute."""
        self.loads.invert()
        unwritten = [piece for piece in pieces if piece.why == UNWRITTEN]
        before = self._sums(unwritten)
        self._load(values)
        sums = zip(unwritten, before, self._sums(unwritten), strict=True)
        wrong = self._wrong(pieces, values) | {p for p, one, other in sums if one != other}
        return _as_computed(pieces, wrong)

    def computed(
        self, pieces: Sequence[PlacedBox], values: Values, others: Values
    ) -> dict[str, PlacedBox]:
        """The tensors that computed places are made of, and for each one of these places.

        NotLearntError if a load of only these tensors computes something else, or changes copies.
        """
        places = [piece for piece in pieces if piece.why == COMPUTED]
        if not places:
            return {}
        try:
            found = self._sources_of(places, values, others)
            self._load(values)
            whole = self._sums(places)
            for place in places:
                raw(place.view(self.loads.targets)).bitwise_not_()
            self._load(values, found)
        except RaisedError as error:
            raise NotLearntError(f"given only what it computes with, {error}", pieces) from error
        if self._sums(places) != whole:
            raise NotLearntError(
                "what it computes depends on more than the tensors that change it", pieces
            )
        if self._wrong([piece for piece in pieces if piece.name not in found], values):
            raise NotLearntError(
                "given only what it computes with, it also writes elsewhere", pieces
            )
        return found

    def _sources_of(
        self, places: Sequence[PlacedBox], values: Values, others: Values
    ) -> dict[str, PlacedBox]:
        """Tensors that change what is in places, by groups, and for each a place that changes."""
        groups: dict[str, list[str]] = {}
        for source in self.sources:
            groups.setdefault(_group_of(source), []).append(source.name)
        self._load(values)
        before = self._sums(places)
        found: dict[str, PlacedBox] = {}
        for names in groups.values():
            self._load(others, set(names))
            after = self._sums(places)
            sums = zip(places, before, after, strict=True)
            if changed := [place for place, one, other in sums if one != other]:
                found |= dict.fromkeys(names, changed[0])
            before = after
        return found


def _group_of(source: Source) -> str:
    """The same for tensors whose names differ in numbers only, or that make up one quantised
    weight."""
    weight = weight_of(source.name, name_of(source.dtype))
    return key_of(weight or source.name)
