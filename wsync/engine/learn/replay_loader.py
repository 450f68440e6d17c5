"""A loader that copies what load_weights was seen to copy, and calls load_weights for the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from wsync._core import (
    BufferTable,
    Layout,
    LayoutBuilder,
    LayoutError,
    StateError,
    Stream,
    UnsupportedError,
    describe,
)
from wsync.boxes import contiguous_strides
from wsync.engine.comparison import Comparison
from wsync.engine.learn.load_targets import LoadTargets, has_changed
from wsync.engine.post_load import in_place
from wsync.engine.ring_loaders import Held, LoadWeights, OnWeightsLost, Receipt, RoutedLoader
from wsync.module_tensors import name_of, same_bytes
from wsync.module_tensors.held import Bound
from wsync.module_tensors.names import is_note, listed
from wsync.probing.audit import Audit, AuditError
from wsync.probing.codes import kind_of
from wsync.probing.learn import LearntLoad
from wsync.probing.numbering import Source
from wsync.probing.pieces import as_kept, by_name, kept_as


class LearntModule(NamedTuple):
    """What was learnt of a module's load_weights.

    method: load_weights.  memory: the tensors that load_weights may write to.  sources: the tensors
    that load_weights is given.  does: what load_weights does with these tensors.  same_place: for a
    tensor that it loads, the tensor that it skips because both are one tensor of the module.  Both
    tensors must have the same values.
    """

    module: torch.nn.Module
    method: LoadWeights
    memory: LoadTargets
    sources: Sequence[Source]
    does: LearntLoad
    same_place: Mapping[str, str]

    def load(self, pairs: Any, bound: Iterable[Bound] | None = None) -> None:
        """Calls load_weights.  bound: the tensors that load_weights may replace by other tensors.
        None stands for all tensors, which takes longer."""
        with in_place(self.module, bound):
            self.method(pairs)

    def describe(self) -> dict[str, Any]:
        """Returns what wsync.inspection shows, as plain values."""
        tensors, targets, does = self.memory.tensors(), self.memory.targets, self.does
        places, facts = by_name(does.pieces), list[dict[str, Any]]()
        kept_nbytes = sum(source.nbytes for source in self.sources if source.name in does.computed)
        for name, dtype, shape in self.sources:
            if not (pieces := places.get(name)):
                continue
            kept = kept_as(dtype, tensors[pieces[0].target].dtype) or dtype
            # the trainer narrows values before they are sent, and this worker widens them
            sent = min(dtype.itemsize, kept.itemsize)
            kept_nbytes += sum(math.prod(piece.extent) for piece in pieces) * sent
            boxes = [
                {
                    "into": targets[piece.target].path,
                    "start": [*piece.start],
                    "extent": [*piece.extent],
                }
                for piece in pieces
            ]
            form = {"dtype": name_of(dtype), "shape": [*shape], "kept_as": name_of(kept)}
            facts.append({"name": name, **form, "boxes": boxes})
        unused = {source.name for source in self.sources} - does.used
        return {
            "unlearnt": "",
            "model_tensors": len(self.sources),
            "model_nbytes": sum(source.nbytes for source in self.sources),
            "kept_nbytes": kept_nbytes,
            "skipped": sorted(name for name in unused if not is_note(name)),
            "same_place": [list(pair) for pair in self.same_place.items()],
            "unwritten": [[targets[p.target].path, p.view(tensors).nbytes] for p in does.unwritten],
            "tensors": facts,
        }


class ReplayLoader(RoutedLoader):
    """Makes the copies that load_weights made in a module's tensors.  Their addresses may change.

    Each update except the first one audits load_weights on some tensors before anything is written.
    The audit raises StateError if the module, or what load_weights does, has changed.

    on_weights_lost: is called if load_weights has put audited tensors in other places.
    """

    def __init__(
        self, learnt: LearntModule, stream: Stream, threads: int, on_weights_lost: OnWeightsLost
    ) -> None:
        super().__init__(stream, threads)
        self._learnt, self._on_weights_lost = learnt, on_weights_lost
        does, tensors = learnt.does, learnt.memory.tensors()
        self.used = sorted({piece.target for piece in does.written})
        self.used_paths = [learnt.memory.targets[number].path for number in self.used]
        self.form = describe([tensors[number] for number in self.used], gpu=True).form()
        # whole tensors in the trainer's order, because the loading of one may depend on another
        given = {*does.computed, *learnt.same_place.values()}
        self._staged_sources = [
            s for s in learnt.sources if s.name in given or not kind_of(s.dtype)
        ]
        self.layout = self._destination(tensors)
        audit = Audit(lambda pairs: learnt.load(pairs, learnt.memory.bound()), does, learnt.sources)
        self._audit = audit if audit.is_possible(tensors) else None
        self._audit_ns = 0
        self._whole = False  # whether a complete update has filled the module

    def blob(self) -> bytes:
        return self.layout.to_bytes()

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        filling = self.check()
        self._whole = False
        self._aim(filling)

    def comparison(self, timeout: float) -> Comparison:
        tensors = _Filling(self).tensors
        found = self._comparison(self.layout, [tensors[n] for n in self.used], timeout)
        found.compare_copies(self._learnt.does.copies, tensors)
        return found

    def held(self) -> Held:
        twice = {*self._learnt.same_place.values()}
        if lacking := [s.name for s in self._staged_sources if s.name not in twice]:
            raise UnsupportedError(
                f"{listed(lacking)}: this worker does not hold it as it was delivered, because "
                "load_weights computes with it"
            )
        tensors = _Filling(self).tensors
        return Held(self.layout, [tensors[number] for number in self.used], self.used_paths)

    def check(self) -> _Filling:
        """Returns the tensors that an update fills.

        Raises:
            StateError: the module, or what load_weights does, has changed since it was learnt.
        """
        filling = _Filling(self)
        self._audit_ns = 0
        if self._whole and self._audit is not None:
            start = time.perf_counter_ns()
            try:
                self._audit.some(filling.tensors)
            except AuditError as error:
                self._on_weights_lost()
                raise has_changed(type(self._learnt.module).__name__, str(error)) from error
            self._audit_ns = time.perf_counter_ns() - start
        return filling

    def finish(self, timeout: float) -> Receipt:
        return replace(super().finish(timeout), audit_ns=self._audit_ns)

    def confirm(self) -> None:
        super().confirm()
        self._whole = True

    def _destination(self, tensors: Sequence[torch.Tensor]) -> Layout:
        """Returns the worker's layout.  It has a buffer for each tensor of the module that copies
        write to, and then one for each tensor that is kept whole for load_weights."""
        builder, known = LayoutBuilder(), {source.name: source for source in self._learnt.sources}
        numbers = {target: number for number, target in enumerate(self.used)}
        for piece in sorted(self._learnt.does.pieces, key=lambda piece: (piece.target, piece.name)):
            source, size = known[piece.name], tensors[piece.target].dtype.itemsize
            kept = kept_as(source.dtype, tensors[piece.target].dtype)
            assert kept is not None
            builder.add_shard(
                *(piece.name, name_of(kept), source.shape, piece.start, piece.extent),
                *(numbers[piece.target], piece.offset * size),
                [stride * size for stride in piece.strides],
            )
        for number, (name, dtype, shape) in enumerate(self._staged_sources, len(self.used)):
            strides = contiguous_strides((*shape, dtype.itemsize))[:-1]
            zeros = [0] * len(shape)
            builder.add_shard(name, name_of(dtype), shape, zeros, shape, number, 0, strides)
        return builder.build()


class _Filling:
    """The module's tensors while one update fills them.  It also has the whole tensors that
    load_weights is called with, and those that are compared with others."""

    def __init__(self, replay: ReplayLoader) -> None:
        learnt = replay._learnt
        self._replay, self._does = replay, learnt.does
        self.tensors = learnt.memory.tensors()
        used = [self.tensors[number] for number in replay.used]
        self._table = describe(used, replay.used_paths, gpu=True, former=replay.form)
        if (place := self._table.differs(replay.form)) is not None:
            change = f"{replay.used_paths[place]} has another dtype, shape or strides"
            raise has_changed(type(learnt.module).__name__, change)
        self._buffers = replay._memory.bind(self._table)  # StateError while an engine sleeps
        self._staged: dict[str, torch.Tensor] = {}

    def layout(self) -> Layout:
        return self._replay.layout

    def buffers(self) -> BufferTable:
        here = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._staged = {
            name: torch.empty(shape, dtype=dtype, device=here)
            for name, dtype, shape in self._replay._staged_sources
        }
        staged = [*self._staged.values()]
        if not staged:
            return self._buffers
        spans = [row[::4] for row in map(self._table.__getitem__, range(len(self._table)))]
        spans += [(tensor.data_ptr(), tensor.nbytes) for tensor in staged]
        return BufferTable(spans, (self._table, staged))

    def complete(self) -> None:
        """Writes the constants, calls load_weights for what it computes, and then makes the copies
        within the module.

        Raises:
            LayoutError: a tensor that the module has under two names has different values.
        """
        learnt = self._replay._learnt
        compared = {*learnt.same_place.values()}
        increment_version([self.tensors[number] for number in self._replay.used])
        with torch.no_grad():
            for piece, value in self._does.constants.items():
                piece.view(self.tensors).copy_(value)
            if pairs := [each for each in self._staged.items() if each[0] not in compared]:
                self.check_places()
                learnt.load(pairs)
                self.check_places()
            for copy in self._does.copies:
                copy.run(self.tensors)
        for piece in self._does.pieces if compared else ():
            if not (other := learnt.same_place.get(piece.name)):
                continue
            place = piece.view(self.tensors)
            if not same_bytes(place, as_kept(piece.of(self._staged[other]), place.dtype)):
                path = learnt.memory.targets[piece.target].path
                raise LayoutError(
                    f"{path}: {piece.name} and {other} are one tensor of the module, but have "
                    "different values"
                )
        self._staged = {}

    def check_places(self) -> None:
        """Raises StateError if the module no longer has the tensors that the update has filled."""
        now = self._replay._learnt.memory.tensors()
        place = self._table.moved([now[number] for number in self._replay.used])
        if place is not None:
            path = self._replay.used_paths[place]
            raise StateError(f"{path}: its memory was replaced while the update ran")
