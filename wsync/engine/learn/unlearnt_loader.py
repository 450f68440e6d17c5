"""A loader for a load_weights that cannot be learnt, which is called with whole tensors."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from wsync._core import Layout
from wsync.engine.learn.attributes_read import Attribute, AttributeGuards, attributes_read
from wsync.engine.learn.forms_of_values import AttributePlace
from wsync.engine.learn.known_states import MOST_STATES, Trying, has_changed, tell_of_trial
from wsync.engine.learn.module_memory import wrapped_tensors
from wsync.engine.learn.recording import NOT_RECORDED
from wsync.engine.learn.verify import elements, first_that_makes_same, parameters, unloaded
from wsync.engine.learn.watched_writes import BeforeWrites
from wsync.engine.post_load import in_place
from wsync.engine.ring_loaders import LoadWeights, ModuleLoader, Twins
from wsync.module_tensors import checksum_of, dtype_of
from wsync.module_tensors.places import MemoryPlace, places_of

_log = logging.getLogger(__name__)


class UnlearntLoader(ModuleLoader):
    """Calls load_weights once a round, if made-up tensors that came one by one gave the same bytes
    as in one call, or else once an update, with copies of all tensors in host memory.

    Tensors that it binds anew are put into the memory that was there, which CUDA graphs read,
    unless made-up ones were other values there.

    It is tried when this is made; and when an update begins, if an attribute that it read has a
    value that it had neither when it was tried nor when it had loaded last.

    rivals: tensors that it is known to write over each other, which have to be equal.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: LoadWeights,
        model: Layout,
        rivals: Iterable[tuple[str, str]] = (),
    ) -> None:
        def load_in_place(pairs: list[tuple[str, torch.Tensor]]) -> Any:
            with in_place(module):
                return load(pairs)

        load_in_place.__qualname__ = getattr(load, "__qualname__", type(load).__qualname__)
        self._in_place = load_in_place
        self._module, self._direct, self._model = module, load, model
        with attributes_read(module) as read:
            self._load, self.at_once, self._doubtful = self._try()
        # what it has read: as it was tried, and as it left it last
        self._last = AttributeGuards(read).renewed(dict(module.named_modules()))
        self._tried = [self._last]
        self._before: dict[str, tuple[int, int]] = {}  # the update, what is doubtful
        self._written: set[MemoryPlace] = set()  # by operators of torch, in the update
        names = [model.tensor(index).name for index in range(model.tensor_count)]
        called = _watched(self._load, self._written) if self._unknown() else self._load
        super().__init__(module, called, at_once=names if self.at_once else ())
        twins: Twins = {}
        for one, other in rivals:
            first = one, dtype_of(model.tensor(names.index(one)).dtype)
            twins[one] = twins[other] = twins.get(one) or twins.get(other) or first
        self.compare(twins)

    def begin(self, rounds: int, trying: Trying = nullcontext) -> None:
        """trying: around a trial.  StateError where it does something else now than when it was
        tried first."""
        if change := self._changed_attribute():
            with trying():
                self._try_again(change)
        super().begin(rounds)
        self._before = self._doubted()
        self._written.clear()

    def note_left(self) -> None:
        """Attributes may stay as they are now that an update has been loaded."""
        if self._changed_attribute():
            self._last = self._last.renewed(dict(self._module.named_modules()))

    def _changed_attribute(self) -> str:
        """How an attribute differs from all that it was when load_weights was tried and when it
        loaded last; or ""."""
        parts, known = dict(self._module.named_modules()), [*self._tried, self._last]
        if any(guards.hold(parts) for guards in known):
            return ""
        values: dict[AttributePlace, list[Attribute]] = {}
        for each in itertools.chain.from_iterable(guards.attributes for guards in known):
            values.setdefault(each.place, []).append(each)
        for found in values.values():
            if all(changes := [each.difference(parts) for each in found]):
                return changes[-1]
        return ""

    def _try_again(self, change: str) -> None:
        start = time.perf_counter()
        with attributes_read(self._module) as read:
            load, at_once, doubtful = self._try()
        known = self._doubtful
        same = doubtful.keys() == known.keys() and all(
            _equal(chosen, known[path]) for path, chosen in doubtful.items()
        )
        if not same or at_once > self.at_once or load is not self._load:
            raise has_changed(self._module, change)
        self._last = self._last.renewed(dict(self._module.named_modules()), read)
        self._tried = [*self._tried[-MOST_STATES:], self._last]
        tell_of_trial(self._module, change, start)

    def _try(self) -> tuple[LoadWeights, bool, dict[str, torch.Tensor | None]]:
        """How to call load_weights, whether it has to get all tensors at once, and by parameter
        what selects the elements that it did not load from made-up ones.  None: all, where it
        cannot load these."""
        try:
            load, at_once = self._how()
        except NOT_RECORDED as error:
            _log.info("load_weights is not called for each round: %s", error)
            load, at_once = self._in_place, True
        try:
            return load, at_once, dict(unloaded(self._module, load, self._model))
        except NOT_RECORDED as error:
            _log.info("what load_weights loads is not known: %s", error)
            found = wrapped_tensors(self._module)
            inside = (path for path, t, _ in found if isinstance(t, torch.nn.Parameter))
            paths = [*(path for path, _ in self._module.named_parameters()), *inside]
            return load, at_once, dict.fromkeys(paths)

    def _how(self) -> tuple[LoadWeights, bool]:
        ways = list(itertools.product((self._in_place, self._direct), (True, False)))
        found = first_that_makes_same(self._module, self._direct, ways, self._model)
        if found is None:
            return self._in_place, True  # it makes something else each time
        load, split = found
        if load is self._direct:
            _log.warning(
                "%s: what its load_weights binds anew stays where that puts it, as it has "
                "other values in the memory that was there; CUDA graphs go on reading that",
                type(self._module).__name__,
            )
        return load, not split

    def _unknown(self) -> set[str]:
        """The parameters of which nothing was seen when load_weights was tried."""
        return {path for path, chosen in self._doubtful.items() if chosen is None}

    def _doubted(self) -> dict[str, tuple[int, int]]:
        """Bytes and checksums of what is doubtful."""
        found = {}
        held = parameters(self._module) if self._doubtful else {}
        for path, tensor in held.items():
            if path in self._doubtful:
                data, chosen = elements(tensor).cpu(), self._doubtful[path]
                if chosen is not None and len(chosen) == len(data):
                    data = data[chosen]
                found[path] = data.numel(), checksum_of(data)
        return found

    def not_loaded(self) -> dict[str, int]:
        """Bytes of parameters, by path, that made-up tensors were not loaded to, and that the
        update has not changed.  Those that could not be tried count as loaded where the update has
        written to them."""
        now = self._doubted() if self._before else {}
        same = {path: was[0] for path, was in self._before.items() if now.get(path) == was}
        unknown = self._unknown() & self._before.keys()
        held = parameters(self._module) if unknown else {}
        for path in unknown & same.keys():
            places = places_of(held[path])
            if any(place.meets(other) for other in self._written for place in places):
                del same[path]
        if unknown and unknown <= same.keys():
            _log.warning(
                "no parameter of %s has changed: the weights are those that it had, or its "
                "load_weights, which cannot be tried, loads none",
                type(self._module).__name__,
            )
            same = {path: nbytes for path, nbytes in same.items() if path not in unknown}
        return same


def _watched(load: LoadWeights, written: set[MemoryPlace]) -> LoadWeights:
    """Notes where load_weights writes, which may be what is there already."""

    def watched(pairs: list[tuple[str, torch.Tensor]]) -> object:
        with BeforeWrites(lambda tensor: written.update(places_of(tensor))):
            return load(pairs)

    return watched


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and one.equal(other))
