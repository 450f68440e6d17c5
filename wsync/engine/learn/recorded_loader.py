"""A loader that learns what an engine's load_weights does, and does it without Python."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from wsync import _core
from wsync.engine.destination import MissingError
from wsync.engine.learn.load_targets import LoadTargets, has_changed, wrapped_parameters
from wsync.engine.learn.made_up import MadeUpTensors, given_values
from wsync.engine.learn.mismatch import not_taken, refuse_conversions
from wsync.engine.learn.replay_loader import LearntModule, ReplayLoader
from wsync.engine.post_load import in_place
from wsync.engine.ring_loaders import (
    CallingLoader,
    ChoosingLoader,
    Loader,
    LoadWeights,
    OnWeightsLost,
    Receipt,
    ignore_loss,
    loading_stream,
)
from wsync.machine import device
from wsync.messages.control import LEARN, WHOLE
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import is_note, listed, unfused
from wsync.probing.learn import LearntLoad, NotLearntError, learn
from wsync.probing.numbering import Source
from wsync.probing.pieces import UNWRITTEN, PlacedBox
from wsync.probing.probe import RaisedError

KEEP: Final = "WSYNC_KEEP"

_log = logging.getLogger(__name__)
_Model = list[_core.TensorInfo]
_NOT_ASKED: Final = (
    "no trainer has asked for it yet; updates by buckets, broadcasts or files go without"
)


class RecordedLoader(ChoosingLoader):
    """Replaces a module's load_weights by one list of copies.

    When a trainer lists its tensors for the first time, load_weights is called a few times, with
    tensors whose values number their elements: what lies in the module then says where it puts
    them, and random values prove it.  Tensors that load_weights computes with still go through
    it, all together, when every round has arrived.  A loader that cannot be replaced gets all
    tensors in one call, as when its engine starts; `reason` is why.  What it does must not depend
    on the weights that the module holds: these are lost when it is learnt.

    At each update the module has to have the same tensors, wherever they lie, and load_weights has
    to put some of them where it put them before.  Otherwise the update fails before it has written
    anything, and the next one learns anew.

    Refused, by name, are parameters that the trainer does not deliver completely, because they
    would keep their old values, and different values for a tensor that has two names.  Of other
    tensors that load_weights writes to one place the last one stays there.

    ignore: shell patterns ("visual.*") for the paths of parameters that the trainer does not have,
    or has a part of, and that stay as they are.  The environment variable WSYNC_KEEP adds more,
    separated by commas, for engines that make their loader themselves.
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
        self.learnt: LearntModule | None = None
        self.reason = ""
        self._ignore = (*ignore, *filter(None, os.environ.get(KEEP, "").split(",")))
        self._needed = needed
        self._after = after
        self._threads = threads
        self._stream = loading_stream(device.of_module(module), threads)
        self._model: _Model = []  # the facts of what the trainer delivers
        self._depended_on: object = None
        self._chosen: Loader = CallingLoader(module, self._load)

    def blob(self) -> bytes:
        return LEARN

    def learn(self, model: _core.Layout, on_weights_lost: OnWeightsLost = ignore_loss) -> bytes:
        """Learns what the module keeps of a model's tensors, and returns it as a blob.

        The module's weights are lost, unless this model was learnt before.

        Raises:
            LayoutError: they do not take what the trainer delivers.
            StateError: they have no memory now.
        """
        facts = [model.tensor(index) for index in range(model.tensor_count)]
        if facts == self._model and self._is_current():
            return self._chosen.blob() if self._needed else WHOLE
        sources = [Source(name, dtype_of(dtype), shape) for name, dtype, shape, _ in facts]
        memory = LoadTargets(self._module)
        on_weights_lost()
        self._load, self._depended_on = self.method(), self.depends_on()
        self._model, self.learnt, self.reason = [], None, ""
        self._chosen = CallingLoader(self._module, self._load)
        try:
            learnt = self._learn(memory, sources)
        except NotLearntError as error:
            self.reason = f"{type(self._module).__name__} cannot be learnt: {error}"
            self.check_delivered(_lacking(LoadTargets(self._module), error.pieces))
            text = "%s; it gets all tensors in one call of its load_weights, %.1f GB of host memory"
            nbytes = sum(source.nbytes for source in sources)
            _log.warning(text, self.reason, nbytes / 1e9)
            names = [source.name for source in sources]
            self._chosen = CallingLoader(self._module, self._load, at_once=names)
            return WHOLE
        used = learnt.does.used
        unused = [source.name for source in sources if source.name not in used]
        self.check_delivered(_lacking(learnt.memory, learnt.does.unwritten), unused)
        replay = ReplayLoader(learnt, self._stream, self._threads, on_weights_lost)
        self.learnt, self._model, self._chosen = learnt, facts, replay
        for name, reason in self.computed().items():
            _log.warning("%s goes through load_weights: %s", name, reason)
        return replay.blob() if self._needed else WHOLE

    def _is_current(self) -> bool:
        """Whether what was learnt is still true."""
        if not isinstance(self._chosen, ReplayLoader) or self._stale():
            return False
        try:
            self._chosen.check()
        except _core.StateError as error:
            _log.info("%s", error)
            return False
        return True

    def _learn(self, memory: LoadTargets, sources: Sequence[Source]) -> LearntModule:
        """Raises NotLearntError, and NotTakenError."""
        if wrapped := wrapped_parameters(self._module):
            raise NotLearntError(f"{listed(wrapped)}: a wrapper around other tensors")
        given = given_values(sources)
        made = [MadeUpTensors(given, seed) for seed in (0, 1)]

        def load(pairs: Any) -> None:
            with in_place(self._module):
                self._load(pairs)
            for each in made:
                each.restore()

        values = made[0].of, made[1].of
        while True:
            try:
                does = learn(load, memory.tensors(), sources, given, values)
            except RaisedError as error:
                raise not_taken(self._module, sources, error) from error.error
            former, memory = memory, LoadTargets(self._module)
            if [target.path for target in memory.targets] == [t.path for t in former.targets]:
                break  # load_weights has made no further tensors
        refuse_conversions(self._module, load, memory, sources, does)
        _check_share(sources, does)
        same_place = _same_places(memory, sources, does)
        return LearntModule(self._module, self._load, memory, sources, does, same_place)

    def check_delivered(self, lacking: Mapping[str, int], unused: Sequence[str] = ()) -> None:
        """Raises MissingError for parameters that lack bytes.  unused: tensors of the trainer."""
        sizes = {path: t.numel() * t.element_size() for path, t in self._module.named_parameters()}
        missing = [
            f"{path} ({nbytes} of its {sizes.get(path, nbytes)} bytes)"
            for path, nbytes in lacking.items()
            if not self.stays(path)
        ]
        if missing:
            instead = f", and none of {listed(unused)} is made use of" if unused else ""
            raise MissingError(
                f"{type(self._module).__name__}: no tensor of the trainer is loaded to "
                f"{listed(missing)}{instead}; {KEEP} or RecordedLoader(ignore=...) names what is "
                f"to stay as it is{unfused(unused)}"
            )

    def stays(self, path: str) -> bool:
        """Whether what nothing is loaded to of a parameter is to stay as it is; for subclasses."""
        return any(fnmatch.fnmatchcase(path, pattern.strip()) for pattern in self._ignore)

    def depends_on(self) -> object:
        """What load_weights depends on outside the module and may change; for subclasses."""
        return None

    def computed(self) -> dict[str, str]:
        """The tensors that load_weights computes with, and what it makes of them."""
        if self.learnt is None:
            return {}
        targets = self.learnt.memory.targets
        return {
            name: f"{targets[piece.target].path} is no copy of it"
            for name, piece in self.learnt.does.computed.items()
            if not is_note(name)
        }

    def facts(self) -> dict[str, Any]:
        """What has been learnt, for wsync.inspection."""
        module = type(self._module).__name__
        if self.learnt is None:
            return {"module": module, "unlearnt": self.reason or _NOT_ASKED}
        return {"module": module, **self.learnt.describe(), "fallbacks": self.computed()}

    @property
    def own_loading(self) -> str:
        """Which tensors go through load_weights as it is, and why; "" for none."""
        if self.learnt is None:
            return self.reason and f"all tensors: {self.reason}"
        computed = self.computed()
        return f"{listed(computed)}: {next(iter(computed.values()))}" if computed else ""

    def begin(self, rounds: int) -> None:
        try:
            if change := self._stale():
                raise has_changed(type(self._module).__name__, change)
            super().begin(rounds)
        except _core.StateError:
            self._model = []  # it is learnt anew
            raise

    def finish(self, timeout: float) -> Receipt:
        receipt = super().finish(timeout)
        if self._after is not None:
            with in_place(self._module):
                self._after(self._module)
        return receipt

    def method(self) -> LoadWeights:
        """The module's load_weights as it is now, unless another one was given; for subclasses."""
        method: LoadWeights | None = self._given or getattr(self._module, "load_weights", None)
        if method is None:
            raise _core.LayoutError(
                f"{type(self._module).__name__} has no load_weights to learn from"
            )
        return method

    def _stale(self) -> str:
        """What load_weights goes by that has changed; or ""."""
        method = self.method()
        if self._load != method == self.method():  # some are made anew each time
            return "load_weights is another one"
        if self.depends_on() != self._depended_on:
            return "load_weights goes by something outside it, as where experts were balanced"
        return ""


