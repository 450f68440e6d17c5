"""Proves on random values what numbers have said of a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from wsync.module_tensors import checksum_of
from wsync.probing.lines import raw
from wsync.probing.numbering import Made, Source
from wsync.probing.pieces import (
    COMPUTED,
    CONSTANT,
    UNWRITTEN,
    PlacedBox,
    as_computed,
    as_kept,
)
from wsync.probing.probe import Overwriting

# One of a model's tensors, with random values; the same each time that it is asked for.
Values = Callable[[Source], torch.Tensor]


class Expected:
    """What places hold when tensors have been loaded."""

    def __init__(
        self,
        loads: Overwriting,
        constants: Mapping[PlacedBox, torch.Tensor],
        sources: Sequence[Source],
        values: Values,
    ) -> None:
        self._loads, self._constants, self._values = loads, constants, values
        self._known = {source.name: source for source in sources}

    def at(self, piece: PlacedBox, *, twins: bool = False) -> bool:
        """Whether a copy or a constant lies in a place.  twins: of two sources that go there it is
        the other one."""
        found = piece.view(self._loads.targets)
        if piece.why == CONSTANT:
            wanted = self._constants[piece]
        else:
            name = piece.twin if twins and piece.twin else piece.name
            wanted = as_kept(piece.of(self._values(self._known[name])), found.dtype)
        return torch.equal(raw(found), raw(wanted.to(found.device).expand(found.shape)))


def verify(
    loads: Overwriting,
    pieces: Sequence[PlacedBox],
    constants: Mapping[PlacedBox, torch.Tensor],
    sources: Sequence[Source],
    values: Values,
    *,
    twins: bool = False,
) -> list[PlacedBox]:
    """The pieces, with those marked as computed that a load of random values refutes.

    twins: sources come in the reverse order, in which twins are loaded over what is known.
    """
    loads.invert()
    before = {piece: sum_of(piece, loads) for piece in pieces if piece.why == UNWRITTEN}
    expected = Expected(loads, constants, sources, values)
    loads.load(Made(sources, values))

    def holds(piece: PlacedBox) -> bool:
        if piece.why in (UNWRITTEN, COMPUTED):
            return piece.why == COMPUTED or sum_of(piece, loads) == before[piece]
        return expected.at(piece, twins=twins)

    return [piece if holds(piece) else as_computed(piece) for piece in pieces]


def sum_of(piece: PlacedBox, loads: Overwriting) -> int:
    return checksum_of(piece.view(loads.targets))


def is_made_of(
    loads: Overwriting,
    computed: Collection[PlacedBox],
    names: Collection[str],
    sources: Sequence[Source],
    values: Values,
) -> bool:
    """Whether a load of these tensors leaves in the places what a load of all leaves there.  The
    load of all has been the last one, of other values."""
    loads.load(Made(sources, values))
    wanted = [sum_of(piece, loads) for piece in computed]
    for piece in computed:
        raw(piece.view(loads.targets)).bitwise_not_()
    loads.load(Made([source for source in sources if source.name in names], values))
    return wanted == [sum_of(piece, loads) for piece in computed]
