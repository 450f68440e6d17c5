"""A loader that does what load_weights was seen to do: copies, and calls for what it computes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, Final

import torch

from wsync import _core
from wsync.engine.learn.known_states import Found, Trying, has_changed, tell_of_trial, try_state
from wsync.engine.learn.module_memory import Area, AreaNames, ModuleMemory
from wsync.engine.learn.recording import NOT_RECORDED, KnownState, Recording
from wsync.engine.learn.verify import add_boxes
from wsync.engine.learn.watched_pools import watched_pools
from wsync.engine.learn.watched_writes import WatchedWrites
from wsync.engine.ring_loaders import LoadWeights, RoutedLoader
from wsync.engine.sent_destinations import Made
from wsync.module_tensors import dtype_of, same_bytes
from wsync.module_tensors.names_in_messages import listed
from wsync.module_tensors.quantised_names import is_note

_SHAPES_NBYTES: Final = 1 << 20  # the most that the shapes of a layer's packed tensors are


def _made_in(recording: Recording) -> list[Made]:
    """What a replay, and load_weights with what it computes, write to the module's areas."""
    copies = ((t.area, t.move) for t in (*recording.fills, *recording.copies))
    made = ((area, move) for area, moves in recording.made.items() for move in moves)
    names = AreaNames(recording.facts)
    spans = ((area, *move.span()) for area, move in (*copies, *made))
    return [Made(names.at(area, low)[-1], area, low, high) for area, low, high in spans]


class ReplayLoader(RoutedLoader):
    """Does what a recording says with the tensors of a module, wherever they lie by then.

    model: what the trainer delivers.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: LoadWeights,
        recording: Recording,
        model: _core.Layout,
        stream: _core.Stream,
        threads: int,
    ) -> None:
        super().__init__(stream, threads)
        self.module = module
        self.load_weights = load
        self.recording = recording
        self._model = model
        facts = [model.tensor(index) for index in range(model.tensor_count)]
        # in the order in which they were tried: one may go by another
        self.aside = [fact for fact in facts if fact.name in recording.fallback]
        self.layout = self._destination({fact.name: fact.shape for fact in facts})
        self.written = frozenset(recording.areas)
        self._made = _made_in(recording)
        self._held: ModuleMemory | None = None
        self.state = KnownState()  # that the update has found the module in
        # the shapes that the loader has loaded, and what came of them
        self._notes: tuple[torch.Tensor, list[int]] | None = None

    def blob(self) -> bytes:
        return self.layout.to_bytes()

    def begin(self, rounds: int, trying: Trying = nullcontext) -> None:
        """trying: around a trial of load_weights, which there is where it has not been tried with
        the module's attributes or caches as they are."""
        super().begin(rounds)
        self._aim(self._find(trying))

    def _find(self, trying: Trying) -> _Filling:
        """The module's tensors where they are now."""
        former, self._held = self._held, None
        found = Found(self.module, self.recording, former)
        if found.triable:
            with trying():
                self._try_as_it_is(found)
            found = Found(self.module, self.recording, former)
        held = found.held
        if found.state is None or held is None:
            raise has_changed(self.module, found.change)
        if held is not former:
            held.check_place(self.recording.areas)
        self._held, self.state = held, found.state
        return _Filling(self, held, found.memory)

    def _try_as_it_is(self, found: Found) -> None:
        """Tries load_weights on made-up tensors with the attributes that the module has now.

        Raises:
            StateError: it does something else with these, or cannot be tried.
        """
        held, start = found.held, time.perf_counter()
        assert held is not None
        try:
            try_state(
                *(self.module, self.load_weights, self._model),
                *(self.recording, self.stream, held),
            )
        except NOT_RECORDED as error:
            raise has_changed(self.module, found.change, str(error)) from error
        tell_of_trial(self.module, found.change, start)

    def load_aside(self, staged: list[tuple[str, torch.Tensor]]) -> None:
        """Has the loader load what is its own.  Shapes of packed tensors are the same each time:
        of a model of experts these are as many calls of its functions as there are tensors.  They
        are loaded again where the engine has others by now than the loader left."""
        self._compare_rivals(dict(staged))
        notes = [tensor.reshape(-1) for name, tensor in staged if is_note(name)]
        found = torch.cat(notes).cpu() if notes else None
        known, self._notes = self._notes, None
        same = found is not None and known is not None and torch.equal(found, known[0])
        if same and known is not None and self._computed() == known[1]:
            staged = [(name, tensor) for name, tensor in staged if not is_note(name)]
        if staged:
            self._load_own(staged)
        if found is not None:
            self._notes = found, self._computed()

    def _compare_rivals(self, staged: dict[str, torch.Tensor]) -> None:
        for (name, other), where in self.recording.rivals.items():
            if not same_bytes(staged[name], staged[other]):
                raise _differ(where, name, other)

    def _load_own(self, staged: list[tuple[str, torch.Tensor]]) -> None:
        """Raises StateError where the loader, which may go by values, does something else than it
        was seen to do with made-up ones: the copies are done."""
        recording, held = self.recording, self._held
        assert held is not None
        with watched_pools(), WatchedWrites(held) as watched:
            self.load_weights(staged)
        over = {part for part in watched.parts - recording.aside if part[0] in recording.areas}
        if over:
            area, offset, *_ = min(over)
            recording.refuted = (
                f"with the values of {listed(name for name, _ in staged)} it also writes to "
                f"{held.name(area, offset)}"
            )
        change = recording.refuted or self.state.after.difference(held.parts)
        if change := change or recording.stale(held):
            raise has_changed(self.module, change)

    def _computed(self) -> list[int]:
        """Checksums of what only the loader itself writes, as far as it may be shapes."""
        areas = self._held.areas if self._held is not None else []
        found = (areas[number] for number in self.recording.computed)
        return [area.checksum() for area in found if area.end - area.start <= _SHAPES_NBYTES]

    def _destination(self, shapes: dict[str, tuple[int, ...]]) -> _core.Layout:
        """The module's boxes; buffers are areas, and then tensors that are kept for the loader."""
        builder = _core.LayoutBuilder()
        for area, pieces in sorted(self.recording.by_area().items()):
            add_boxes(builder, area, pieces, self.recording, shapes)
        count = len(ModuleMemory(self.module).areas) + len(self.recording.twins)
        for number, (name, dtype, shape, _) in enumerate(self.aside):
            item = dtype_of(dtype).itemsize
            strides = [stride * item for stride in torch.empty(shape, device="meta").stride()]
            zeros = [0] * len(shape)
            builder.add_shard(name, dtype, shape, zeros, shape, count + number, 0, strides)
        return builder.build()


