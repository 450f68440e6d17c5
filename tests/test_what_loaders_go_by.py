"""What a load_weights goes by changes when it has been learnt: noticed, wherever it is read."""

from __future__ import annotations

import enum
import functools
import queue
import re
import threading
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from support.two_weights import Pairs, TwoWeights, draw
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=30, progress=False)
NAMES = {"a": "a", "b": "b"}
EXCHANGED = {"a": "b", "b": "a"}


class Module(TwoWeights):
    """Loads each tensor to the parameter that `names` has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Any = dict(NAMES)

    def target(self, name: str) -> str:
        return str(self.names[name])

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, self.target(name)).data.copy_(tensor)

    def exchange(self) -> None:
        self.names = dict(EXCHANGED)


class Prefetching(Module):
    """A thread of its own finds where tensors go."""

    def load_weights(self, pairs: Pairs) -> None:
        found: queue.Queue[Any] = queue.Queue()

        def find() -> None:
            for name, tensor in pairs:
                found.put((self.names[name], tensor))
            found.put(None)

        threading.Thread(target=find).start()
        while (each := found.get()) is not None:
            getattr(self, each[0]).data.copy_(each[1])


class Planning(Module):
    """As many threads do."""

    def load_weights(self, pairs: Pairs) -> None:
        with ThreadPool(2) as pool:
            names = pool.map(self.target, [name for name, _ in pairs])
        for name, (_, tensor) in zip(names, pairs, strict=True):
            getattr(self, name).data.copy_(tensor)


class Submitting(Module):
    """Looks at a second flag where the first one is set, in tasks of a pool."""

    first = second = False

    def load_weights(self, pairs: Pairs) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(self.load_one, *pair) for pair in pairs]:
                done.result()

    def target(self, name: str) -> str:
        return (EXCHANGED if self.first and self.second else NAMES)[name]

    def exchange(self) -> None:
        self.second = True


class Table(Module):
    """Goes by a value of another type than most."""

    def __init__(self, before: Any, after: Any, order: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value, self._after, self._order = before, after, order

    def target(self, name: str) -> str:
        return (NAMES if self._order(self.value) else EXCHANGED)[name]

    def exchange(self) -> None:
        self.value = self._after


class Making(Module):
    """Has the part that says where tensors go only once it has loaded some."""

    def target(self, name: str) -> str:
        if not hasattr(self, "part"):
            self.part = torch.nn.Module()
            self.part.names = dict(NAMES)
        return str(self.part.names[name])

    def exchange(self) -> None:
        self.part.names = dict(EXCHANGED)


class Special(Module):
    """Goes by an attribute with a special name, as quantisers set some."""

    def __init__(self) -> None:
        super().__init__()
        self.__names__: Any = self.names

    def target(self, name: str) -> str:
        return str(self.__names__[name])

    def exchange(self) -> None:
        self.__names__ = dict(EXCHANGED)


class Referring(Module):
    """Goes by a module that is no part of it, and by what can be compared by its type alone."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = [torch.nn.Identity()]
        self.aside[0].straight = True
        self.method: Any = threading.Lock()

    def target(self, name: str) -> str:
        straight = self.aside[0].straight and isinstance(self.method, type(threading.Lock()))
        return (NAMES if straight else EXCHANGED)[name]

    def exchange(self) -> None:
        self.aside[0].straight = False


class Replaced(Referring):
    def exchange(self) -> None:
        self.method = threading.Condition()


class Names(list[str]):
    straight = True


def names(*, straight: bool) -> Names:
    found = Names("ab")
    found.straight = straight
    return found


class Layer:
    """Only one of two is the first."""

    def __init__(self, straight: bool) -> None:
        self.straight = straight


LAYERS = Layer(True), Layer(False)
TABLES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "weak reference": (*map(weakref.ref, LAYERS), lambda value: value().straight),
    "array": (array("i", [1]), array("i", [0]), lambda value: value[0]),
    "pattern": (re.compile("a"), re.compile("b"), lambda value: value.match("a")),
    "a list's attribute": (
        names(straight=True),
        names(straight=False),
        lambda value: value.straight,
    ),
    "what a dict makes": (defaultdict(int), defaultdict(list), lambda value: value[0] == 0),
}


