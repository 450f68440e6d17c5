"""A loader that does what load_weights was seen to do: copies, and calls for what it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import increment_version

from wsync._core import (
    BufferTable,
    Layout,
    LayoutBuilder,
    LayoutError,
    StateError,
    Stream,
    describe,
)
from wsync.engine.learn.memory import ModuleMemory
from wsync.engine.ring_loaders import LoadWeights, RoutedLoader
from wsync.module_tensors import same_bytes
from wsync.probing.audit import Audit, AuditError
from wsync.probing.learn import LearntLoad
from wsync.probing.numbering import Source
from wsync.probing.pieces import UNWRITTEN, PlacedBox, kept_as, once

_ALL_EVERY: Final = 100  # updates, between audits of all tensors


class LearntModule(NamedTuple):
    """What was learnt of a module's load_weights.

    load: it, in place.  given: values that some tensors had when it was learnt.
    """

    module: torch.nn.Module
    load: LoadWeights
    memory: ModuleMemory
    sources: Sequence[Source]
    given: Mapping[str, torch.Tensor]
    does: LearntLoad

    def describe(self) -> dict[str, Any]:
        """The fields of wsync.inspection.WorkerReport that are learnt; plain values."""
        tensors, targets = self.memory.tensors() or [], self.memory.targets
        by_name: dict[str, list[PlacedBox]] = {}
        for piece in self.does.pieces:
            by_name.setdefault(piece.name, []).append(piece)
        found, model_nbytes, kept_nbytes = list[dict[str, Any]](), 0, 0
        for name, dtype, shape in self.sources:
            nbytes = math.prod(shape) * dtype.itemsize
            model_nbytes += nbytes
            kept_nbytes += nbytes if name in self.does.computed else 0
            if not (pieces := by_name.get(name)):
                continue
            kept = kept_as(dtype, tensors[pieces[0].target].dtype) or dtype
            # narrowing is done before anything is sent, widening afterwards
            sent = min(dtype.itemsize, kept.itemsize)
            kept_nbytes += sum(math.prod(piece.extent) for piece in pieces) * sent
            boxes = [
                {
                    "into": targets[piece.target].path,
                    "start": list(piece.start),
                    "extent": list(piece.extent),
                }
                for piece in pieces
            ]
            facts = {"name": name, "dtype": _name_of(dtype), "shape": list(shape), "boxes": boxes}
            found.append({**facts, "kept_as": _name_of(kept)})
        used = by_name.keys() | self.does.computed.keys() | self.given.keys()
        unwritten = [
            [targets[piece.target].path, piece.view(tensors).nbytes]
            for piece in self.does.others
            if piece.why == UNWRITTEN
        ]
        return {
            "unlearnt": "",
            "model_tensors": len(self.sources),
            "model_nbytes": model_nbytes,
            "kept_nbytes": kept_nbytes,
            "fills": len(self.does.constants),
            "copies": len(self.does.copies),
            "skipped": [source.name for source in self.sources if source.name not in used],
            "twins": [[each.name, each.twin] for each in self.does.pieces if each.twin],
            "unwritten": unwritten,
            "tensors": found,
        }


class ReplayLoader(RoutedLoader):
    """Does what was learnt with the tensors of a module, wherever they lie by then.

    At each update but the first the loading of some tensors is audited before anything is
    written.  StateError where the module, or what its load_weights does, has changed.
    """

    def __init__(self, learnt: LearntModule, stream: Stream, threads: int) -> None:
        super().__init__(stream, threads)
        self._learnt = learnt
        does, tensors = learnt.does, _tensors(learnt)
        self.paths = [target.path for target in learnt.memory.targets]
        self.form = describe(tensors, self.paths, gpu=True).form()
        self.twins = [piece for piece in does.pieces if piece.twin]
        others = [
            PlacedBox(number, each.twin, each.start, each.extent, 0, _contiguous(each.extent))
            for number, each in enumerate(self.twins, len(tensors))
        ]
        beside = [tensors[piece.target].new_empty(0) for piece in self.twins]
        # what twins bring goes to memory of its own, to be compared
        self._pieces, self.shadow_copies = once((*does.pieces, *others), (*tensors, *beside))
        written = (*does.constants, *(copy.target for copy in does.copies))
        self.used = sorted({piece.target for piece in (*self._pieces, *written)})
        # in the order of the trainer: one may go by another
        self._aside = [
            s for s in learnt.sources if s.name in does.computed or s.name in learnt.given
        ]
        self._last: dict[str, torch.Tensor] = dict(learnt.given)  # of these, what was loaded last
        self.constants = dict(does.constants)
        self.layout = self._destination([*tensors, *beside])
        audit = Audit(learnt.load, does, learnt.sources)
        self._audit = audit if audit.is_possible(tensors) else None
        self._updates = 0
        self._whole = False  # whether the weights are those of an update

    def blob(self) -> bytes:
        return self.layout.to_bytes()

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        filling = _Filling(self)
        if self._whole:
            self.audit(filling.tensors)
        self._whole = False
        self._aim(filling)

    def audit(self, tensors: Sequence[torch.Tensor]) -> None:
        """StateError where load_weights does something else by now than what was learnt."""
        if self._audit is None:
            return
        self._updates += 1
        try:
            if self._updates % _ALL_EVERY:
                self._audit.some(tensors)
            else:
                self._audit.all(tensors)
        except AuditError as error:
            raise has_changed(self._learnt.module, str(error)) from error

    def is_current(self) -> bool:
        """Whether the module, and what its load_weights does, is what was learnt.  StateError as of
        `begin`."""
        filling = _Filling(self)
        if self._whole:
            self.audit(filling.tensors)
        return True

    def confirm(self) -> None:
        super().confirm()
        self._whole = True

    def load_aside(
        self, staged: Sequence[tuple[str, torch.Tensor]], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Has the loader load what it computes with; and shapes, unless these are those that it has
        loaded last: what it makes of them is constant from then on."""
        computed, changed = self._learnt.does.computed, dict[str, torch.Tensor]()
        for name, tensor in staged:
            if name in self._last and not torch.equal(tensor.cpu(), self._last[name]):
                changed[name] = tensor.to("cpu", copy=True)
        pairs = [pair for pair in staged if pair[0] in computed or pair[0] in changed]
        if pairs:
            self._learnt.load(pairs)
        self._last |= changed
        if changed:
            self.constants = {p: p.view(tensors).clone() for p in self.constants}

    def _destination(self, tensors: Sequence[torch.Tensor]) -> Layout:
        """A buffer for each tensor of the module that is used; then twins, and then tensors that
        are kept for the loader."""
        builder, known = LayoutBuilder(), {source.name: source for source in self._learnt.sources}
        numbers = {target: number for number, target in enumerate(self.used)}
        for piece in sorted(self._pieces, key=lambda piece: (piece.target, piece.name)):
            source, size = known[piece.name], tensors[piece.target].dtype.itemsize
            kept = kept_as(source.dtype, tensors[piece.target].dtype)
            assert kept is not None
            builder.add_shard(
                *(piece.name, _name_of(kept), source.shape, piece.start, piece.extent),
                *(numbers[piece.target], piece.offset * size),
                [stride * size for stride in piece.strides],
            )
        for number, source in enumerate(self._aside, len(self.used)):
            name, dtype, shape = source
            strides = [stride * dtype.itemsize for stride in _contiguous(shape)]
            zeros = [0] * len(shape)
            builder.add_shard(name, _name_of(dtype), shape, zeros, shape, number, 0, strides)
        return builder.build()