def _differ(where: str, name: str, other: str) -> _core.LayoutError:
    return _core.LayoutError(
        f"{where}: {name} and {other} are both loaded there, and bring different values"
    )


class _Filling:
    """The module's tensors while one update fills them, and what is kept beside for the loader,
    and to be compared."""

    def __init__(self, replay: ReplayLoader, held: ModuleMemory, memory: Any) -> None:
        self._replay = replay
        self._held = held
        self._memory: Any = memory  # is kept, until the commit: no other comes to lie there
        place = held.device
        self._staged = [
            (name, torch.empty(shape, dtype=dtype_of(dtype), device=place))
            for name, dtype, shape, _ in replay.aside
        ]
        self._shadows = [
            torch.empty(twin.nbytes, dtype=torch.uint8, device=place)
            for twin in replay.recording.twins
        ]

    def layout(self) -> _core.Layout:
        return self._replay.layout

    def buffers(self) -> _core.BufferTable:
        further = [*self._shadows, *(tensor for _, tensor in self._staged)]
        spans = self._held.spans() + [(t.data_ptr(), t.nbytes) for t in further]
        return _core.BufferTable(spans, (self._memory, further))

    def complete(self) -> None:
        """Runs the loader with what is its own to load, and then the module's own copies.
        LayoutError where a tensor was written over another that brings other values."""
        recording, areas = self._replay.recording, self._held.areas
        self._held.count_writes(self._replay.written)
        self._replay.state.left.put_back(self._held.parts)
        if not (self._staged or recording.fills or recording.copies or recording.twins):
            return  # nothing more is written; check_places() comes when the update is confirmed
        self.check_places()
        with torch.no_grad():
            if self._staged:
                self._replay.load_aside(self._staged)
                self._staged = []
                self.check_places()
            for transfer in (*recording.fills, *recording.copies):
                transfer.run(areas)
            shadows = [Area.of(tensor, "") for tensor in self._shadows]
            for transfer in recording.shadow_copies:
                transfer.run([*areas, *shadows])
        for twin, shadow in zip(recording.twins, shadows, strict=True):
            if twin.differs(areas, shadow):
                where = self._held.name(twin.area, twin.move.destination)
                raise _differ(where, twin.name, twin.other)
        self._shadows = []

    def check_places(self) -> None:
        """StateError where the module no longer has the tensors that the update was written to."""
        if not self._held.current():
            module = self._replay.module
            change = ModuleMemory(module).difference(self._held.facts, self._held.names)
            raise _core.StateError(
                f"{type(module).__name__} has changed while the update ran: "
                f"{change or 'tensors were replaced'}"
            )
