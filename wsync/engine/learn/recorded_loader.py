"""A loader that learns what an engine's load_weights does, and does it without Python."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from wsync import _core
from wsync.engine.destination import MissingError
from wsync.engine.learn.attributes_read import Attribute, attributes_read
from wsync.engine.learn.attributes_set import LeftValues, attributes_set
from wsync.engine.learn.bounded_call import NotEndedError
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.forms_of_values import AttributePlace, Forms, finder
from wsync.engine.learn.known_states import Found, has_changed
from wsync.engine.learn.module_memory import (
    ModuleMemory,
    SharedError,
    check_python,
    without_strides,
    wrapped_tensors,
)
from wsync.engine.learn.module_state import KeptRegions, ModuleState, NotPutBackError
from wsync.engine.learn.quantisation_mismatch import NotTakenError
from wsync.engine.learn.recorder import RebindsError, record
from wsync.engine.learn.recording import NOT_RECORDED, ClashError, Recording, RecordingError
from wsync.engine.learn.replay_loader import ReplayLoader
from wsync.engine.learn.rows_of_weights import made_of_rows
from wsync.engine.learn.unlearnt_loader import UnlearntLoader
from wsync.engine.learn.verify import load_made_up, verify
from wsync.engine.ring_loaders import (
    ChoosingLoader,
    Loader,
    LoadWeights,
    Losing,
    ModuleLoader,
    Receipt,
    keeps,
    loading_stream,
)
from wsync.machine import device
from wsync.machine.process_maps import SharedMaps
from wsync.machine.sent_memory import WrittenError, is_sent, unwritten
from wsync.messages.control import LEARN, WHOLE
from wsync.module_tensors.names_in_messages import listed, unfused
from wsync.module_tensors.places import places_of
from wsync.module_tensors.quantised_names import is_note
from wsync.module_tensors.value_forms import pattern

KEEP: Final = "WSYNC_KEEP"

_log = logging.getLogger(__name__)
_Model = list[_core.TensorInfo]
_NOT_ASKED: Final = (
    "no trainer has asked for it yet; updates by buckets, broadcasts or files go without"
)


class ComputesError(RecordingError):
    """Most of what the loader does is no copy.

    rivals: tensors that it writes over each other, as Recording has them.
    """

    def __init__(self, text: str, rivals: Iterable[tuple[str, str]]) -> None:
        super().__init__(text)
        self.rivals = tuple(rivals)


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
        self._model: _Model = []  # the facts of what the trainer delivers
        self._losing: Losing = keeps
        self._went_by: object = None
        self._bound: _core.Pattern | None = None
        self._rows: set[str] = set()  # what forward has made of weights, as far as it is known
        self._told: set[str] = set()
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
            self.note_rows()
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
        except (WrittenError, NotPutBackError, NotEndedError) as error:
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

    def _learn(
        self, model: _core.Layout, facts: _Model, before: ModuleState, wrapped: str
    ) -> bytes:
        self._load = self.method()
        refuted = self.recording.refuted if self.recording is not None else ""
        self.recording, self._chosen = None, ModuleLoader(self._module, self._load)
        self.reason = ""
        self._went_by, self._bound = self.goes_by(), None
        bound = self._what_it_is_bound_to()
        try:
            if refuted or wrapped:
                raise RecordingError(refuted or wrapped)
            # the loader goes by what it keeps of made-up tensors
            with before.unless_done(), contextlib.ExitStack() as kept:
                recording = self._record(model, before, kept)
        except (ClashError, NotTakenError, SharedError) as error:
            self.reason = str(error)
            raise
        except NOT_RECORDED as error:
            self.reason = f"{type(self._module).__name__} cannot be learnt: {error}"
            rivals = error.rivals if isinstance(error, ComputesError) else ()
            self._chosen = UnlearntLoader(self._module, self._load, model, rivals)
            how = ", all in one call" if self._chosen.at_once else ""
            _log.warning("%s; whole tensors go through its load_weights%s", self.reason, how)
            return WHOLE
        self.check_delivered(recording.lacking, recording.skipped)
        self.recording, self._model = recording, facts
        # what it changes itself says nothing: calls that it counts
        self._bound = bound if bound.match(self._load) is not None else None
        self._chosen = ReplayLoader(
            self._module, self._load, recording, model, self._stream, self._threads
        )
        self._tell(recording)
        return self._chosen.blob() if self._needed else WHOLE

    def check_private(self) -> None:
        """Raises LayoutError, by name, where the module has memory of a trainer: made-up values are
        written there.  One of this process may have given it its weights without a copy, and what
        another one sends by torch.multiprocessing is shared.  StateError for weights without
        memory."""
        if self._spoils:
            raise _core.LayoutError(self._spoils)
        try:
            held = ModuleMemory(self._module)
        except _core.LayoutError:  # recording says it
            return
        paths = [area.path for area in held.areas]
        if asleep := held.weights.difference(held.awake(held.weights)):
            raise _core.StateError(
                f"{listed(paths[area] for area in sorted(asleep))}: no memory of a GPU lies there, "
                "as while an engine sleeps: wake its weights before the update"
            )
        spans = list(held.spans())
        for path, _, part in wrapped_tensors(self._module):
            found_places = places_of(part)
            paths += [path] * len(found_places)
            spans += [(place.start, place.end - place.start) for place in found_places]
        with contextlib.closing(SharedMaps()) as maps:
            shared = [place is not None for place in maps.find(spans)]
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
                f"to stay as it is{unfused(unused)}"
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
        if isinstance(self._chosen, ReplayLoader | UnlearntLoader):
            self._chosen.begin(rounds, self._trying)
        else:
            super().begin(rounds)

    def finish(self, timeout: float) -> Receipt:
        receipt = super().finish(timeout)
        unlearnt = self._chosen if isinstance(self._chosen, UnlearntLoader) else None
        if unlearnt is not None and (lacking := unlearnt.not_loaded()):
            self.check_delivered(lacking)
        if self._after is not None:
            with unlearnt.loading() if unlearnt is not None else contextlib.nullcontext():
                self._after(self._module)
        if unlearnt is not None:
            unlearnt.note_left()
        self.tell_of_rows()
        return receipt

    def note_rows(self) -> None:
        """Notes what forward has made of weights, while these are there."""
        found = {path for path, made in made_of_rows(self._module) if made}
        self._rows |= found - self._told

    def tell_of_rows(self) -> None:
        """Warns, once, of what forward has made of former weights and keeps."""
        found = made_of_rows(self._module, self._rows) if self._rows else ()
        if old := {path for path, made in found if made is False}:
            self._rows, self._told = self._rows - old, self._told | old
            _log.warning(
                "%s: of %s, had been made of weights, and the update has not made it anew: a "
                "forward that keeps it answers by the former ones",
                listed(sorted(old)),
                type(self._module).__name__,
            )

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
        if self._bound is not None and self._bound.match(self._load) is None:
            return "what load_weights is bound to, as its closure or arguments, has other values"
        if self.recording is None or self.goes_by() == self._went_by:
            return ""
        return (
            "load_weights goes by something outside the module that has other values, as where "
            "experts were balanced"
        )

    def _what_it_is_bound_to(self) -> _core.Pattern:
        """The function, and what its closure and arguments that are given already hold."""
        parts = dict(self._module.named_modules())
        return pattern(Forms(parts).of(self._load), finder(parts))

    def _record(
        self, layout: _core.Layout, before: ModuleState, kept: contextlib.ExitStack
    ) -> Recording:
        """before: what the attributes are before load_weights is tried.  kept: puts back what no
        update replaces, whether this succeeds or not."""
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
            text = f"most of it is no copy; {name}: {reason}"
            raise ComputesError(text, recording.rivals)
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
