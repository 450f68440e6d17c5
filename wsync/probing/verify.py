"""Proves on random values what numbers have said of a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from wsync.module_tensors import checksum_of
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import COMPUTED, CONSTANT, UNWRITTEN, PlacedBox
from wsync.probing.probe import Overwriting

# One of a model's tensors, with random values; the same each time that it is asked for.
Values = Callable[[Source], torch.Tensor]


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
    known = {source.name: source for source in sources}
    loads.load([(source.name, values(source)) for source in sources])

    def holds(piece: PlacedBox) -> bool:
        if piece.why in (UNWRITTEN, COMPUTED):
            return piece.why == COMPUTED or sum_of(piece, loads) == before[piece]
        found = piece.view(loads.targets)
        if piece.why == CONSTANT:
            wanted = constants[piece]
        else:
            name = piece.twin if twins and piece.twin else piece.name
            wanted = piece.of(values(known[name])).to(found.device, found.dtype)
        return torch.equal(raw(found), raw(wanted))

    return [
        piece if holds(piece) else replace(piece, name="", twin="", why=COMPUTED)
        for piece in pieces
    ]


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
    loads.load([(source.name, values(source)) for source in sources])
    wanted = [sum_of(piece, loads) for piece in computed]
    for piece in computed:
        raw(piece.view(loads.targets)).bitwise_not_()
    loads.load([(s.name, values(s)) for s in sources if s.name in names])
    return wanted == [sum_of(piece, loads) for piece in computed]
