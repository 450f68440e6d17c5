"""Learns where an engine keeps the tensors of a model, from its own load_weights.

`record` runs the loader twice under a Tracer and makes a Recording of what it did: boxes of the
model's tensors that lie in the module's, constants, copies of one held tensor to another, and
tensors that only the loader itself can load, with the reason.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import torch

from wsync._core import LayoutError, NoMemoryError
from wsync.engine.learn.addresses_in_module import noted_addresses
from wsync.engine.learn.attributes_read import Attribute, AttributeGuards
from wsync.engine.learn.attributes_set import LeftValues
from wsync.engine.learn.bounded_call import NotEndedError, bounded
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.module_memory import (
    Area,
    AreaNames,
    Fact,
    ModuleMemory,
    Name,
    region,
    view,
    whole,
)
from wsync.engine.learn.module_state import Bindings
from wsync.engine.learn.quantisation_mismatch import refuse_other_forms, refuse_unloadable
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
from wsync.engine.learn.tracer import (
    COMPUTED,
    CONSTANT,
    HELD,
    SOURCE,
    Outside,
    ReadsValuesError,
    Tracer,
    Write,
    tracing,
)
from wsync.engine.learn.watched_writes import Part
from wsync.engine.ring_loaders import LoadWeights
from wsync.machine.error_text import error_text
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
_TRIALS: Final = 4
_TASKS_WAIT: Final = (
    "tasks that it gives to thread pools wait for others, or for what comes after them"
)
_NUMBER: Final = re.compile(r"\d+")


class RecordingError(Exception):
    """Why a loader cannot be replaced by what it was seen to do."""


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


class ClashError(LayoutError):
    """Two tensors of the model are loaded to one place, and cannot be compared there."""


class ComputesError(RecordingError):
    """Most of what the loader does is no copy.

    rivals: tensors that it writes over each other, as Recording has them.
    """

    def __init__(self, text: str, rivals: Iterable[tuple[str, str]]) -> None:
        super().__init__(text)
        self.rivals = tuple(rivals)


class RebindsError(RecordingError):
    """The loader made tensors of its own: a second run may find them there."""


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


def record(module: torch.nn.Module, load: LoadWeights, model: MadeUpModel) -> Recording:
    """What `load` does with the tensors of a model.

    The module's weights are left as they are by every loader whose work can be seen.

    Raises:
        RecordingError: it cannot be replaced; the text says why.
        RebindsError: perhaps it can be when it has run once.
    """
    first = _record(module, load, model)
    second = _record(module, load, model)
    difference = first.same(second)
    if difference:
        raise RecordingError(f"two recordings differ in their {difference}")
    return first


def _record(module: torch.nn.Module, load: LoadWeights, model: MadeUpModel) -> Recording:
    """One recording; tensors that are more than moved are left to the loader."""
    everything = frozenset(name for name, *_ in model.tensors)
    aside: dict[str, str] = {}
    for trial in range(_TRIALS):
        held = ModuleMemory(module)
        tracer = Tracer(held, model)
        _trace(module, load, model, held, tracer, everything - aside.keys(), aside)
        found = dict.fromkeys(_kept_outside(model, tracer), "it is kept outside the module")
        looked = tracer.refused | _scalars_like(model, tracer.refused, kinds=trial == 0)
        found |= dict.fromkeys(looked, "its values are looked at")
        if not found:
            break
        if "?" in found:
            raise RecordingError("it looks at values of the module that depend on the load")
        aside |= found
    else:
        raise RecordingError(
            f"values of {len(aside)} tensors and more are looked at or kept outside the module"
        )
    if aside:
        other = Tracer(held, model, opaque=frozenset(aside))
        _trace(module, load, model, held, other, frozenset(aside))
        if other.refused:
            raise RecordingError(f"it looks at what it makes of {', '.join(sorted(aside)[:5])}")
        for area, writes in enumerate(other.writes):
            tracer.writes[area] += [_made_again(write, tracer.writes[area]) for write in writes]
    refuse_other_forms(held, model, tracer)
    outside = [*tracer.outside.values(), *(other.outside.values() if aside else ())]
    try:
        recording = _Analysis(held, model, tracer, aside).recording
        recording.outside = [(o, sum) for o in outside if (sum := o.sum()) is not None]
        if recording.fallback.keys() != aside.keys():
            _try_alone(module, load, model, held, recording)
    except UnexpressedError as error:
        raise RecordingError(str(error)) from None
    return recording


def _made_again(write: Write, others: Sequence[Write]) -> Write:
    """What a loader writes where it is given what was set aside, alone.  Where it computes what it
    has computed of others, too, that is of all of them: they are loaded together."""
    same = [
        other.names
        for other in others
        if write.kind == other.kind == COMPUTED and common_nbytes(write.move, other.move)
    ]
    return replace(write, time=0, names=write.names.union(*same))


def _scalars_like(
    model: MadeUpModel, looked: frozenset[str], *, kinds: bool = False
) -> frozenset[str]:
    """All tensors of one element if one of these is; kinds: those alone that are called as it, but
    for numbers.  A loader that takes one by item() does so in each layer, and a trial ends at the
    first."""
    scalars = {name for name, _, shape, _, _ in model.tensors if math.prod(shape) == 1}
    called = {_NUMBER.sub("", name) for name in looked & scalars}
    if not called:
        return frozenset()
    return frozenset(n for n in scalars if not kinds or _NUMBER.sub("", n) in called)


def looks_anew(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    held: ModuleMemory,
    recording: Recording,
) -> str:
    """Watches the loader of a recording once more: with other attributes it may look at values that
    it did not look at before, which nobody would compare.  What it looks at, or ""."""
    everything, aside = frozenset(name for name, *_ in model.tensors), frozenset[str]()

    def watched(names: frozenset[str], opaque: frozenset[str]) -> Tracer:
        tracer = Tracer(held, model, opaque=opaque)
        with contextlib.suppress(RebindsError):  # caches: what it then does is tried
            _trace(module, load, model, held, tracer, names, recording.fallback)
        return tracer

    while (tracers := [watched(everything - aside, frozenset())])[0].refused:
        refused = tracers[0].refused
        if not refused <= recording.fallback.keys() - aside:
            return f"it looks at values of {', '.join(sorted(refused)[:5])}"
        aside |= refused | (_scalars_like(model, refused) & recording.fallback.keys())
    tracers += [watched(aside, aside)] if aside else []
    known = [(outside.start(), outside) for outside, _ in recording.outside]
    for tracer in tracers:
        for area in tracer.looked.keys() - recording.looked.keys():
            return f"it looks at values of {held.areas[area].path}"
        for found in tracer.outside.values():
            place = found.start()  # 0 where it is gone again
            if place and not any(place == start and each.holds(found) for start, each in known):
                return "it looks at values outside the module"
    return ""


def _try_alone(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    held: ModuleMemory,
    recording: Recording,
) -> None:
    """Given only the fallback tensors, a loader must not write what it does not write otherwise."""
    names = frozenset(recording.fallback)
    tracer = Tracer(held, model, opaque=names)
    before = held.sums_of(recording.gaps)
    _trace(module, load, model, held, tracer, names, recording.fallback)
    after = held.sums_of(recording.gaps)
    for area, gaps in recording.gaps.items():
        if after.get(area) != before.get(area):
            raise RecordingError(f"{held.areas[area].path}: written by means that cannot be seen")
        start = held.areas[area].start
        for gap in gaps:
            place = replace(gap, destination=gap.destination + start)
            if any(common_nbytes(place, write.move) for write in tracer.writes[area]):
                path = held.name(area, gap.destination)
                raise RecordingError(f"{path} is written when it is given {min(names)} alone")


def _kept_outside(model: MadeUpModel, tracer: Tracer) -> frozenset[str]:
    """Tensors that are still referred to when the loader has returned, or what was made of them.
    RecordingError where others than the module's were written to that are still there."""
    if model.referenced() or tracer.escaped() or tracer.changes_outside():
        gc.collect()
    found = model.referenced() | tracer.escaped()
    if not found and tracer.changes_outside():
        raise RecordingError("it writes to tensors that the module has in a container or an object")
    return found