def has_changed(module: torch.nn.Module, change: str) -> StateError:
    return StateError(
        f"{type(module).__name__} has changed since it was learnt: {change}; the next update "
        "learns anew"
    )


def _tensors(learnt: LearntModule) -> list[torch.Tensor]:
    tensors = learnt.memory.tensors()
    if tensors is None:
        raise has_changed(learnt.module, "it has other parts, or tensors under other names")
    return tensors


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Filling:
    """The module's tensors while one update fills them, and what is kept beside for the loader,
    and to be compared."""

    def __init__(self, replay: ReplayLoader) -> None:
        learnt = replay._learnt
        self._replay, self._does = replay, learnt.does
        self.tensors = _tensors(learnt)
        self._table = describe(self.tensors, replay.paths, gpu=True, former=replay.form)
        if (place := self._table.differs(replay.form)) is not None:
            change = f"{replay.paths[place]} has another dtype, shape or strides"
            raise has_changed(learnt.module, change)
        here = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._shadows = [
            torch.empty(piece.extent, dtype=self.tensors[piece.target].dtype, device=here)
            for piece in replay.twins
        ]
        self._staged = [
            (name, torch.empty(shape, dtype=dtype, device=here))
            for name, dtype, shape in replay._aside
        ]

    def layout(self) -> Layout:
        return self._replay.layout

    def buffers(self) -> BufferTable:
        used, count = self._replay.used, len(self.tensors)
        spans = [self._table[number][::4] for number in used if number < count]
        further = [self._shadows[number - count] for number in used if number >= count]
        further += [tensor for _, tensor in self._staged]
        spans += [(tensor.data_ptr(), tensor.nbytes) for tensor in further]
        return BufferTable(spans, (self._table, further))

    def complete(self) -> None:
        """Constants, then what the loader computes, and then the module's own copies.  LayoutError
        where two tensors that go to one place bring different values."""
        own = [number for number in self._replay.used if number < len(self.tensors)]
        increment_version([self.tensors[number] for number in own])
        with torch.no_grad():
            for piece, value in self._replay.constants.items():
                piece.view(self.tensors).copy_(value)
            if self._staged:
                self.check_places()
                self._replay.load_aside(self._staged, self.tensors)
                self.check_places()
            for copy in self._does.copies:
                copy.run(self.tensors)
            for copy in self._replay.shadow_copies:
                copy.run([*self.tensors, *self._shadows])
        for piece, brought in zip(self._replay.twins, self._shadows, strict=True):
            if not same_bytes(piece.view(self.tensors), brought):
                path = self._replay.paths[piece.target]
                raise LayoutError(
                    f"{path}: {piece.name} and {piece.twin} are both loaded there, and bring "
                    "different values"
                )
        self._staged, self._shadows = [], []

    def check_places(self) -> None:
        """StateError where the module no longer has the tensors that the update was written to."""
        learnt = self._replay._learnt
        now = learnt.memory.tensors()
        if now is None or self._table.moved(now) is not None:
            raise StateError(
                f"{type(learnt.module).__name__} has changed while the update ran: tensors were "
                "replaced"
            )
