"""A loader that learns what an engine's load_weights does, and then does it without Python."""

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
from wsync.engine.post_load import in_place, run_in_place
from wsync.engine.ring_loaders import (
    CallingLoader,
    ChoosingLoader,
    Held,
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
    "no trainer has asked what the worker keeps; buckets, broadcasts and files need no answer"
)


class RecordedLoader(ChoosingLoader):
    """Replaces a module's load_weights by one list of copies.

    When a trainer lists its tensors for the first time, load_weights is called a few times with
    tensors whose values number their elements.  The numbers in the module then tell where
    load_weights puts the elements, and random values prove it.  If load_weights computes with some
    tensors, it still gets these tensors, in one call after every round has arrived.  If copies
    cannot replace load_weights, it gets all tensors in one call, as when the engine starts; then
    `reason` says why.  What load_weights does must not depend on the module's weights, which are
    lost while wsync learns it.

    At each update the module must have the same tensors, but their addresses may be others.  For a
    sample of tensors, load_weights must write to the same places as before.  Otherwise the update
    fails before it has written anything, and the next update learns load_weights anew.

    If the trainer does not deliver a parameter completely, an error names the parameter, because it
    would keep old values.  If a tensor has two names and the trainer delivers different values
    under them, an error names them, too.  If load_weights writes several other tensors to one
    place, the last one stays there.

    ignore: shell patterns ("visual.*") for the paths of parameters that the trainer does not have,
    or has only in part.  What the trainer lacks stays as it is.  The environment variable
    WSYNC_KEEP adds patterns, separated by commas, for engines that make their loader themselves.
    needed: whether the trainer is asked only for the elements that the module keeps, and not for
    whole tensors.
    after: is called with the module when everything is loaded.  StateError if it changes a tensor's
    dtype or shape.
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
        self._model: _Model = []  # the tensors that the trainer delivers
        self._depended_on: object = None
        self._chosen: Loader = CallingLoader(module, self._load)

    def blob(self) -> bytes:
        return LEARN

    def learn(self, model: _core.Layout, on_weights_lost: OnWeightsLost = ignore_loss) -> bytes:
        """Learns what the module keeps of a model's tensors, and returns it as a blob.

        If this model was not learnt before, the module's weights are lost.

        Raises:
            LayoutError: the module does not take what the trainer delivers.
            StateError: a parameter of the module has no memory now.
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
            name = type(self._module).__name__
            self.reason = f"copies cannot replace the load_weights of {name}: {error}"
            self.check_delivered(_lacking(LoadTargets(self._module), error.pieces))
            text = "%s (load_weights gets all tensors in one call: %.1f GB of host memory)"
            _log.warning(text, self.reason, sum(source.nbytes for source in sources) / 1e9)
            names = [source.name for source in sources]
            self._chosen = CallingLoader(self._module, self._load, at_once=names)
            return WHOLE
        unused = sorted({source.name for source in sources} - learnt.does.used)
        self.check_delivered(_lacking(learnt.memory, learnt.does.unwritten), unused)
        replay = ReplayLoader(learnt, self._stream, self._threads, on_weights_lost)
        self.learnt, self._model, self._chosen = learnt, facts, replay
        for name, reason in self.computed().items():
            _log.warning("%s goes through load_weights: %s", name, reason)
        return replay.blob() if self._needed else WHOLE

    def _is_current(self) -> bool:
        """Whether load_weights still does what was learnt."""
        if not isinstance(self._chosen, ReplayLoader) or self.stale():
            return False
        try:
            self._chosen.check()
        except _core.StateError as error:
            _log.info("%s", error)
            return False
        return True

    def _learn(self, memory: LoadTargets, sources: Sequence[Source]) -> LearntModule:
        """Learns what load_weights does.

        Raises:
            NotLearntError: copies cannot replace load_weights.
            NotTakenError: load_weights does not take what the trainer delivers.
        """
        if wrapped := wrapped_parameters(self._module):
            why = "these parameters have no memory of their own, because they wrap other tensors"
            raise NotLearntError(f"{why}: {listed(wrapped)}")
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
                break  # load_weights has made no new tensors
        refuse_conversions(self._module, load, memory, sources, does)
        _check_share(sources, does)
        same_place = _same_places(memory, sources, does)
        return LearntModule(self._module, self._load, memory, sources, does, same_place)

    def check_delivered(self, lacking: Mapping[str, int], unused: Sequence[str] = ()) -> None:
        """Raises MissingError if parameters lack bytes, unless they may stay as they are.

        lacking: the number of missing bytes, by path.  unused: the trainer's tensors that the
        module does not use.
        """
        sizes = {path: t.numel() * t.element_size() for path, t in self._module.named_parameters()}
        missing = [
            f"{path} ({nbytes} of its {sizes.get(path, nbytes)} bytes)"
            for path, nbytes in lacking.items()
            if not self.stays(path)
        ]
        if missing:
            instead = (
                f", and load_weights uses none of the delivered {listed(unused)}" if unused else ""
            )
            raise MissingError(
                f"{type(self._module).__name__}: the trainer delivers nothing for "
                f"{listed(missing)}{instead}; if these parameters may stay as they are, list "
                f"them in {KEEP} or RecordedLoader(ignore=...){unfused(unused)}"
            )

    def stays(self, path: str) -> bool:
        """Whether a parameter may keep elements that nothing is loaded to.  Subclasses may extend
        this."""
        return any(fnmatch.fnmatchcase(path, pattern.strip()) for pattern in self._ignore)

    def depends_on(self) -> object:
        """Returns a value for what load_weights depends on outside the module.  If the value
        changes, load_weights is learnt anew.  Subclasses may override this."""
        return None

    def computed(self) -> dict[str, str]:
        """Returns the tensors that load_weights computes with, each with the reason."""
        if self.learnt is None:
            return {}
        targets = self.learnt.memory.targets
        return {
            name: f"{targets[piece.target].path} is not a copy of it"
            for name, piece in self.learnt.does.computed.items()
            if not is_note(name)
        }

    def facts(self) -> dict[str, Any]:
        """Returns what was learnt, for wsync.inspection."""
        module = type(self._module).__name__
        if self.learnt is None:
            return {"module": module, "unlearnt": self.reason or _NOT_ASKED}
        return {"module": module, **self.learnt.describe(), "fallbacks": self.computed()}

    @property
    def own_loading(self) -> str:
        """Says which tensors load_weights itself loads, and why.  Returns "" if there are none."""
        if self.learnt is None:
            return self.reason and f"all tensors: {self.reason}"
        computed = self.computed()
        return f"{listed(computed)}: {next(iter(computed.values()))}" if computed else ""

    def begin(self, rounds: int) -> None:
        try:
            if change := self.stale():
                raise has_changed(type(self._module).__name__, change)
            super().begin(rounds)
        except _core.StateError:
            self._model = []  # the next update learns it anew
            raise

    def held(self) -> Held:
        if self.learnt is None:
            raise _core.StateError(f"nothing was learnt: {self.reason or _NOT_ASKED}")
        if change := self.stale():
            raise has_changed(type(self._module).__name__, change)
        return super().held()

    def finish(self, timeout: float) -> Receipt:
        receipt = super().finish(timeout)
        if self._after is not None:
            after = self._after
            run_in_place(self._module, lambda: after(self._module))
        return receipt

    def method(self) -> LoadWeights:
        """Returns the load_weights that was given, or else the module's present one.  Subclasses
        may override this."""
        method: LoadWeights | None = self._given or getattr(self._module, "load_weights", None)
        if method is None:
            name = type(self._module).__name__
            raise _core.LayoutError(f"{name} has no method load_weights, and none was given")
        return method

    def stale(self) -> str:
        """Says what has changed so that load_weights must be learnt anew; "" if nothing has."""
        method = self.method()
        # a method that is made anew at each access differs from itself, and is not compared
        if self._load != method == self.method():
            return "load_weights was replaced"
        if self.depends_on() != self._depended_on:
            return "values that load_weights uses have changed, such as the places of experts"
        return ""


def _same_places(
    memory: LoadTargets, sources: Sequence[Source], does: LearntLoad
) -> dict[str, str]:
    """Returns the tensors that load_weights skips although the module has them, by the tensors that
    are loaded instead.

    The module has one tensor under both names, for example a tied head and its embedding.  The
    trainer must deliver the same values under both names.
    """
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
    """Returns, by path, how many bytes of parameters nothing is loaded to."""
    tensors, lacking = memory.tensors(), Counter[str]()
    for piece in pieces:
        target = memory.targets[piece.target]
        if piece.why == UNWRITTEN and target.parameter:
            lacking[target.path] += piece.view(tensors).nbytes
    return lacking


def _check_share(sources: Sequence[Source], does: LearntLoad) -> None:
    """Raises NotLearntError if load_weights computes with most of the bytes that it loads."""
    sizes = {source.name: source.nbytes for source in sources}
    if 2 * sum(sizes[name] for name in does.computed) > sum(sizes.values()):
        most = f"most of the bytes, such as those of {next(iter(does.computed))}"
        raise NotLearntError(f"load_weights computes with {most}", does.unwritten)
