"""Proves on random values what numbers have said of a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.module_tensors import checksum_of
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import COMPUTED, CONSTANT, UNWRITTEN, PlacedBox, as_computed, as_kept
from wsync.probing.probe import Overwriting

# One of a model's tensors, with random values; the same each time that it is asked for.
Values = Callable[[Source], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Proof:
    """Loads of random values, and what has to lie in a place afterwards.

    constants: what lies there whatever is loaded.
    """

    loads: Overwriting
    sources: Sequence[Source]
    constants: Mapping[PlacedBox, torch.Tensor]

    def load(self, values: Values, names: Collection[str] | None = None) -> None:
        """names: of the tensors that are brought; None: all."""
        sources = [each for each in self.sources if names is None or each.name in names]
        self.loads.load(sources, values)

    def sums(self, pieces: Sequence[PlacedBox]) -> list[int]:
        """Checksums of what lies in places."""
        return [checksum_of(piece.view(self.loads.targets)) for piece in pieces]

    def holds(self, pieces: Sequence[PlacedBox], values: Values) -> list[bool]:
        """Whether copies of these values, and constants, lie in places."""
        known = {source.name: source for source in self.sources}
        found = []
        for piece in pieces:
            place = piece.view(self.loads.targets)
            if piece.why == CONSTANT:
                wanted = self.constants[piece]
            else:
                wanted = as_kept(piece.of(values(known[piece.name])), place.dtype)
            found.append(torch.equal(raw(place), raw(wanted.to(place.device).expand(place.shape))))
        return found

    def refute(self, pieces: Sequence[PlacedBox], values: Values) -> list[PlacedBox]:
        """The pieces, with those marked as computed that a load refutes."""
        self.loads.invert()
        unwritten = [piece for piece in pieces if piece.why == UNWRITTEN]
        before = self.sums(unwritten)
        self.load(values)
        sums = zip(unwritten, before, self.sums(unwritten), strict=True)
        wrong = {piece for piece, one, other in sums if one != other}
        known = [piece for piece in pieces if piece.why not in (UNWRITTEN, COMPUTED)]
        held = zip(known, self.holds(known, values), strict=True)
        wrong.update(piece for piece, right in held if not right)
        return [as_computed(piece) if piece in wrong else piece for piece in pieces]
