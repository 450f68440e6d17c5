"""What a loader was seen to do: boxes of the model's tensors that lie in the module's, constants,
copies of one held tensor to another, and tensors that only the loader itself can load, with the
reason.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from wsync._core import LayoutError, NoMemoryError
from wsync.engine.learn.addresses_in_module import noted_addresses
from wsync.engine.learn.attributes_read import Attribute, AttributeGuards
from wsync.engine.learn.attributes_set import LeftValues
from wsync.engine.learn.module_memory import (
    Area,
    AreaNames,
    Fact,
    ModuleMemory,
    Name,
    region,
    view,
)
from wsync.engine.learn.regions import Box, Move
from wsync.engine.learn.tracer import Outside
from wsync.engine.learn.watched_writes import Part
from wsync.module_tensors import dtype_of


class RecordingError(Exception):
    """Why a loader cannot be replaced by what it was seen to do."""


class ClashError(LayoutError):
    """Two tensors of the model are loaded to one place, and cannot be compared there."""


# why a recording or a rehearsal of load_weights came to nothing
NOT_RECORDED: Final = (RecordingError, LayoutError, NoMemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class KnownState:
    """Attributes with which a load leaves the weights that a replay leaves.

    before: those that load_weights goes by, as they are when it begins; after: as they are when it
    has ended.  left: what it leaves them and others.
    """

    before: AttributeGuards = field(default_factory=AttributeGuards)
    after: AttributeGuards = field(default_factory=AttributeGuards)
    left: LeftValues = field(default_factory=lambda: LeftValues((), {}))


@dataclass(frozen=True, slots=True)
class RecordedPiece:
    """A box of a model's tensor in a held area; box.address counts from the area's start."""

    area: int
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy inside the module, or from constants: done after all pieces, in order.

    Addresses count from the areas' starts; source_area -1 stands for `keep`.
    """

    area: int
    source_area: int
    move: Move
    dtypes: tuple[torch.dtype, ...]
    keep: torch.Tensor | None = None

    def run(self, areas: Sequence[Area]) -> None:
        move, first, last = self.move, self.dtypes[0], self.dtypes[-1]
        shape = [n for n, _, _ in move.dims]
        target = areas[self.area].view(
            last, move.destination, shape, [d // move.into for _, _, d in move.dims]
        )
        strides = [s // move.item for _, s, _ in move.dims]
        if self.keep is None:
            source = areas[self.source_area].view(first, move.source, shape, strides)
        else:
            source = view(self.keep.untyped_storage(), first, move.source, shape, strides)
        for dtype in self.dtypes[1:-1]:
            source = source.to(dtype)
        target.copy_(source)


@dataclass(frozen=True, slots=True)
class Twin:
    """Bytes that two tensors of the model are loaded to, of which one is there in the end: the
    other has to bring the same.

    area, move: what `other` is written to, counted from the area's start.  The bytes that `name`
    brings are delivered to memory of their own, of `nbytes`: a further area, the first of which
    follows the module's.  Its start is the lowest byte that the move writes.
    """

    name: str
    other: str
    area: int
    move: Move
    nbytes: int

    def differs(self, areas: Sequence[Area], shadow: Area) -> bool:
        low, _ = self.move.span()
        mine = region(shadow.bytes(), replace(self.move, destination=self.move.destination - low))
        return not torch.equal(mine, region(areas[self.area].bytes(), self.move))


@dataclass(slots=True)
class Recording:
    """What a loader does.

    pieces: by tensor; kept: the dtype it is kept in.  fills, copies: in order, after the pieces.
    fallback: tensors that the loader itself has to load, and why.  skipped: tensors that it made
    no use of.  unwritten: (held tensor, bytes) that are not written; gaps: where, by area, counted
    from its start; lacking: bytes of parameters among them.  made: in the same manner, what comes
    of computing, perhaps with what was there before.  facts: what the module held.
    looked: checksums of the gaps of areas whose values the loader looked at: it may do something
    else when they are others.  twins: tensors that others are written over; shadow_copies: like
    copies, into the memory of twins.  rivals: two fallbacks of which the loader writes one over the
    other, which have to be equal, and where.  outside: what it read that is neither the module's
    nor the model's, and checksums of that.  What `guard` sets: states: what the attributes that it
    read may be, the first of them as they were when it had been recorded; names: all of the module;
    noted: areas of which something notes where they start.  aside: what the loader writes to when
    it loads fallbacks alone, from `verify` on.  refuted: what else it wrote to in an
    update, or did with other attributes.
    """

    facts: list[Fact]
    pieces: dict[str, list[RecordedPiece]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    fills: list[Transfer] = field(default_factory=list)
    copies: list[Transfer] = field(default_factory=list)
    fallback: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unwritten: list[tuple[str, int]] = field(default_factory=list)
    lacking: dict[str, int] = field(default_factory=dict)
    gaps: dict[int, list[Move]] = field(default_factory=dict)
    areas: list[int] = field(default_factory=list)  # with pieces, fills or copies
    computed: list[int] = field(default_factory=list)  # areas that only fallbacks write
    made: dict[int, list[Move]] = field(default_factory=dict)
    looked: dict[int, list[int]] = field(default_factory=dict)
    twins: list[Twin] = field(default_factory=list)
    rivals: dict[tuple[str, str], str] = field(default_factory=dict)
    shadow_copies: list[Transfer] = field(default_factory=list)
    outside: list[tuple[Outside, int]] = field(default_factory=list)
    states: list[KnownState] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    noted: dict[int, int] = field(default_factory=dict)
    aside: set[Part] = field(default_factory=set)
    refuted: str = ""

    def guard(self, attributes: Sequence[Attribute], left: LeftValues, held: ModuleMemory) -> None:
        """From here on, what the loader went by is to stay as it is, if it is still there.

        attributes: those that it read, as they were before its last load; those that this load has
        changed are not watched.  left: what each load leaves.  held: what the module has now.

        Raises:
            RecordingError: a load changes it.
        """
        gc.collect()
        self.names, self.noted = held.names, noted_addresses(held)
        same = [each for each in attributes if not each.difference(held.parts)]
        found = [(outside, outside.sum(), sum) for outside, sum in self.outside]
        if any(now is not None and now != sum for _, now, sum in found):
            raise RecordingError("it goes by values outside the module, which it changes")
        self.outside = [(outside, sum) for outside, now, sum in found if now is not None]
        starts = {outside.start() for outside, _ in self.outside}
        guards = AttributeGuards(same, held.parts, starts).renewed(held.parts)
        self.states = [KnownState(guards, guards, left)]

    def stale(self, held: ModuleMemory) -> str:
        """Which values but those of attributes that the loader goes by are others now; "" where
        none are."""
        if any(outside.sum() != sum for outside, sum in self.outside):
            return "values outside the module, which load_weights goes by, are others or are gone"
        for area, start in self.noted.items():
            if held.areas[area].start != start:
                return f"{held.areas[area].path} has moved, and the module notes where it was"
        for area, sums in self.looked.items():
            if held.areas[area].sums(self.gaps[area]) != sums:
                return f"{held.areas[area].path}, which load_weights goes by, has other values"
        return ""

    def same(self, other: Recording) -> str:
        """How another recording differs; "" where it does not."""
        for what in (
            "pieces",
            "kept",
            "fallback",
            "skipped",
            "unwritten",
            "looked",
            "twins",
            "rivals",
        ):
            if getattr(self, what) != getattr(other, what):
                return what
        for what in ("fills", "copies"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if [_key(t) for t in mine] != [_key(t) for t in theirs]:
                return what
        return ""

    def not_copied(self) -> dict[int, list[Move]]:
        """What an update does not replace by what it was sent: `gaps` and `made`, by area."""
        return {
            area: [*self.gaps.get(area, ()), *self.made.get(area, ())]
            for area in (*self.gaps, *(self.made.keys() - self.gaps.keys()))
        }

    def by_area(self) -> dict[int, list[tuple[str, Box]]]:
        found: dict[int, list[tuple[str, Box]]] = {}
        for name, pieces in self.pieces.items():
            for piece in pieces:
                found.setdefault(piece.area, []).append((name, piece.box))
        return found

    def describe(self, model: Sequence[tuple[str, str, tuple[int, ...], int]]) -> dict[str, Any]:
        """The fields of wsync.inspection.WorkerReport that a recording of a model's tensors
        (name, dtype, shape, group) knows; plain values."""
        names = AreaNames(self.facts)
        tensors: list[dict[str, Any]] = []
        model_nbytes = kept = 0
        for name, dtype, shape, _ in model:
            item = dtype_of(dtype).itemsize
            nbytes = math.prod(shape) * item
            model_nbytes += nbytes
            if name in self.fallback:
                kept += nbytes
            pieces = self.pieces.get(name)
            if not pieces:
                continue
            # narrowing is done before anything is sent, widening afterwards
            sent = min(item, dtype_of(self.kept[name]).itemsize)
            kept += sum(math.prod(piece.box.extent) for piece in pieces) * sent
            boxes = [
                {
                    "into": names.at(piece.area, piece.box.address)[0],
                    "start": list(piece.box.start),
                    "extent": list(piece.box.extent),
                }
                for piece in pieces
                if names.known(piece.area)  # others are there to be compared
            ]
            facts = {"name": name, "dtype": dtype, "shape": list(shape), "boxes": boxes}
            tensors.append({**facts, "kept_as": self.kept[name]})
        return {
            "unlearnt": "",
            "model_tensors": len(model),
            "model_nbytes": model_nbytes,
            "kept_nbytes": kept,
            "fills": len(self.fills),
            "copies": len(self.copies),
            "fallbacks": dict(self.fallback),
            "skipped": list(self.skipped),
            "twins": [[twin.name, twin.other] for twin in self.twins],
            "unwritten": [list(pair) for pair in self.unwritten],
            "tensors": tensors,
        }


def _key(transfer: Transfer) -> Any:
    values = None if transfer.keep is None else transfer.keep.cpu().numpy().tobytes()
    source = transfer.move.source if transfer.keep is None else 0
    move = transfer.move
    return (transfer.area, transfer.source_area, source, move.destination, move.dims, values)
