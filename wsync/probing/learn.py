"""Learns what a load does: numbers show where it puts tensors, and random values prove it."""

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

# returns random values for a source, the same ones at each call
Values = Callable[[Source], torch.Tensor]


class NotLearntError(Exception):
    """Copies cannot replace a load.  pieces: what the load does, as far as that is known."""

    def __init__(self, text: str, pieces: Sequence[PlacedBox] = ()) -> None:
        self.pieces = pieces
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class LearntLoad:
    """What a load does.

    pieces: the copies from sources; they copy every element at most once.  copies: copies from the
    places of these pieces to other places.  constants: places that get the same values whatever is
    loaded, with these values.  computed: the sources that the load computes with, each with one
    place that it computes.  An update calls the load with these sources after all copies.
    unwritten: places that the load does not write to.
    """

    pieces: list[PlacedBox]
    copies: list[LocalCopy]
    constants: dict[PlacedBox, torch.Tensor]
    computed: dict[str, PlacedBox]
    unwritten: list[PlacedBox]

    @property
    def written(self) -> list[PlacedBox]:
        """All places that the load writes to, except the computed ones."""
        return [*self.pieces, *self.constants, *(copy.target for copy in self.copies)]

    @property
    def used(self) -> set[str]:
        """The names of the sources that the load copies or computes with."""
        return {piece.name for piece in self.pieces} | self.computed.keys()


def learn(
    load: Load,
    targets: Sequence[torch.Tensor],
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    values: tuple[Values, Values],
) -> LearntLoad:
    """Returns what a load does.  Afterwards the targets hold values that the load has written.
    Places that the load does not write to hold their former values.

    targets: all tensors that the load may write to; they share no elements.  sources: all tensors
    to load.  given: sources whose values matter, such as shapes.  values: two functions
    that return values for a source.  Both functions return the given sources unchanged.  For all
    other sources, they return random values.  The values of the second function are near 1, so that
    a load can compute with them.

    Raises:
        NotLearntError: if the load is given only the sources that it computes with, it does
            something else.
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
    """Returns a copy of a place, or of its first element if all elements have the same bits."""
    flat = place.reshape(-1)
    same = bool((raw(flat) == raw(flat)[:1]).all())
    return flat[:1].clone() if same else place.clone()


def _castable(
    pieces: Sequence[PlacedBox], targets: Sequence[torch.Tensor], sources: Sequence[Source]
) -> list[PlacedBox]:
    """Marks all pieces of a source as computed if there is no single dtype in which copies can
    deliver it."""
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
    """Loads random values, and compares what is then in the targets with what was learnt."""

    loads: Overwriting
    sources: Sequence[Source]
    constants: Mapping[PlacedBox, torch.Tensor]

    def _load(self, values: Values, names: Collection[str] | None = None) -> None:
        """Calls the load.  names: the names of the sources to load; None: all of them."""
        sources = [each for each in self.sources if names is None or each.name in names]
        self.loads.load(sources, values)

    def _sums(self, places: Sequence[PlacedBox]) -> list[int]:
        return [checksum_of(place.view(self.loads.targets)) for place in places]

    def _wrong(self, pieces: Sequence[PlacedBox], values: Values) -> set[PlacedBox]:
        """Returns the constants and copies whose places do not hold what they should hold."""
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
        """Loads values, and marks the pieces that they refute as computed."""
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
        """Returns the sources that the load computes with, each with one place that it computes.

        Raises:
            NotLearntError: a load of only these sources computes other values, or writes to other
                places.
        """
        places = [piece for piece in pieces if piece.why == COMPUTED]
        if not places:
            return {}
        only = "when it is given only the tensors that it computes with"
        try:
            found = self._sources_of(places, values, others)
            self._load(values)
            whole = self._sums(places)
            for place in places:
                raw(place.view(self.loads.targets)).bitwise_not_()
            self._load(values, found)
        except RaisedError as error:
            raise NotLearntError(f"load_weights fails {only}: {error}", pieces) from error
        if self._sums(places) != whole:
            raise NotLearntError(f"load_weights computes other values {only}", pieces)
        if self._wrong([piece for piece in pieces if piece.name not in found], values):
            raise NotLearntError(f"load_weights writes to other places, too, {only}", pieces)
        return found

    def _sources_of(
        self, places: Sequence[PlacedBox], values: Values, others: Values
    ) -> dict[str, PlacedBox]:
        """Returns the sources that change computed places, each with one place that it changes.
        All sources of a group are changed together."""
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
    """Returns the group of a source.  Sources are in one group if their names differ only in
    numbers, or if they are the codes and scales of one weight."""
    weight = weight_of(source.name, name_of(source.dtype))
    return key_of(weight or source.name)
