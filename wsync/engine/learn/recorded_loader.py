"""A loader that learns what an engine's load_weights does, and does it without Python."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from wsync import _core
from wsync.engine.destination import MissingError
from wsync.engine.learn.attributes_read import Attribute, attributes_read
from wsync.engine.learn.attributes_set import LeftValues, attributes_set
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.forms_of_values import AttributePlace, Forms
from wsync.engine.learn.known_states import (
    Found,
    UntriedError,
    has_changed,
    tell_of_trial,
    try_state,
)
from wsync.engine.learn.module_memory import (
    Area,
    AreaNames,
    ModuleMemory,
    SharedError,
    check_python,
    without_strides,
    wrapped_tensors,
)
from wsync.engine.learn.module_state import KeptRegions, ModuleState, NotPutBackError
from wsync.engine.learn.quantisation_mismatch import OtherFormError
from wsync.engine.learn.recorder import (
    NOT_RECORDED,
    ClashError,
    KnownState,
    RebindsError,
    Recording,
    RecordingError,
    record,
)
from wsync.engine.learn.unlearnt_loader import UnlearntLoader
from wsync.engine.learn.verify import add_boxes, load_made_up, verify
from wsync.engine.learn.watched_writes import WatchedWrites
from wsync.engine.ring_loaders import (
    ChoosingLoader,
    Loader,
    LoadWeights,
    Losing,
    ModuleLoader,
    Receipt,
    RoutedLoader,
    keeps,
    loading_stream,
)
from wsync.engine.sent_destinations import Made
from wsync.machine import device
from wsync.machine.process_maps import SharedMaps
from wsync.machine.sent_memory import WrittenError, is_sent, unwritten
from wsync.messages.control import LEARN, WHOLE
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names_in_messages import listed
from wsync.module_tensors.places import places_of
from wsync.module_tensors.quantised_names import is_note

KEEP: Final = "WSYNC_KEEP"
_SHAPES_NBYTES: Final = 1 << 20  # the most that the shapes of a layer's packed tensors are

_log = logging.getLogger(__name__)
_Model = list[_core.TensorInfo]
_NOT_ASKED: Final = (
    "no trainer has asked for it yet; updates by buckets, broadcasts or files go without"
)


class RecordedLoader(ChoosingLoader):
    """Replaces a module's load_weights by one list of copies.

    When a trainer lists its tensors for the first time, load_weights runs on made-up tensors and
    is recorded.  The recording is used if replaying it gives the same bytes.  Tensors that
    load_weights computes with still go through it, all together, when every round has arrived.
    A loader that cannot be replaced is used as it is, by an UnlearntLoader; `reason` is why.

    A recording is valid while the module has the same tensors, wherever they lie, and while what
    load_weights read is the same: values of tensors, and attributes of the module and of its
    tensors (see wsync.engine.learn.attributes_read).  Where serving has changed attributes or
    has filled a cache, load_weights is tried once more on made-up tensors, as the module is then:
    if a replay gives the same bytes, and an update can leave what load_weights leaves, it goes on.
    Otherwise it fails, and the next update records anew.
    If load_weights could not be learnt, only attributes that it read are checked, in the same way,
    except those that it changes itself.

    Every update refuses, by name, parameters that the trainer does not deliver completely, because
    they would keep their old values, and tensors that load_weights writes to one place although
    their bytes differ.

    ignore: shell patterns ("visual.*") for the paths of parameters that the trainer does not have
    and that stay as they are; where a part of one may stay, as its padding, its full path.  The
    environment variable WSYNC_KEEP adds more, separated by commas, for engines that make their
    loader themselves.
    needed: ask the trainer only for what the module keeps, not for whole tensors.
    after: called with the module when everything is loaded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        ignore: Iterable[str] = (),
        needed: bool = True,
        after: Callable[[Any], object] | None = None,
        threads: int = 1,
    ) -> None:
        self._given = load_weights
        self._module = module
        self._load = self.method()
        self.recording: Recording | None = None
        self.reason = ""
        self._spoils = ""  # why nothing may be tried any more
        self._ignore = (*ignore, *filter(None, os.environ.get(KEEP, "").split(",")))
        self._needed = needed
        self._after = after
        self._threads = threads
        self._stream = loading_stream(device.of_module(module), threads)
        self._layout: _core.Layout | None = None  # of what the trainer delivers
        self._model: _Model = []  # the facts of that
        self._losing: Losing = keeps
        self._went_by: object = None
        self._chosen: Loader = ModuleLoader(module, self._load)

    def blob(self) -> bytes:
        return LEARN

    def learn(self, model: _core.Layout, losing: Losing = keeps) -> bytes:
        """Records what the module keeps of a model's tensors, and returns it as a blob.

        The module's weights are lost, unless this model was recorded before.

        Raises:
            LayoutError: they lie in memory that a trainer may have, too; or they cannot be
                recorded, and not be loaded otherwise.
            UnsupportedError: a part of the module is TorchScript.
        """
        check_python(self._module)
        facts = [model.tensor(index) for index in range(model.tensor_count)]
        if self.recording is not None and facts == self._model:
            old = self.recording
            change = self._stale() or old.refuted or Found(self._module, old).change
            if not change:
                return self._chosen.blob() if self._needed else WHOLE
            _log.info("the module has changed (%s) and is learnt anew", change)
        wrapped, self._losing = self._wrapped(), losing
        with self._trying():
            before = ModuleState(self._module, values=False)
            with before.unless_done():
                return self._learn(model, facts, before, wrapped)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Around what writes made-up values to the module."""
        self.check_private()
        self._losing()
        try:
            with unwritten():
                yield
        except (WrittenError, NotPutBackError) as error:
            # the same made-up values once more would look like nothing
            self.recording, self.reason = None, str(error)
            self._spoils = self.reason
            raise _core.LayoutError(self._spoils) from error

    def _wrapped(self) -> str:
        """Why no recording knows whether all parameters are loaded; or "".  LayoutError where
        nothing does."""
        found = {
            path: known
            for path, known in without_strides(self._module).items()
            if not self._stays(path)
        }
        hidden = [path for path, known in found.items() if not known]
        if hidden:
            raise _core.LayoutError(
                f"{listed(hidden)}: of {type(self._module).__name__}, whether a load replaces its "
                f"values cannot be seen; {KEEP} or RecordedLoader(ignore=...) names what is to "
                "stay as it is"
            )
        return f"{listed(found)}: a wrapper around other tensors" if found else ""

    def _try_as_it_is(self, found: Found) -> None:
        """Tries load_weights on made-up tensors with the attributes that the module has now.

        Raises:
            StateError: it does something else with these, or cannot be tried.
        """
        recording, model, held = self.recording, self._layout, found.held
        start = time.perf_counter()
        assert recording is not None and model is not None and held is not None
        with self._trying():
            try:
                try_state(self._module, self._load, model, recording, self._stream, held)
            except NOT_RECORDED as error:
                _log.info("load_weights cannot be replaced as the module is now: %s", error)
                raise has_changed(self._module, found.change) from error
        tell_of_trial(self._module, found.change, start)

    def _learn(
        self, model: _core.Layout, facts: _Model, before: ModuleState, wrapped: str
    ) -> bytes:
        self._load = self.method()
        refuted = self.recording.refuted if self.recording is not None else ""
        self.recording, self._chosen = None, ModuleLoader(self._module, self._load)
        self._layout, self.reason = model, ""
        self._went_by = self.goes_by()
        try:
            if refuted or wrapped:
                raise RecordingError(refuted or wrapped)
            with before.unless_done():  # the loader goes by what it keeps of made-up tensors
                recording = self._record(model, before)
        except (ClashError, OtherFormError, SharedError) as error:
            self.reason = str(error)
            raise
        except NOT_RECORDED as error:
            self.reason = f"{type(self._module).__name__} cannot be learnt: {error}"
            self._chosen = UnlearntLoader(self._module, self._load, model)
            how = ", all in one call" if self._chosen.at_once else ""
            _log.warning("%s; whole tensors go through its load_weights%s", self.reason, how)
            return WHOLE
        self.check_delivered(recording.lacking, recording.skipped)
        self.recording, self._model = recording, facts
        self._chosen = _Replay(
            self._module, self._load, recording, facts, self._stream, self._threads
        )
        self._tell(recording)
        return self._chosen.blob() if self._needed else WHOLE

    def check_private(self) -> None:
        """Raises LayoutError, by name, where the module has memory of a trainer: made-up values are
        written there.  One of this process may have given it its weights without a copy, and what
        another one sends by torch.multiprocessing is shared."""
        if self._spoils:
            raise _core.LayoutError(self._spoils)
        try:
            held = ModuleMemory(self._module)
        except _core.LayoutError:  # recording says it
            return
        paths = [held.name(area, 0) for area in range(len(held.areas))]
        spans = list(held.spans())
        for path, _, part in wrapped_tensors(self._module):
            found_places = places_of(part)
            paths += [path] * len(found_places)
            spans += [(place.start, place.end - place.start) for place in found_places]
        maps = SharedMaps()
        try:
            places = maps.find(spans)
        finally:
            maps.close()
        shared = [place is not None for place in places]
        for found, what in (
            (is_sent(spans), "is memory that a trainer of this process sends from"),
            (shared, "lies in shared memory, as what torch.multiprocessing sends does"),
        ):
            names = [path for path, hit in zip(paths, found, strict=True) if hit]
            if names:
                raise _core.LayoutError(
                    f"{listed(names)}: of {type(self._module).__name__}, {what}; learning writes "
                    "there, and whose memory it also is would lose its weights: load into a copy "
                    "(copy.deepcopy)"
                )

    def check_delivered(self, lacking: Mapping[str, int], unused: Sequence[str] = ()) -> None:
        """Raises MissingError for parameters that lack bytes.  unused: tensors of the trainer."""
        sizes = {path: tensor.nbytes for path, tensor in self._module.named_parameters()}
        names = {name: group for group in ModuleMemory(self._module).tied() for name in group}
        missing = []
        for path, nbytes in lacking.items():
            size = sizes.get(path, nbytes)
            group = names.get(path, [path])
            stays, patterns = any(map(self._stays, group)), list(map(self._named_by, group))
            pattern = next(filter(None, patterns), "")
            if stays and (nbytes == size or not pattern or not {*patterns}.isdisjoint(group)):
                continue
            part = f", of which {pattern!r} lets no part stay, as its full name would"
            part = part if stays else ""
            missing.append(f"{path} ({nbytes} of its {size} bytes{part})")
        if missing:
            instead = f", and none of {listed(unused)} is made use of" if unused else ""
            raise MissingError(
                f"{type(self._module).__name__}: no tensor of the trainer is loaded to "
                f"{listed(missing)}{instead}; {KEEP} or RecordedLoader(ignore=...) names what is "
                "to stay as it is"
            )

    def _stays(self, path: str) -> bool:
        return bool(self._named_by(path))

    def _named_by(self, path: str) -> str:
        """The name, or else the pattern, by which a parameter is to stay as it is; or ""."""
        patterns = [pattern.strip() for pattern in self._ignore]
        if path in patterns:
            return path
        return next((each for each in patterns if fnmatch.fnmatchcase(path, each)), "")

    def goes_by(self) -> object:
        """What load_weights depends on outside the module and may change; for subclasses."""
        return None

    def facts(self) -> dict[str, Any]:
        """What has been learnt, for wsync.inspection."""
        module = type(self._module).__name__
        if self.recording is None:
            return {"module": module, "unlearnt": self.reason or _NOT_ASKED}
        return {"module": module, **self.recording.describe(self._model)}

    @property
    def own_loading(self) -> str:
        """Which tensors go through load_weights as it is, and why; "" for none."""
        if self.recording is None:
            return self.reason and f"all tensors: {self.reason}"
        computed = _computed(self.recording)
        return f"{listed(computed)}: {next(iter(computed.values()))}" if computed else ""

    def begin(self, rounds: int) -> None:
        if self._spoils:
            raise _core.LayoutError(self._spoils)
        if change := self._stale():
            raise has_changed(self._module, change)
        if isinstance(self._chosen, UnlearntLoader):
            self._chosen.begin(rounds, self._trying)
            return
        try:
            super().begin(rounds)
        except UntriedError as error:
            self._try_as_it_is(error.found)
            super().begin(rounds)

    def finish(self, timeout: float) -> Receipt:
        receipt = super().finish(timeout)
        unlearnt = self._chosen if isinstance(self._chosen, UnlearntLoader) else None
        if unlearnt is not None and (lacking := unlearnt.not_loaded()):
            self.check_delivered(lacking)
        if self._after is not None:
            self._after(self._module)
        if unlearnt is not None:
            unlearnt.note_left()
        return receipt

    def method(self) -> LoadWeights:
        """The module's load_weights as it is now, unless another one was given; for subclasses."""
        method = self._given
        if method is None:
            method = getattr(self._module, "load_weights", None)
        if method is None:
            name = type(self._module).__name__
            raise _core.LayoutError(f"{name} has no load_weights to learn from")
        return method

    def _stale(self) -> str:
        """What load_weights goes by that no recording knows of, and that has changed; or ""."""
        method = self.method()
        if self._load != method == self.method():  # some are made anew each time
            return "load_weights is another one"
        if self.recording is None or self.goes_by() == self._went_by:
            return ""
        return "load_weights goes by something outside the module that has other values"

    def _record(self, layout: _core.Layout, before: ModuleState) -> Recording:
        """before: what the attributes are before load_weights is tried."""
        with contextlib.ExitStack() as kept:
            return self._record_and_keep(layout, before, kept)

    def _record_and_keep(
        self, layout: _core.Layout, before: ModuleState, kept: contextlib.ExitStack
    ) -> Recording:
        """kept: puts back what no update replaces, whether this succeeds or not."""
        with (
            attributes_read(self._module) as attributes,
            attributes_set(self._module) as places,
        ):
            recording, left = self._watch(layout, attributes, places, kept)
        if recording.fallback and before.plain.restore():
            # what is made of values comes again with real ones; for the rest, which comes no more,
            # these do
            self._load_rest(layout, recording, attributes)
            if difference := ModuleMemory(self._module).difference(recording.facts):
                raise RecordingError(f"while loading, {difference}")
        recording.guard(attributes, left, ModuleMemory(self._module))
        return recording

    def _load_rest(
        self, layout: _core.Layout, recording: Recording, attributes: list[Attribute]
    ) -> None:
        """Loads made-up tensors, all but the fallbacks.  RecordingError where that goes by
        attributes that fallbacks set: in an update these come when all else has been copied.

        attributes: those that loading goes by, as they are when everything has been loaded.
        """
        model, parts = MadeUpModel(layout), dict(self._module.named_modules())
        names = frozenset(name for name, *_ in model.tensors) - recording.fallback.keys()
        forms = Forms(parts)
        before = [each.renewed(forms) for each in attributes]
        with attributes_read(self._module) as read:
            load_made_up(self._load, model, names)
        gone_by = {each.place for each in read}
        for whole, earlier in zip(attributes, before, strict=True):
            if whole.place not in gone_by or earlier.difference(parts):
                continue  # not read, or set by what is copied itself
            if change := whole.difference(parts):
                raise RecordingError(f"{change} without {listed(recording.fallback)}")

    def _watch(
        self,
        layout: _core.Layout,
        attributes: list[Attribute],
        places: Callable[[], set[AttributePlace]],
        kept: contextlib.ExitStack,
    ) -> tuple[Recording, LeftValues]:
        """places: says which attributes load_weights sets or removes."""
        model = MadeUpModel(layout)
        try:
            recording = record(self._module, self._load, model)
        except RebindsError:
            # perhaps tensors that it makes when there are none
            kept.enter_context(ModuleState(self._module, values=True).unless_done())
            load_made_up(self._load, model)
            recording = record(self._module, self._load, model)
        held = ModuleMemory(self._module)
        kept.enter_context(KeptRegions(held, recording.not_copied()).put_back())
        held.check_place(recording.areas)
        aside = sum(n for name, _, _, _, n in model.tensors if name in recording.fallback)
        if 2 * aside > model.nbytes:
            name, reason = next(iter(recording.fallback.items()))
            raise RecordingError(f"most of it is no copy; {name}: {reason}")
        # what the first load has set may stay as it is from then on
        parts = dict(self._module.named_modules())
        forms = Forms(parts)
        attributes[:] = [attribute.renewed(forms) for attribute in attributes]
        # other values: what a hidden write left while recording must not look right
        other = MadeUpModel(layout, seed=1)
        left = LeftValues(places(), parts)
        verify(self._module, self._load, other, recording, self._stream, held)
        return recording, left.common(LeftValues(places(), parts))

    def _tell(self, recording: Recording) -> None:
        for name, reason in _computed(recording).items():
            _log.warning("%s goes through load_weights: %s", name, reason)
        sizes = {path: tensor.nbytes for path, tensor in self._module.named_parameters()}
        for path, nbytes in recording.unwritten:
            # padding and buffers often stay unwritten, a whole parameter seldom
            level = logging.WARNING if sizes.get(path) == nbytes else logging.INFO
            _log.log(level, "%s: nobody writes %d of its bytes", path, nbytes)


