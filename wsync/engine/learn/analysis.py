"""Turns what a tracer saw into a recording: which writes are left in the end, which of them can be
done again by copies, and what has to be compared because another is written over it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.module_memory import ModuleMemory, whole
from wsync.engine.learn.recording import (
    ClashError,
    RecordedPiece,
    Recording,
    RecordingError,
    Transfer,
    Twin,
)
from wsync.engine.learn.regions import (
    Box,
    Move,
    UnexpressedError,
    all_apart,
    apart,
    boxes,
    common,
    common_nbytes,
    compose,
    minus,
    united,
    without,
)
from wsync.engine.learn.time_limit import check
from wsync.engine.learn.tracer import Tracer
from wsync.engine.learn.writes import COMPUTED, CONSTANT, HELD, SOURCE, Write
from wsync.module_tensors import dtype_of
from wsync.module_tensors.quantised_names import is_note

# conversions that lose nothing, so that the way back gives the same bytes
_WIDENINGS: Final = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
# conversions that copies can do on their way (csrc/core/layout/dtype.h)
_CASTS: Final = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
}


class Analysis:
    """Turns what a tracer saw into a recording."""

    def __init__(
        self, held: ModuleMemory, model: MadeUpModel, tracer: Tracer, fallback: dict[str, str]
    ) -> None:
        self._held = held
        self._model = model
        self._tracer = tracer
        self._facts = {fact[0]: fact for fact in model.tensors}
        self._order = {name: place for place, name in enumerate(self._facts)}
        self.recording = Recording(held.facts, fallback=dict(fallback))
        self._copies: list[tuple[int, Transfer]] = []  # and when they read
        # area, what is written over, by whom, and whether it is the other way round in an update
        self._lost: list[tuple[int, Write, str, bool]] = []
        final = [self._last(area) for area in range(len(held.areas))]
        for area, writes in enumerate(final):
            for write in writes:
                self._add(area, write)
        self._add_twins()
        self._drop_fallbacks()
        self.recording.copies = [copy for _, copy in sorted(self._copies, key=lambda c: c[0])]
        for name, pieces in self.recording.pieces.items():
            found = [piece.box for piece in pieces]
            if not (apart(found) or _disjoint(found, self._facts[name][2])):
                self.recording.pieces[name] = self._once(name, pieces)
        copies, areas = self.recording.copies, len(held.areas)
        self.recording.copies = [copy for copy in copies if copy.area < areas]
        self.recording.shadow_copies = [copy for copy in copies if copy.area >= areas]
        self._note_areas(final)
        used = self.recording.pieces.keys() | self.recording.fallback.keys()
        self.recording.skipped = [name for name, *_ in model.tensors if name not in used]
        for area, writes in enumerate(final):
            if not self._is_full(area, writes):
                self._find_gaps(area)
        self._list_unwritten()
        self._list_lacking()
        self._note_looked()

    def _last(self, area: int) -> list[Write]:
        """The writes to an area without what later ones have written over."""
        writes = self._tracer.writes[area]
        parts = [[write.move] for write in writes]
        # by write: what tensors of the model have brought that only constants have replaced
        brought: dict[int, list[Move]] = {}
        spans = [write.move.span() for write in writes]
        order = sorted(range(len(writes)), key=lambda i: spans[i])
        active: list[int] = []
        for i in itertools.chain.from_iterable(
            cluster
            for cluster in _clusters(spans, order)
            if not all_apart([writes[i].move for i in cluster])
        ):
            active = [j for j in active if spans[j][1] > spans[i][0]]
            for j in active:
                first, second = min(i, j), max(i, j)
                later = writes[second].move
                if all_apart((writes[first].move, later)):
                    continue
                left = parts[first]
                try:
                    if self._named(writes[second]):
                        lost = brought.get(first, left)
                        self._note_lost(area, writes[first], lost, writes[second])
                        if first in brought:
                            brought[first] = [p for part in lost for p in without(part, later)]
                    else:
                        brought.setdefault(first, left)
                    parts[first] = [p for part in left for p in without(part, later)]
                except UnexpressedError as error:
                    path = self._held.areas[area].path
                    raise RecordingError(f"{path}: it is written over in parts: {error}") from None
            active.append(i)
        rest = zip(writes, parts, strict=True)
        return [replace(write, move=move) for write, moves in rest for move in moves]

    def _named(self, write: Write) -> frozenset[str]:
        """Tensors of the model whose values a write brings."""
        return self._tracer.names_of([write]) if write.flow is None else write.flow

    def _note_lost(self, area: int, first: Write, parts: list[Move], second: Write) -> None:
        """Notes what one tensor of the model has brought where another is written over it."""
        mine, others = self._named(first), self._named(second)
        if all(map(is_note, mine | others)):
            return  # the last one stays, as it does where they are loaded
        if not mine or mine <= others or others <= mine:
            return  # steps of one computation, not two tensors in one place
        alike = first.kind == second.kind and first.move == second.move
        if alike and first.kind == HELD:
            return  # both are copies of one place, where what they bring is compared
        move = second.move
        dims = tuple((n, d, d) for n, _, d in move.dims)
        read = Move(move.destination, move.destination, dims, move.into, move.into)
        lost = [
            found
            for part in parts
            for found in (compose(read, part)[0] if common_nbytes(part, move) else ())
        ]
        one, *more = sorted(mine - others)
        other, *further = sorted(others - mine)
        alike &= first.kind == COMPUTED and first.reason == second.reason
        alike &= self._facts[one][1:3] == self._facts[other][1:3] and not (more or further)
        if lost and alike and self._same_tensors(area, lost):
            text = self._place(area, first.move)
            self.recording.rivals[one, other] = text
            self._fall_back(frozenset([one, other]), f"{text}: {first.reason}")
            return
        # what is set aside was seen, and is loaded, after all else
        turned = bool(second.flow) and not first.flow and self._order[other] < self._order[one]
        self._lost += [(area, replace(first, move=found), other, turned) for found in lost]

    def _same_tensors(self, area: int, places: Sequence[Move]) -> bool:
        """Whether all tensors of the module that places lie in are one memory: else equal tensors
        of the model may bring different elements there."""
        start = self._held.areas[area].start
        facts = (fact for fact in self._held.facts if fact[4] == area)
        found = {tuple(united([whole(fact, start)])) for fact in facts}
        meets = (any(common_nbytes(p, move) for p in places for move in moves) for moves in found)
        return sum(meets) == 1

    def _add_twins(self) -> None:
        """Has what is written over delivered to memory of its own, to be compared.

        Raises:
            ClashError: that cannot be done.
        """
        count = len(self._held.areas)
        for area, write, other, turned in self._lost:
            name = min(self._named(write))
            low, high = write.move.span()
            if write.kind == SOURCE:
                self._add_source(count + len(self.recording.twins), write, low)
            if write.kind != SOURCE or name in self.recording.fallback or turned:
                text = f"{self._place(area, write.move)}: {name} and {other} are both loaded there"
                if any({name, other} <= set(names) for names in self._held.tied()):
                    raise RecordingError(text)  # what is brought under these names is compared
                raise ClashError(text)
            move = self._within(area, write.move)
            self.recording.twins.append(Twin(name, other, area, move, high - low))
        for names in self._held.tied():
            self._add_tied([name for name in names if name in self._facts])

    def _add_tied(self, names: list[str]) -> None:
        """Names of one tensor of the module, of which a loader may skip some."""
        pieces, kept = self.recording.pieces, self.recording.kept
        loaded = next((name for name in names if name in pieces), "")
        for name in names:
            if not loaded or name in pieces or name in self.recording.fallback:
                continue
            if self._facts[name][1:3] != self._facts[loaded][1:3]:
                raise ClashError(f"{name} and {loaded} are one tensor, of another dtype or shape")
            kept[name], item = kept[loaded], dtype_of(kept[loaded]).itemsize
            mine = [piece for piece in pieces[loaded] if piece.area < len(self._held.areas)]
            for piece in mine:
                box = piece.box
                dims = tuple((n, s, s) for n, s in zip(box.extent, box.strides, strict=True))
                move = Move(box.address, box.address, dims, item, item)
                low, high = move.span()
                number = len(self._held.areas) + len(self.recording.twins)
                shadow = RecordedPiece(number, replace(box, address=box.address - low))
                pieces.setdefault(name, []).append(shadow)
                self.recording.twins.append(Twin(name, loaded, piece.area, move, high - low))

    def _add(self, area: int, write: Write) -> None:
        if write.kind == SOURCE:
            self._add_source(area, write, self._held.areas[area].start)
        elif write.kind == CONSTANT:
            assert write.keep is not None
            start = write.keep.data_ptr()
            fill = self._transfer(area, -1, write, start)
            self.recording.fills.append(fill)
        elif write.kind == HELD:
            self._add_copy(area, write)
        elif write.kind == COMPUTED:
            self.recording.made.setdefault(area, []).append(self._within(area, write.move))
            if not write.names:
                path = self._place(area, write.move)
                raise RecordingError(f"{path} is computed by {write.reason} from no tensor")
            self._fall_back(write.names, f"{self._place(area, write.move)}: {write.reason}")

    def _add_source(self, area: int, write: Write, start: int) -> None:
        name = self._tracer.name_at(write.move.source)
        _, dtype, shape, offset, _ = self._facts[name]
        try:
            kept = _kept(write.dtypes, dtype_of(dtype))
            if self.recording.kept.setdefault(name, kept) != kept:
                raise UnexpressedError(f"kept as {self.recording.kept[name]} and as {kept}")
            base = self._model.address + offset
            found = boxes(write.move, base, shape, dtype_of(dtype).itemsize)
        except UnexpressedError as error:
            where = self._held.find(write.move.destination)
            self._fall_back(frozenset([name]), f"{self._place(where, write.move)}: {error}")
            return
        pieces = self.recording.pieces.setdefault(name, [])
        pieces += [
            RecordedPiece(area, Box(b.start, b.extent, b.address - start, b.strides)) for b in found
        ]

    def _add_copy(self, area: int, write: Write) -> None:
        """A copy of a held tensor can wait until the end if that is not written meanwhile."""
        source = self._held.find(write.move.source)
        read = write.move.reversed()
        earlier = [read]  # what another load has left
        later = False
        for other in self._tracer.writes[source]:
            if other.time < write.clock:
                earlier = [part for move in earlier for part in without(move, other.move)]
            else:
                later = later or common_nbytes(read, other.move) > 0
        if later:
            text = f"{self._place(area, write.move)}: a copy of what is written over later"
            if earlier:
                raise RecordingError(text)
            self._fall_back(self._tracer.names_of(self._tracer.writes[source]), text)
            return
        start = self._held.areas[source].start
        self._copies.append((write.clock, self._transfer(area, source, write, start)))

    def _transfer(self, area: int, source: int, write: Write, start: int) -> Transfer:
        move, dtypes = self._within(area, write.move), write.dtypes
        moved = replace(move, source=move.source - start)
        if dtypes[0].itemsize != move.item:  # bytes of elements
            same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[move.item]
            dtypes = (same,)
        return Transfer(area, source, moved, dtypes, write.keep)

    def _fall_back(self, names: frozenset[str], reason: str) -> None:
        for name in names:
            self.recording.fallback.setdefault(name, reason)

    def _drop_fallbacks(self) -> None:
        """What loads through the loader is not copied as well."""
        for name in self.recording.fallback:
            self.recording.pieces.pop(name, None)
            self.recording.kept.pop(name, None)

    def _once(self, name: str, pieces: list[RecordedPiece]) -> list[RecordedPiece]:
        """Every element in one place: the others are copies of that."""
        found: list[RecordedPiece] = []
        dtype = dtype_of(self.recording.kept[name])
        for piece in pieces:
            check()
            rest = [piece.box]
            for first in found:
                left: list[Box] = []
                for box in rest:
                    left += minus(box, first.box)
                    part = common(box, first.box)
                    if part is None:
                        continue
                    source = first.box.part(part.start, part.extent)
                    steps = zip(part.extent, source.strides, part.strides, strict=True)
                    size = dtype.itemsize
                    move = Move(source.address, part.address, tuple(steps), size, size)
                    copy = Transfer(piece.area, first.area, move, (dtype,))
                    self.recording.copies.insert(0, copy)
                rest = left
            found += [RecordedPiece(piece.area, box) for box in rest]
        return found

    def _note_areas(self, final: list[list[Write]]) -> None:
        recording = self.recording
        areas = (piece.area for pieces in recording.pieces.values() for piece in pieces)
        used = {area for area in areas if area < len(final)}
        used |= {t.area for t in (*recording.fills, *recording.copies)}
        recording.areas = sorted(used)
        recording.computed = [a for a, writes in enumerate(final) if writes and a not in used]

    def _is_full(self, area: int, writes: list[Write]) -> bool:
        """Whether an area of one tensor is surely written all over; writes are disjoint."""
        wholes = {fact[1:] for fact in self._held.facts if fact[4] == area}
        if len(wholes) > 1 or not writes:
            return False
        one = whole(("", *wholes.pop()), self._held.areas[area].start)
        low, high = one.span()
        inside = all(low <= w.move.span()[0] and w.move.span()[1] <= high for w in writes)
        return inside and high - low == one.nbytes == sum(w.move.nbytes for w in writes)

    def _find_gaps(self, area: int) -> None:
        """Parts of the area's tensors that are not written."""
        rest = [
            whole(fact, self._held.areas[area].start)
            for fact in self._held.facts
            if fact[4] == area
        ]
        if len(rest) > 1:
            rest = _distinct(rest)
        for write in self._tracer.writes[area]:
            if not rest:
                break
            try:
                rest = [part for move in rest for part in without(move, write.move)]
            except UnexpressedError as error:
                path = self._held.areas[area].path
                raise RecordingError(f"{path}: its unwritten bytes: {error}") from None
        if rest:
            self.recording.gaps[area] = [self._within(area, move) for move in rest]

    def _note_looked(self) -> None:
        """What the loader looks at has to be the same when this is replayed: what it writes
        itself is not."""
        for area, seen in self._tracer.looked.items():
            for move in seen:
                if any(common_nbytes(move, write.move) for write in self._tracer.writes[area]):
                    path = self._place(area, move)
                    raise RecordingError(f"it looks at values of {path}, and then replaces them")
            gaps = self.recording.gaps.get(area, [])
            self.recording.looked[area] = self._held.areas[area].sums(gaps)

    def _list_unwritten(self) -> None:
        for area, moves in self.recording.gaps.items():
            counts = Counter[str]()
            for move in moves:
                counts[self._held.name(area, move.destination)] += move.nbytes
            self.recording.unwritten += counts.items()

    def _list_lacking(self) -> None:
        for fact in self._held.facts:
            gaps = self.recording.gaps.get(fact[4], ())
            nbytes = sum(common_nbytes(gap, whole(fact)) for gap in gaps)
            if nbytes and fact[0] in self._held.parameters:
                self.recording.lacking[fact[0]] = nbytes

    def _within(self, area: int, move: Move) -> Move:
        """The same, counted from the area's start."""
        return replace(move, destination=move.destination - self._held.areas[area].start)

    def _place(self, area: int, move: Move) -> str:
        return self._held.name(area, self._within(area, move).destination)