def _same_places(
    memory: LoadTargets, sources: Sequence[Source], does: LearntLoad
) -> dict[str, str]:
    """The tensors that load_weights passes over because the module has them under two names, of
    which the other one is loaded: a tied head.  Both have to bring the same."""
    known = {source.name: source for source in sources}
    loaded = {piece.name for piece in does.pieces}
    unused = known.keys() - does.used
    same_place: dict[str, str] = {}
    for names in memory.names.values():
        one = next((name for name in names if name in loaded), "")
        for other in names:
            if one and other in unused and known[other][1:] == known[one][1:]:
                same_place.setdefault(one, other)
    return same_place


def _lacking(memory: LoadTargets, pieces: Iterable[PlacedBox]) -> dict[str, int]:
    """The bytes of parameters that nothing is loaded to."""
    tensors, lacking = memory.tensors(), Counter[str]()
    for piece in pieces:
        target = memory.targets[piece.target]
        if piece.why == UNWRITTEN and target.parameter:
            lacking[target.path] += piece.view(tensors).nbytes
    return lacking


def _check_share(sources: Sequence[Source], does: LearntLoad) -> None:
    """NotLearntError where most of what is loaded is computed."""
    sizes = {source.name: source.nbytes for source in sources}
    computed = sum(sizes[name] for name in does.computed)
    if 2 * computed > sum(sizes.values()):
        raise NotLearntError(
            f"most of it is no copy, as {next(iter(does.computed))}", does.unwritten
        )