def _computed(recording: Recording) -> dict[str, str]:
    """The tensors that load_weights computes with, and how."""
    return {name: why for name, why in recording.fallback.items() if not is_note(name)}


def _made_in(recording: Recording) -> list[Made]:
    """What a replay, and load_weights with what it computes, write to the module's areas."""
    copies = ((t.area, t.move) for t in (*recording.fills, *recording.copies))
    made = ((area, move) for area, moves in recording.made.items() for move in moves)
    names = AreaNames(recording.facts)
    spans = ((area, *move.span()) for area, move in (*copies, *made))
    return [Made(names.at(area, low)[-1], area, low, high) for area, low, high in spans]


class _Replay(RoutedLoader):
    """Does what a recording says with the tensors of a module, wherever they lie by then.

    model: the facts of what the trainer delivers.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: LoadWeights,
        recording: Recording,
        model: _Model,
        stream: _core.Stream,
        threads: int,
    ) -> None:
        super().__init__(stream, threads)
        self.module = module
        self.load_weights = load
        self.recording = recording
        by_name = {fact.name: fact for fact in model}
        # in the order in which they were tried: one may go by another
        self.aside = [fact for fact in model if fact.name in recording.fallback]
        self.layout = self._destination({name: fact.shape for name, fact in by_name.items()})
        self.written = frozenset(recording.areas)
        self._made = _made_in(recording)
        self._held: ModuleMemory | None = None
        self.state = KnownState()  # that the update has found the module in
        # the shapes that the loader has loaded, and what came of them
        self._notes: tuple[torch.Tensor, list[int]] | None = None

    def blob(self) -> bytes:
        return self.layout.to_bytes()

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        self._aim(self._find())

    def _find(self) -> _Filling:
        """The module's tensors where they are now."""
        former, self._held = self._held, None
        found = Found(self.module, self.recording, former)
        held = found.held
        if found.triable:
            raise UntriedError(self.module, found)
        if found.state is None or held is None:
            raise has_changed(self.module, found.change)
        if held is not former:
            held.check_place(self.recording.areas)
        self._held, self.state = held, found.state
        return _Filling(self, held, found.memory)

    def load_aside(self, staged: list[tuple[str, torch.Tensor]]) -> None:
        """Has the loader load what is its own.  Shapes of packed tensors are the same each time:
        of a model of experts these are as many calls of its functions as there are tensors.  They
        are loaded again where the engine has others by now than the loader left."""
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

    def _load_own(self, staged: list[tuple[str, torch.Tensor]]) -> None:
        """Raises StateError where the loader, which may go by values, does something else than it
        was seen to do with made-up ones: the copies are done."""
        recording, held = self.recording, self._held
        assert held is not None
        with WatchedWrites(held) as watched:
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


class _Filling:
    """The module's tensors while one update fills them, and what is kept beside for the loader,
    and to be compared."""

    def __init__(self, replay: _Replay, held: ModuleMemory, memory: Any) -> None:
        self._replay = replay
        self._held = held
        self._memory: Any = memory  # is kept
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
        self._memory = []
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
                raise _core.LayoutError(
                    f"{where}: {twin.name} and {twin.other} are both loaded there, and bring "
                    "different values"
                )
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
