"""States of a module in which load_weights is known to leave the weights that a replay leaves.

Serving sets flags and fills caches that load_weights may look at before it resets them.  Whether it
goes by them is tried: on made-up tensors, with the module as it was found.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from wsync._core import Layout, StateError, Stream
from wsync.engine.learn.attributes_read import Attribute, AttributeGuards, attributes_read
from wsync.engine.learn.attributes_set import LeftValues, attributes_set
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.forms_of_values import AttributePlace
from wsync.engine.learn.module_memory import ModuleMemory, bound_tensors
from wsync.engine.learn.module_state import KeptRegions, ModuleState
from wsync.engine.learn.recorder import looks_anew
from wsync.engine.learn.recording import KnownState, Recording, RecordingError
from wsync.engine.learn.verify import check_gaps, load_made_up, sums_of_gaps, verify
from wsync.engine.ring_loaders import LoadWeights

Trying = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes what is around trials of load_weights, which write made-up values to the module."""
MOST_STATES: Final = 16  # that are remembered, besides the first

_log = logging.getLogger(__name__)


class Found:
    """A module as an update finds it.  What it has cached is dropped if its state is known.

    state: the known one, or None.  change: how it differs from the first one, if it is not known.
    triable: whether only attributes and caches differ.  held, memory: its tensors, but for caches,
    where its state is known or can be tried.
    """

    def __init__(
        self, module: torch.nn.Module, recording: Recording, former: ModuleMemory | None = None
    ) -> None:
        self.state: KnownState | None = None
        self.change = ""
        self.triable = False
        self._module, self._recording = module, recording
        self.held = former
        self.memory: Any = former.kept() if former is not None else None
        if former is not None and self.memory is not None:
            parts = former.parts
        else:
            parts = dict(module.named_modules())
        for state in recording.states:
            if state.before.hold(parts) and not self._look_without(state.left.drop_caches(parts)):
                self.state = state
                return
        changed = recording.states[0].before.difference(parts)
        self.change = self._look() or changed
        with _without_others(module, {fact[0] for fact in recording.facts}):
            self.triable = not self._look_anew()

    def _look_without(self, put_back: Callable[[], None] | None) -> str:
        """The same now that caches have been dropped, which are put back if tensors differ."""
        if put_back is None:
            return self._look()
        change = "unknown"
        try:
            change = self._look_anew()
        finally:
            if change:
                put_back()
                self.memory = None  # it was that of a module without caches
        return change

    def _look_anew(self) -> str:
        self.memory = self.held.kept() if self.held is not None else None
        return self._look()

    def _look(self) -> str:
        """How tensors, and values of these, differ now."""
        held, recording = self.held, self._recording
        if held is None or self.memory is None:
            held = ModuleMemory(self._module)
            if change := held.difference(recording.facts, recording.names):
                return change
            self.held, self.memory = held, held.memory()
        return recording.stale(held)


def has_changed(module: torch.nn.Module, change: str, trial: str = "") -> StateError:
    """trial: why load_weights could not be replaced when it was tried with that."""
    lost = f", with which load_weights cannot be replaced ({trial}); its weights are lost"
    return StateError(
        f"{type(module).__name__} has changed since it was learnt: {change}"
        f"{lost if trial else ''}; the next update learns it anew"
    )


def tell_of_trial(module: torch.nn.Module, change: str, start: float) -> None:
    """start: when it began, as of time.perf_counter."""
    _log.warning(
        "%s: its load_weights was tried once more, in %.1f s, and loads the same as before "
        "although %s; what has another value at each update costs that at each",
        type(module).__name__,
        time.perf_counter() - start,
        change,
    )


@contextlib.contextmanager
def _without_others(module: torch.nn.Module, known: set[str]) -> Iterator[None]:
    """Tensors that were not known are out of the module meanwhile."""
    found = [bound for bound in bound_tensors(module) if bound[0] not in known]
    for _, slot, name, _ in found:
        slot[name] = None
    try:
        yield
    finally:
        for _, slot, name, tensor in found:
            slot[name] = tensor