def deliver(module: Module, loader: RecordedLoader) -> None:
    """None of the updates brings what load_weights would not."""
    with wsync.connect(draw(0), [ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert module.a.equal(draw(seed)["a"]) and module.b.equal(draw(seed)["b"])
            if isinstance(module, Submitting):
                module.first = True  # it is tried once more, and looks at the second
        assert not loader.reason
        module.exchange()
        with pytest.raises(wsync.WsyncError, match="has changed since it was learnt"):
            sync.update(draw(3))
        sync.update(draw(4))
    assert module.a.equal(draw(4)["b"]) and module.b.equal(draw(4)["a"])


@pytest.mark.parametrize(
    "make", [Module, Prefetching, Planning, Submitting, Making, Special, Referring, Replaced]
)
def test_what_is_read_in_any_thread_and_of_any_part_is_compared(make: Callable[[], Module]) -> None:
    module = make()
    deliver(module, RecordedLoader(module))


@pytest.mark.parametrize("kind", TABLES)
def test_values_of_these_types_are_compared(kind: str) -> None:
    module = Table(*TABLES[kind])
    deliver(module, RecordedLoader(module))


@pytest.mark.parametrize("bound", ["a closure", "an argument", "an attribute"])
def test_what_load_weights_is_bound_to_is_compared(bound: str) -> None:
    module, table = Module(), dict(NAMES)
    module.exchange = lambda: table.update(EXCHANGED)  # type: ignore[method-assign]

    def load_by(known: dict[str, str], pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(module, known[name]).data.copy_(tensor)

    given: Any = functools.partial(load_by, table)
    if bound != "an argument":

        def given(pairs: Pairs) -> None:
            load_by(table, pairs)

    if bound == "an attribute":
        module.load_weights = given
        given = None
    deliver(module, RecordedLoader(module, given))


def test_a_closure_that_load_weights_changes_itself_is_not_compared() -> None:
    module, calls = Module(), [0]

    def load(pairs: Pairs) -> None:
        calls[0] += 1
        Module.load_weights(module, pairs)

    loader = RecordedLoader(module, load)
    with wsync.connect(draw(0), [ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in range(3):
            sync.update(draw(seed))
            calls[0] += 1
            assert module.a.equal(draw(seed)["a"]) and not loader.reason


@pytest.mark.parametrize("keep", [dict, list])
def test_a_cache_in_a_container_that_load_weights_empties_is_empty_after_an_update(
    keep: Callable[[Any], Any],
) -> None:
    class Caching(Module):
        def __init__(self) -> None:
            super().__init__()
            self.valid = keep([(0, torch.zeros(1))] if keep is dict else [torch.zeros(1)])

        def load_weights(self, pairs: Pairs) -> None:
            super().load_weights(pairs)
            self.valid[0].zero_()

    module = Caching()
    with wsync.connect(draw(0), [ThreadEngine([RecordedLoader(module)])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert not module.valid[0].any() and module.a.equal(draw(seed)["a"])
            module.valid[0].fill_(1)


def test_tensors_of_bools_are_learnt() -> None:
    module = Module()
    module.names["mask"] = "mask"
    module.register_buffer("mask", torch.zeros(64, dtype=torch.bool))
    loader, mask = RecordedLoader(module), {"mask": torch.arange(64) % 3 == 0}
    with wsync.connect(draw(0) | mask, [ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1) | mask)
    assert not loader.reason and module.get_buffer("mask").equal(mask["mask"])


class State(enum.Enum):
    STALE = 0
    SERVED = 1


@pytest.mark.parametrize("on", ["the module", "a parameter"])
def test_what_load_weights_marks_as_stale_is_so_after_an_update(on: str) -> None:
    """Nothing copies what is made of weights when they are used."""

    class Marking(Module):
        def load_weights(self, pairs: Pairs) -> None:
            super().load_weights(pairs)
            (self if on == "the module" else self.a).state = State.STALE

    module = Marking()
    owner = module if on == "the module" else module.a
    with wsync.connect(draw(0), [ThreadEngine([RecordedLoader(module)])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert owner.state is State.STALE
            owner.state = State.SERVED


class Weight(torch.nn.Parameter):
    transposed = False


def test_an_attribute_that_a_parameters_class_has_a_default_for_is_compared() -> None:
    class Transposing(Module):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            weight = getattr(self, name)
            weight.data.copy_(tensor.t() if weight.transposed else tensor)

    module = Transposing()
    for name in "ab":
        setattr(module, name, Weight(torch.zeros(8, 8), requires_grad=False))
    with wsync.connect(draw(0), [ThreadEngine([RecordedLoader(module)])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.a.transposed = True  # type: ignore[attr-defined]
        with pytest.raises(wsync.WsyncError, match=r"a\.transposed, which load_weights"):
            sync.update(draw(2))
        sync.update(draw(3))
    assert module.a.equal(draw(3)["a"].t()) and module.b.equal(draw(3)["b"])


def test_what_a_task_of_a_pool_writes_for_values_is_seen_in_an_update() -> None:
    """It writes over what was copied already."""

    class Clearing(Module):
        def load_weights(self, pairs: Pairs) -> None:
            with ThreadPoolExecutor(1) as pool:
                for name, tensor in pairs:
                    pool.submit(self.load_one, name, tensor).result()

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one(name, tensor)
            if name == "a" and not tensor.any():
                self.b.data.zero_()

    module = Clearing()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), [ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        cleared = {**draw(2), "a": torch.zeros(8, 8)}
        with pytest.raises(wsync.WsyncError, match="with the values of a it also writes to b"):
            sync.update(cleared)
        sync.update(cleared)
    assert module.b.equal(cleared["b"])  # as load_weights leaves it: b comes after a


def column_of_one(module: Module) -> torch.Tensor:
    return torch.zeros(1, 2)[:, ::2]


def expanded(module: Module) -> torch.Tensor:
    return module.a.data[:1].expand(4, 8)


@pytest.mark.parametrize("make", [column_of_one, expanded])
def test_a_module_that_cannot_be_learnt_may_have_parameters_of_any_strides(
    make: Callable[[Module], torch.Tensor],
) -> None:
    class Computing(Module):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one(name, tensor * 2)

    module = Computing()
    more = {"more": torch.full((1, 1), 3.0)} if make is column_of_one else {}
    module.names["more"] = "more"
    module.register_parameter("more", torch.nn.Parameter(make(module), requires_grad=False))
    loader = RecordedLoader(module)
    with wsync.connect(draw(0) | more, [ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1) | more)
    assert loader.reason
    assert module.a.equal(draw(1)["a"] * 2)
    if more:
        assert module.get_parameter("more").item() == 6