def _trace(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    held: ModuleMemory,
    tracer: Tracer,
    names: frozenset[str],
    aside: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Runs the loader under a tracer; in vain if that refuses something."""
    kept = Bindings(module)
    given = [model.pairs(names)]  # the loader's alone once it has them
    try:
        with torch.no_grad(), tracing(tracer):
            bounded(lambda: load(given.pop()))
    except ReadsValuesError:
        return
    except NotEndedError:
        raise
    except Exception as error:
        check()
        _check_threads(tracer)
        refuse_other_forms(held, model, tracer)
        if len(names) == len(model.tensors):  # it may have raised for want of the others
            refuse_unloadable(error, held, model, tracer)
        text = f"it raised {error_text(error)}"
        for name, why in list(aside.items())[:1]:
            text += f", when it is not given {name}: {why}"
        raise RecordingError(text) from error
    except BaseExceptionGroup:  # an asyncio.TaskGroup makes one of what ends the load
        if not tracer.refused:
            raise
    finally:
        changed = kept.restore()
    check()  # whatever the loader makes of the error
    _check_threads(tracer)
    if changed and not tracer.refused:
        raise RebindsError(f"it binds other tensors to {', '.join(changed[:5])}")


def _check_threads(tracer: Tracer) -> None:
    if tracer.late:
        raise RecordingError(_TASKS_WAIT)
    if tracer.elsewhere:
        raise RecordingError("threads that it starts work on the tensors")


class _Analysis:
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