def try_state(
    module: torch.nn.Module,
    load: LoadWeights,
    model: Layout,
    recording: Recording,
    stream: Stream,
    held: ModuleMemory,
) -> None:
    """Adds a module's state to those that a recording knows.  The module's weights are lost, its
    attributes are left.

    held: what it holds, but for caches.

    Raises:
        RecordingError: load_weights does something else in that state, or leaves what an update
            cannot leave.  If it then has the module as it was recorded, and will do so again, the
            recording is refuted.
    """
    found, trial = ModuleState(module, values=False), _Trial(module, recording)
    undone = None  # known only until what was found is restored
    with KeptRegions(held, recording.not_copied()).put_back(), found.put_back():
        try:
            unwritten = sums_of_gaps(held, recording)
            looks = looks_anew(module, load, MadeUpModel(model), held, recording)
            found.restore()
            with attributes_read(module) as read, attributes_set(module) as places:
                load_made_up(load, MadeUpModel(model))
                check_gaps(held, recording, unwritten)
                left = trial.left(places())
                found.restore()
                verify(module, load, MadeUpModel(model, seed=1), recording, stream, held)
                left = left.common(trial.left(places()))
                if looks:
                    raise RecordingError(looks)
            undone = trial.undone()
            state = trial.state(read, left, found)
        except RecordingError as error:
            if trial.undone() if undone is None else undone:
                recording.refuted = f"{trial.change}, which it resets: {error}"
            raise
    recording.states[MOST_STATES:] = []
    recording.states.insert(1, state)


class _Trial:
    """The attributes of a module before, while and after load_weights is tried.

    change: how they differ from what they were when it was recorded.
    """

    def __init__(self, module: torch.nn.Module, recording: Recording) -> None:
        self._module, self._facts = module, recording.facts
        self._parts = dict(module.named_modules())
        self._first = recording.states[0].before
        self._found = self._first.renewed(self._parts)
        self.change = self._first.difference(self._parts) or "what it caches is new"
        # those that are other than in the first state
        self._others = {
            each.place for each in self._first.attributes if each.difference(self._parts)
        }

    def left(self, places: set[AttributePlace]) -> LeftValues:
        """What a load has left, which sets or removes the attributes at these places.
        RecordingError where that is neither what was found nor what was recorded."""
        reset = set(self._others)
        for was, now in zip(self._first.attributes, self._found.attributes, strict=True):
            if now.place in reset and not now.difference(self._parts):
                reset.discard(now.place)
            elif change := was.difference(self._parts):
                raise RecordingError(f"{change} when it has loaded")
        return LeftValues(places, self._parts, reset)

    def undone(self) -> bool:
        """Whether the module is again what was recorded."""
        tensors = ModuleMemory(self._module).difference(self._facts)
        return not tensors and self._first.hold(self._parts)

    def state(self, read: list[Attribute], left: LeftValues, found: ModuleState) -> KnownState:
        """What is known when load_weights has read these attributes, too.  RecordingError where an
        update cannot leave what it has left."""
        parts, known = self._parts, {each.place for each in self._first.attributes}
        loaded = self._first.renewed(parts, read)
        found.restore()
        before = self._found.renewed(parts, read)
        left.drop_caches(parts)
        left.put_back(parts)
        other = [each for each in loaded.attributes if each.difference(parts)]
        change = ModuleMemory(self._module).difference(self._facts) or next(
            (each.difference(parts) for each in other if each.place in known), ""
        )
        if change:
            raise RecordingError(f"no update leaves what it leaves: {change}")
        # what a load changes is no condition for what there is after the next one
        same = [each for each in loaded.attributes if each not in other]
        return KnownState(before, AttributeGuards(same, parts), left)