def _disjoint(found: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether many boxes of a tensor share nothing; False where this costs more than to compare
    each with each."""
    if len(found) ** 2 < math.prod(shape):
        return False
    count = torch.zeros(tuple(shape), dtype=torch.uint8, device="cpu")
    for box in found:
        part = count[tuple(slice(s, s + n) for s, n in zip(box.start, box.extent, strict=True))]
        if part.any():
            return False
        part.fill_(1)
    return True


def _clusters(spans: Sequence[tuple[int, int]], order: Sequence[int]) -> Iterator[list[int]]:
    """Those of `order`, which is by span, whose spans meet one another."""
    cluster: list[int] = []
    end = 0
    for i in order:
        if cluster and spans[i][0] >= end:
            yield cluster
            cluster = []
        cluster.append(i)
        end = max(end, spans[i][1])
    if cluster:
        yield cluster


def _kept(dtypes: tuple[torch.dtype, ...], own: torch.dtype) -> str:
    """The layout's dtype of a tensor that went through these."""
    first, last = dtypes[0], dtypes[-1]
    widened = len(dtypes) == 3 and first == last and (first, dtypes[1]) in _WIDENINGS
    if len(dtypes) == 1 or widened:  # bytes as they are, by whatever name, or so again
        return str(own).removeprefix("torch.")
    if len(dtypes) == 2 and first == own and (first, last) in _CASTS:
        return str(last).removeprefix("torch.")
    raise UnexpressedError("converted " + " to ".join(str(dtype) for dtype in dtypes))


def _distinct(moves: list[Move]) -> list[Move]:
    """Regions without what an earlier one covers."""
    found: list[Move] = []
    for move in moves:
        rest = [move]
        for other in found:
            try:
                rest = [part for piece in rest for part in without(piece, other)]
            except UnexpressedError:
                break
        found += rest
    return found
