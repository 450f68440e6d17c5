"""Modules that change between updates and in the midst of one: noticed, or it does no harm."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import functools
import itertools
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.workers import ThreadEngine
from torch.multiprocessing.reductions import StorageWeakRef

import wsync
from wsync._core import DeadlineError, LayoutBuilder, WsyncError, describe
from wsync.engine.learn.module_memory import ModuleMemory
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.learn.time_limit import learning
from wsync.engine.ring_loaders import LayoutLoader, ModuleLoader

OPTIONS = wsync.Options(deadline=20, progress=False)
Tensors = dict[str, torch.Tensor]


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


class Pair(torch.nn.Module):
    """Two parameters, and a tensor that may come later."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parameter(torch.zeros(32, 8))
        self.b = parameter(torch.zeros(32, 8))
        self.later: Any = None


class Loading(Pair):
    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)
            if self.later is not None and name == "b":
                self.later.copy_(tensor)


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(32, 8, generator=generator) for name in "ab"}


def by_name() -> tuple[Pair, Any]:
    module = Pair()
    return module, ModuleLoader(module)


def learnt() -> tuple[Pair, Any]:
    module = Loading()
    return module, RecordedLoader(module)


class Computing(Loading):
    """What its load_weights does cannot be learnt."""

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        super().load_weights([(name, tensor * 1.0) for name, tensor in pairs])


class Rebinding(Pair):
    """Has other tensors after each call, which it processes further when all has come."""

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            setattr(self, name, parameter(tensor.clone()))

    def process(self, _: object = None) -> None:
        for each in (self.a, self.b):
            each.data = each.data.clone()
        self.b = parameter(self.b.data)


def by_call() -> tuple[Pair, Any]:
    module = Loading()
    return module, ModuleLoader(module)


def unlearnt() -> tuple[Pair, Any]:
    module = Computing()
    return module, RecordedLoader(module)


def unlearnt_in_parts() -> tuple[Pair, Any]:
    """What is on the meta device, as layers that vLLM makes anew are at first, lies nowhere."""
    module = Computing()
    module.register_buffer("nowhere", torch.empty(8, device="meta"), persistent=False)
    return module, RecordedLoader(module)


def by_layout() -> tuple[Pair, Any]:
    module = Pair()
    builder = LayoutBuilder()
    builder.add_tensors(["a", "b"], describe([module.a, module.b]))
    return module, LayoutLoader(builder.build(), [module.a, module.b])


def other_data(module: Pair) -> None:
    module.a.data = torch.full((32, 8), 7.0)


def emptied(module: Pair) -> None:
    """What is allocated next lies where the weights did, if that is free: see `of_numpy`."""
    module.a.data = torch.empty(0)
    module.a.data = of_numpy(7.0)


def of_numpy(value: float) -> torch.Tensor:
    return torch.from_numpy(np.full((32, 8), value, dtype=np.float32))


def other_parameter(module: Pair) -> None:
    module.a = parameter(torch.full((32, 8), 7.0))


def other_shape(module: Pair) -> None:
    module.a.data = torch.full((16, 8), 7.0)


def gone(module: Pair) -> None:
    del module.a


def swapped(module: Pair) -> None:
    module.a, module.b = module.b, module.a


class Midway:
    """A loader that has something done in the midst of an update."""

    def __init__(self, loader: Any, when: str, change: Callable[[], None]) -> None:
        self._loader, self._when, self._change = loader, when, change

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._loader, name)
        if name != self._when:
            return found

        def run(*arguments: Any) -> Any:
            change, self._change = self._change, lambda: None
            if name == "finish":
                change()
            answer = found(*arguments)
            if name != "finish":
                change()
            return answer

        return run

    def learn(self, *arguments: Any) -> Any:
        return self._loader.learn(*arguments)

    @property
    def own_loading(self) -> str:
        text: str = self._loader.own_loading
        return text


class Parts(torch.nn.Module):
    """Two modules of a parameter each."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            self.add_module(name, torch.nn.Linear(8, 32, bias=False))

    def exchange(self) -> None:
        """What was a is b from now on; what the module holds keeps its order."""
        parts = dict(self._modules)
        self._modules.clear()
        self._modules.update(b=parts["a"], a=parts["b"])


class LoadingParts(Parts):
    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            parameters[name].data.copy_(tensor)


@pytest.mark.parametrize(
    ("make", "module"),
    [(ModuleLoader, Parts()), (RecordedLoader, LoadingParts())],
    ids=["by name", "learnt"],
)
def test_modules_that_exchange_their_names_get_what_they_are_called_now(
    make: Callable[[Parts], Any], module: Parts
) -> None:
    weights = [{f"{n}.weight": t for n, t in draw(seed).items()} for seed in range(2)]
    engine = ThreadEngine([make(module)])
    with wsync.connect(weights[0], engines=[engine], options=OPTIONS) as sync:
        sync.update()
        module.exchange()
        for _ in range(2):
            try:
                sync.update(weights[1])
                break
            except WsyncError as error:
                assert "has changed since it was learnt" in str(error)
    for name, tensor in module.named_parameters():
        assert torch.equal(tensor, weights[1][name])


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("make", [ModuleLoader, RecordedLoader])
def test_a_load_weights_that_is_patched_later_is_called(
    make: Callable[[Loading], Any], fallback: bool
) -> None:
    module = Loading()
    if fallback:
        plain = module.load_weights
        module.load_weights = lambda pairs: plain([(n, t.sin()) for n, t in pairs])  # type: ignore[method-assign]
    engine, first = ThreadEngine([make(module)]), module.load_weights
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update()
        module.load_weights = lambda pairs: first([(n, t.flip(0)) for n, t in pairs])  # type: ignore[method-assign]
        if make is RecordedLoader:
            with pytest.raises(WsyncError, match="learnt: load_weights is another one"):
                sync.update(draw(1))
        sync.update(draw(1))
        for tensor, name in (module.a, "a"), (module.b, "b"):
            given = draw(1)[name].flip(0)
            assert torch.equal(tensor, given.sin() if fallback else given)
        sync.update(draw(2))


def test_a_load_weights_that_is_made_anew_each_time_is_no_change() -> None:
    class Delegating(Pair):
        @property
        def load_weights(self) -> Any:
            return functools.partial(Loading.load_weights, self)

    module = Delegating()
    with wsync.connect(
        draw(0), engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        sync.update()
        sync.update(draw(1))
    assert torch.equal(module.a, draw(1)["a"])


@pytest.mark.parametrize("kind", [torch.nn.Module, torch.nn.Parameter, torch.Tensor])
def test_what_others_have_patched_on_torch_stays(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = kind.__getattribute__

    def profiled(owner: Any, name: str) -> Any:
        return find(owner, name)

    module, loader = learnt()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getattribute__", profiled)
        with wsync.connect(draw(0), [ThreadEngine([loader])], options=OPTIONS) as sync:
            sync.update()
        assert vars(kind).get("__getattribute__") is profiled
    assert torch.equal(module.a, draw(0)["a"]) and not loader.reason


class Noting(Pair):
    """Its load_weights notes where a parameter lies."""

    def __init__(self, note: Callable[[Noting], object]) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {"views": [None]}
        self.register_buffer("table", torch.zeros(3, dtype=torch.int64), persistent=False)
        self._note = note

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)
        self._note(self)


def view_in_containers(module: Noting) -> None:
    module.notes["views"][0] = (module.a.data.t(),)


def view_on_parameter(module: Noting) -> None:
    module.b.transposed = module.a.data.t()  # type: ignore[attr-defined]


def address(module: Noting) -> None:
    module.notes["address"] = module.a.data_ptr() + 4


def table_of_addresses(module: Noting) -> None:
    module.table[1] = module.a.data_ptr()


@pytest.mark.parametrize(
    ("note", "noted"),
    [
        (view_in_containers, lambda module: module.notes["views"][0][0].data_ptr()),
        (view_on_parameter, lambda module: module.b.transposed.data_ptr()),
        (address, lambda module: module.notes["address"] - 4),
        (table_of_addresses, lambda module: module.table[1].item()),
    ],
)
def test_a_parameter_whose_place_was_noted_is_not_moved_unseen(
    note: Callable[[Noting], object], noted: Callable[[Noting], int]
) -> None:
    module = Noting(note)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), [ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
        module.b.data = module.b.data.clone()  # is noted by nobody
        sync.update(draw(1))
        assert not loader.reason
        module.a.data = module.a.data.clone()
        with pytest.raises(WsyncError, match="a has moved, and the module notes where it was"):
            sync.update(draw(2))
        sync.update(draw(2))
    assert noted(module) == module.a.data_ptr()
    assert torch.equal(module.a, draw(2)["a"]) and torch.equal(module.b, draw(2)["b"])


def test_a_list_of_parameters_themselves_goes_with_them() -> None:
    module = Noting(lambda module: module.notes.update(flat=[module.a, module.b]))
    with wsync.connect(draw(0), [ThreadEngine([RecordedLoader(module)])], options=OPTIONS) as sync:
        sync.update()
        other_data(module)
        sync.update(draw(1))
    assert torch.equal(module.notes["flat"][0], draw(1)["a"])


class Fused(torch.nn.Module):
    """Its state_dict has views of its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = parameter(torch.zeros(64, 8))

        def split(_: Any, state: Tensors, prefix: str, __: Any) -> None:
            a, b = state.pop(f"{prefix}fused").chunk(2)
            state.update({f"{prefix}a": a, f"{prefix}b": b})

        self._register_state_dict_hook(split)


def test_a_parameter_behind_a_state_dict_of_the_modules_own_is_not_replaced_unseen() -> None:
    module = Fused()

    def change() -> None:
        module.fused = parameter(torch.zeros(64, 8))

    engine = ThreadEngine([Midway(ModuleLoader(module), "finish", change)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="while the update ran"):
            sync.update()
        sync.update()
    assert torch.equal(module.fused, torch.cat([draw(0)["a"], draw(0)["b"]]))


def apart(module: Pair) -> None:
    module.b.data = module.b.data.clone()


def converted(module: Pair) -> None:
    module.to(torch.bfloat16)


@pytest.mark.parametrize("change", [apart, converted])
def test_parameters_of_one_memory_that_come_apart_are_both_delivered(
    change: Callable[[Pair], None],
) -> None:
    module = Pair()
    module.b = parameter(module.a.data)
    weights = {name: draw(0)["a"] for name in "ab"}
    with wsync.connect(weights, [ThreadEngine([ModuleLoader(module)])], options=OPTIONS) as sync:
        sync.update()
        change(module)
        sync.update(draw(1))
    for name, tensor in module.named_parameters():
        assert torch.equal(tensor, draw(1)[name].to(tensor.dtype))


@pytest.mark.parametrize("make", [by_name, learnt])
def test_torch_may_swap_the_tensors_of_a_module_that_was_updated(
    make: Callable[[], tuple[Pair, Any]],
) -> None:
    """It swaps none that there are weak references to."""
    module, loader = make()
    engine = ThreadEngine([loader])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update()
        torch.utils.swap_tensors(module.a, parameter(torch.zeros_like(module.a)))
        sync.update(draw(1))
    assert torch.equal(module.a, draw(1)["a"]) and torch.equal(module.b, draw(1)["b"])


def test_memory_that_is_not_kept_is_not_written_to() -> None:
    """Another thread may replace it at any line."""
    module = Pair()
    held, first = ModuleMemory(module), module.a.detach()
    kept = held.memory()
    assert [t.untyped_storage().data_ptr() for t in kept] == [start for start, _ in held.spans()]
    other_data(module)
    assert module.a.data_ptr() != first.data_ptr()
    for keep in (held.memory, held.table):
        with pytest.raises(wsync.StateError, match="a: its memory was replaced"):
            keep()


@pytest.mark.parametrize("when", ["begin", "finish"])
@pytest.mark.parametrize("change", [other_data, other_parameter, other_shape, gone, swapped])
@pytest.mark.parametrize("make", [by_name, learnt])
def test_a_module_that_changes_in_the_midst_of_an_update_is_not_called_updated(
    make: Callable[[], tuple[Pair, Any]], change: Callable[[Pair], None], when: str
) -> None:
    module, loader = make()
    engine = ThreadEngine([Midway(loader, when, lambda: change(module))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="while the update ran"):
            sync.update(draw(1), version=1)
        assert not engine.receivers[0].consistent
        assert engine.version is None
        if change in (other_shape, gone):
            return
        for _ in range(2):  # what was learnt may have to be learnt anew
            try:
                sync.update(draw(2))
                break
            except WsyncError as error:
                assert "has changed since it was learnt" in str(error)
    assert engine.receivers[0].consistent
    assert torch.equal(module.a, draw(2)["a"])
    assert torch.equal(module.b, draw(2)["b"])


class AfterFinish(Midway):
    """Has it done when the worker has said that it is prepared."""

    def finish(self, timeout: float) -> Any:
        answer = self._loader.finish(timeout)
        self._change()
        return answer

    def confirm(self) -> None:
        self._loader.confirm()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *itertools.product(
            [by_name, learnt, by_call, unlearnt, unlearnt_in_parts],
            [other_data, other_parameter, emptied, gone],
        ),
        (by_layout, other_data),
    ],
)
def test_a_module_that_changes_before_the_commit_takes_no_version(
    make: Callable[[], tuple[Pair, Any]], change: Callable[[Pair], None]
) -> None:
    module, loader = make()
    if change is emptied:
        module.a.data = of_numpy(0.0)
    engine = ThreadEngine([AfterFinish(loader, "", lambda: change(module))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="while the update ran"):
            sync.update(draw(1), version=1)
    assert engine.version is None
    assert not engine.receivers[0].consistent


@pytest.mark.parametrize("make", [by_name, learnt, by_call, unlearnt, unlearnt_in_parts])
def test_an_engine_may_free_its_weights_when_another_worker_has_failed(
    make: Callable[[], tuple[Pair, Any]],
) -> None:
    prepared = threading.Event()
    (module, loader), (_, other) = make(), make()

    def fail() -> None:
        assert prepared.wait(20)
        raise ValueError("no")

    loaders = AfterFinish(loader, "", prepared.set), AfterFinish(other, "", fail)
    with wsync.connect(draw(0), engines=[ThreadEngine(loaders)], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="no"):
            sync.update()
        memory = StorageWeakRef(module.a.untyped_storage())
        module.a.data = torch.empty(0)
        assert memory.expired()


@pytest.mark.parametrize("change", [other_data, other_parameter, emptied, gone, swapped])
@pytest.mark.parametrize("make", [by_call, unlearnt, unlearnt_in_parts])
def test_what_changes_between_calls_of_load_weights_takes_no_version(
    make: Callable[[], tuple[Pair, Any]], change: Callable[[Pair], None]
) -> None:
    options = dataclasses.replace(OPTIONS, round_nbytes=draw(0)["a"].nbytes)  # a call each
    module, loader = make()
    engine = ThreadEngine([Midway(loader, "load", lambda: change(module))])
    with wsync.connect(draw(0), engines=[engine], options=options) as sync:
        with pytest.raises(WsyncError, match="was replaced while the update ran"):
            sync.update(draw(1), version=1)
        assert engine.version is None and not engine.receivers[0].consistent
        if change is gone:
            return
        sync.update(draw(2))
    assert torch.equal(module.a, draw(2)["a"]) and torch.equal(module.b, draw(2)["b"])


@pytest.mark.parametrize("make", [ModuleLoader, RecordedLoader])
def test_load_weights_and_what_follows_it_may_replace_tensors(make: Callable[..., Any]) -> None:
    options = dataclasses.replace(OPTIONS, round_nbytes=draw(0)["a"].nbytes)
    module = Rebinding()
    loader = make(module, **({"after": module.process} if make is RecordedLoader else {}))
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=options) as sync:
        for seed in range(3):
            sync.update(draw(seed))
            assert torch.equal(module.a, draw(seed)["a"])
            assert torch.equal(module.b, draw(seed)["b"])
    assert make is ModuleLoader or "cannot be learnt" in loader.reason


@pytest.mark.parametrize("when", ["begin", "finish"])
def test_tensors_of_a_layout_that_move_in_the_midst_of_an_update(when: str) -> None:
    module, loader = by_layout()
    engine = ThreadEngine([Midway(loader, when, lambda: other_data(module))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="while the update ran"):
            sync.update(draw(1))
        sync.update(draw(2))
    assert torch.equal(module.a, draw(2)["a"])


def test_an_attribute_that_becomes_a_tensor_is_learnt_anew() -> None:
    module, loader = learnt()
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.later = torch.zeros(32, 8)
        with pytest.raises(WsyncError, match="later is new"):
            sync.update(draw(2))
        sync.update(draw(3))
    assert torch.equal(module.later, draw(3)["b"])


# --- what load_weights goes by outside the module ---------------------------------------------


def closing_over(kind: str) -> tuple[Loading, torch.Tensor]:
    """A loader that goes by a tensor outside its module."""
    module = Loading()
    outside = torch.arange(32).flip(0) if kind in ("index", "list") else torch.full((32, 8), 3.0)

    def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(pairs)
        module.b.data.copy_(tensors["b"])
        if kind == "constant":
            module.a.data.copy_(tensors["a"])
            module.a.data[:4].copy_(outside[:4])
        elif kind == "by way of a copy":
            module.a.data.copy_(tensors["a"])
            module.a.data[:4].copy_(outside.clone()[:4])
        elif kind == "joined":
            module.a.data.copy_(torch.cat([outside[:4], tensors["a"][4:]]))
        elif kind == "index":
            module.a.data.copy_(tensors["a"][outside])
        else:
            module.a.data.copy_(torch.stack([tensors["a"][i] for i in outside.tolist()]))

    module.load_weights = load  # type: ignore[method-assign]
    return module, outside


@pytest.mark.parametrize("kind", ["constant", "by way of a copy", "joined", "index", "list"])
def test_a_tensor_outside_the_module_that_changes_is_noticed(kind: str) -> None:
    module, outside = closing_over(kind)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        sync.update(draw(2))
        assert loader.reason == ""
        outside.copy_(outside.roll(1, 0) + (kind not in ("index", "list")))
        with pytest.raises(WsyncError, match="outside the module"):
            sync.update(draw(3))
        sync.update(draw(4))
    found = module.a.clone(), module.b.clone()
    module.load_weights(list(draw(4).items()))
    assert torch.equal(found[0], module.a) and torch.equal(found[1], module.b)


# --- flags ------------------------------------------------------------------------------------


class Flagged(Loading):
    """Goes by attributes, counts its loads."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = False
        self.loads = 0
        self.part = torch.nn.Module()
        self.part.rows = 4

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in pairs:
            found = tensor[torch.arange(31, -1, -1)] if self.turned else tensor
            getattr(self, name).data.copy_(found)
            getattr(self, name).data[8 : 8 + self.part.rows].fill_(1)


@pytest.mark.parametrize("which", ["turned", "rows"])
def test_a_flag_that_load_weights_goes_by_is_noticed(which: str) -> None:
    module = Flagged()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.unread = 5
        module.loads += 1  # it is read, and changes with every load: no flag
        module.training = not module.training
        sync.update(draw(2))
        if which == "turned":
            module.turned = True
        else:
            module.part.rows = 6
        with pytest.raises(WsyncError, match=f"{which}, which load_weights goes by, was"):
            sync.update(draw(3))
        sync.update(draw(4))
    assert loader.reason == ""
    found = module.a.clone(), module.b.clone()
    module.load_weights(list(draw(4).items()))
    assert torch.equal(found[0], module.a) and torch.equal(found[1], module.b)


class Place(enum.Enum):
    LOW = 0
    HIGH = 1


class Ordered(Loading):
    """Places rows by an attribute that is no single word or number."""

    def __init__(self, order: Any, find: Callable[[Any], list[int]]) -> None:
        super().__init__()
        self.order = order
        self.seen: set[str] = set()  # read, and changed by every load: no flag
        self._find = find

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self.seen.add(f"{name} {len(self.seen)}")
            getattr(self, name).data.copy_(tensor[self._find(self)])


def rows(first: int) -> list[int]:
    return [first, *(row for row in range(32) if row != first)]


@pytest.mark.parametrize(
    ("order", "other", "find"),
    [
        (rows(0), rows(3), lambda m: m.order),
        (tuple(rows(0)), tuple(rows(3)), lambda m: list(m.order)),
        ({"rows": [rows(0)]}, {"rows": [rows(3)]}, lambda m: m.order["rows"][0]),
        ({0, 1}, {3, 1}, lambda m: rows(min(m.order))),
        (np.array(rows(0)), np.array(rows(3)), lambda m: m.order.tolist()),
        (np.int64(0), np.int64(3), lambda m: rows(int(m.order))),
        (Place.LOW, Place.HIGH, lambda m: rows(m.order.value)),
        (torch.int8, torch.int32, lambda m: rows(m.order.itemsize)),
        (torch.device("cpu"), torch.device("meta"), lambda m: rows(len(m.order.type))),
        (torch.Size([1]), torch.Size([3]), lambda m: rows(m.order[0])),
        (slice(0), slice(3), lambda m: rows(m.order.stop)),
        (range(1), range(3), lambda m: rows(len(m.order))),
        (None, None, lambda m: rows(getattr(m, "first", 0))),
    ],
)
def test_an_attribute_of_many_values_that_load_weights_goes_by_is_noticed(
    order: Any, other: Any, find: Any
) -> None:
    module = Ordered(copy.deepcopy(order), find)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        sync.update(draw(2))
        assert loader.reason == ""
        if other is None:
            module.first = 3
        elif isinstance(order, list | np.ndarray):
            module.order[:] = other
        elif isinstance(order, dict | set):
            module.order.clear()
            module.order.update(other)
        else:
            module.order = other
        with pytest.raises(WsyncError, match=r"(order|first), which load_weights goes by, "):
            sync.update(draw(3))
        sync.update(draw(4))
    found = module.a.clone(), module.b.clone()
    module.load_weights(list(draw(4).items()))
    assert torch.equal(found[0], module.a) and torch.equal(found[1], module.b)


class Config:
    """As those of transformers."""

    def __init__(self) -> None:
        self.text = {"first": 0}

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))


@dataclasses.dataclass
class Plain:
    first: int = 0


@dataclasses.dataclass
class PerLayer(Plain):
    """As configurations of transformers whose layers differ: not to be asked for all of them."""

    second: int = 0

    def __post_init__(self) -> None:
        del self.second  # each layer has its own

    def __getattribute__(self, name: str) -> Any:
        if name == "second":
            raise RuntimeError("which layer's?")
        return super().__getattribute__(name)


@dataclasses.dataclass(slots=True)
class Settings:
    first: int = 0
    plain: Plain = dataclasses.field(default_factory=Plain)


def in_order(data: torch.Tensor, tensor: torch.Tensor) -> None:
    data.copy_(tensor)


def turned(data: torch.Tensor, tensor: torch.Tensor) -> None:
    data.copy_(tensor.flip(0))


def rolled(first: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    return lambda data, tensor: data.copy_(tensor[rows(first)])


def by_default(first: int) -> Callable[..., None]:
    return lambda data, tensor, first=first: data.copy_(tensor[rows(first)])


class Indirect(Loading):
    """Goes by objects of its own, and by attributes of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.settings = Config(), Settings()
        self.by_name = dict(self.named_parameters())
        self.mode = ""
        self.a.first = 0  # type: ignore[attr-defined]
        self.a.weight_loader = functools.partial(by_default(0))  # type: ignore[attr-defined]
        self.b.weight_loader = rolled(0)  # type: ignore[attr-defined]

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self.mode = self.mode or "plain"
        first = self.config.text["first"] + self.settings.first + self.settings.plain.first
        for name, tensor in pairs:
            target = self.by_name[name]
            found = tensor[rows(first + getattr(target, "first", 1))]
            if getattr(target, "backwards", self.mode == "backwards") or target.requires_grad:
                found = found.flip(1)
            target.weight_loader(target.data, found)


def unfinished() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that refers to a variable which nothing has set."""
    if not Pair:
        unset = None

    def copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor is None:
            print(unset)
        target.copy_(tensor)

    return copy


@pytest.mark.parametrize("odd", ["function", "configuration"])
def test_what_cannot_be_read_whole_is_no_reason_not_to_learn(odd: str) -> None:
    module = Indirect()
    if odd == "function":
        module.a.weight_loader = unfinished()  # type: ignore[attr-defined]
    else:
        module.settings.plain = PerLayer()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in range(2):
            sync.update(draw(seed))
            assert torch.equal(module.a, draw(seed)["a"])
    assert loader.reason == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.config.text.update(first=3), "config, which"),
        (lambda m: setattr(m.settings, "first", 3), "settings, which"),
        (lambda m: setattr(m.settings.plain, "first", 3), "settings, which"),
        (lambda m: setattr(m.a, "first", 3), "a.first, which load_weights goes by, was 0 and is 3"),
        (lambda m: setattr(m.b, "backwards", True), "b.backwards, which .* was absent and is True"),
        (lambda m: delattr(m.a, "first"), "a.first, which load_weights goes by, was 0 and is abs"),
        (lambda m: m.a.requires_grad_(), "a.requires_grad, which"),
        (lambda m: setattr(m.a, "weight_loader", turned), "a.weight_loader, which"),
        (lambda m: setattr(m.b, "weight_loader", rolled(2)), "b.weight_loader, which"),
        (
            lambda m: setattr(m.a, "weight_loader", functools.partial(by_default(2))),
            "a.weight_loader, which",
        ),
        (
            lambda m: setattr(m.a, "weight_loader", functools.partial(by_default(0), first=2)),
            "a.weight_loader, which",
        ),
        (lambda m: setattr(m, "mode", "backwards"), "mode, which .* was 'plain' and is 'backw"),
        (lambda m: setattr(m, "a", parameter(m.a.data)), "a.first, which .* was 0 and is absent"),
    ],
)
def test_what_load_weights_reads_of_parameters_and_configurations_is_noticed(
    change: Callable[[Any], object], text: str
) -> None:
    module = Indirect()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.a.unread = module.config.text.get("unread")  # type: ignore[attr-defined]
        module.b.data = module.b.data.clone()
        sync.update(draw(2))
        assert loader.reason == ""
        change(module)
        module.by_name = dict(module.named_parameters())
        if "weight_loader" not in vars(module.a):
            module.a.weight_loader = in_order  # type: ignore[attr-defined]
        with pytest.raises(WsyncError, match=text):
            sync.update(draw(3))
        sync.update(draw(4))
    found = module.a.detach().clone(), module.b.detach().clone()
    module.load_weights(list(draw(4).items()))
    assert torch.equal(found[0], module.a) and torch.equal(found[1], module.b)


class Flag(torch.nn.Module):
    def __init__(self, value: bool) -> None:
        super().__init__()
        self.value = value


class OfParts(Loading):
    """Goes by what its parts and parameters are called and are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Flag(False), Flag(True)
        self.queue, self.sign = deque([1]), 0.0
        self.listed = [torch.zeros(3)]
        self.chain = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.ReLU()])
        self.alias = self.a
        self.register_buffer("kept", torch.zeros(3))

    def more(self) -> int:
        return 0

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            times = 1 + self.first.value + isinstance(self.second, torch.nn.Identity)
            times += isinstance(self.a, Buffered) + len(self.queue) + len(self.listed[0])
            times += (
                self.more()
                + len(self.first.extra_repr())
                + len(self.chain)
                + (self.alias is self.a)
            )
            times += "kept" in self.state_dict() and "chain.0" in dict(self.named_modules())
            getattr(self, name).data.copy_(tensor[rows(times)])
            if str(self.sign)[0] == "-":
                self.b.data.zero_()
        self.chain.load_state_dict({})


class Buffered(torch.nn.Parameter):
    pass


def buffered(module: OfParts) -> None:
    module.a = module.alias = Buffered(module.a.data, requires_grad=False)


def zeroed_after(module: OfParts) -> None:
    def zero(*_: object) -> None:
        module.b.data.zero_()

    module.chain.register_load_state_dict_post_hook(zero)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m, "first", Flag(True)), "first.value, which .* was False and is True"),
        (lambda m: m.__dict__["_modules"].update(first=m.second, second=m.first), "first.value, "),
        (lambda m: setattr(m, "second", torch.nn.Identity()), "second.__class__, which .*Flag"),
        (buffered, "a.__class__, which"),
        (lambda m: m.queue.append(2), "queue, which"),
        (lambda m: m.listed.__setitem__(0, torch.zeros(4)), "listed, which"),
        (lambda m: setattr(m, "sign", -0.0), "sign, which .* was 0.0 and is -0.0"),
        (lambda m: setattr(m, "more", lambda: 2), "more, which .* its class's and is a function"),
        (lambda m: setattr(m.first, "extra_repr", lambda: "x"), "first.extra_repr, which"),
        (lambda m: m.chain.append(torch.nn.Identity()), "the name chain.2 is new"),
        (lambda m: setattr(m, "alias", parameter(m.a.data)), "alias was that of a and is that of"),
        (lambda m: m.register_buffer("kept", m.kept, persistent=False), "_non_persistent"),
        (zeroed_after, "_load_state_dict_post_hooks, which load_weights goes by, was"),
    ],
)
def test_parts_that_become_others_are_noticed(change: Callable[[Any], object], text: str) -> None:
    module = OfParts()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        assert loader.reason == ""
        change(module)
        with pytest.raises(WsyncError, match=text):
            sync.update(draw(3))
        sync.update(draw(4))
    found = module.a.detach().clone(), module.b.detach().clone()
    module.load_weights(list(draw(4).items()))
    assert torch.equal(found[0], module.a) and torch.equal(found[1], module.b)


# --- which of its parts and tensors ----------------------------------------------------------


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(torch.zeros(32, 8))
        self.register_buffer("table", torch.zeros(32, 8))

    def load(self, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor)


class Slot:
    """A loader of a slot, and which one."""

    def __init__(self, expert: Expert) -> None:
        self.expert, self.number = expert, 0

    def __call__(self, tensor: torch.Tensor) -> None:
        self.expert.load(tensor)


def closing(expert: Expert) -> Callable[[torch.Tensor], object]:
    return lambda tensor: expert.load(tensor)


class Dealt(torch.nn.Module):
    """Experts in slots: `of` says which slot has which expert of the model."""

    def __init__(self, deal: Callable[[Any, list[Expert]], object], load: Any) -> None:
        super().__init__()
        self.slots = torch.nn.ModuleList([Expert() for _ in range(2)])
        self._deal, self._load = deal, load
        self.deal([0, 1])

    def deal(self, order: list[int]) -> None:
        self._deal(self, [self.slots[number] for number in order])  # type: ignore[misc]

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self._load(self, "ab".index(name), tensor)


def of(make: Callable[[Expert], Any]) -> Callable[[Any, list[Expert]], None]:
    def deal(module: Any, experts: list[Expert]) -> None:
        module.of = {"each": [(make(expert),) for expert in experts]}

    return deal


def call(module: Any, number: int, tensor: torch.Tensor) -> None:
    module.of["each"][number][0](tensor)


def copy_to(module: Any, number: int, tensor: torch.Tensor) -> None:
    module.of["each"][number][0].copy_(tensor.view(module.of["each"][number][0].shape))


def at_parameters(give: Callable[[Expert], Any]) -> Callable[[Any, list[Expert]], None]:
    def deal(module: Any, experts: list[Expert]) -> None:
        for slot, expert in zip(module.slots, experts, strict=True):
            slot.weight.target = give(expert)

    return deal


TABLES = [torch.arange(32), torch.arange(32).flip(0)]


def table_of(module: Any, expert: Expert) -> torch.Tensor:
    """One of those that lie outside the module."""
    return TABLES[list(module.slots).index(expert)]


def tables_at_parameters(module: Any, experts: list[Expert]) -> None:
    for slot, expert in zip(module.slots, experts, strict=True):
        slot.weight.rows = table_of(module, expert)


DEALT: dict[str, tuple[Any, Any]] = {
    "parts": (of(lambda e: e), lambda m, k, t: m.of["each"][k][0].load(t)),
    "parameters": (of(lambda e: e.weight), copy_to),
    "buffers": (of(lambda e: e.table), copy_to),
    "views": (of(lambda e: e.weight.data.view(-1)), copy_to),
    "methods": (of(lambda e: e.load), call),
    "partials": (of(lambda e: functools.partial(torch.Tensor.copy_, e.weight.data)), call),
    "closures": (of(closing), call),
    "objects": (of(Slot), call),
    "keys": (
        lambda m, experts: setattr(m, "of", {e: k for k, e in enumerate(experts)}),
        lambda m, k, t: next(e for e, place in m.of.items() if place == k).load(t),
    ),
    "a set": (
        lambda m, experts: setattr(m, "of", {experts[0].weight}),
        lambda m, k, t: m.slots[(m.slots[0].weight in m.of) == bool(k)].load(t),
    ),
    "a part that is hidden": (
        lambda m, experts: m.__dict__.update(first=experts[0]),
        lambda m, k, t: m.slots[(m.first is m.slots[0]) == bool(k)].load(t),
    ),
    "parameters' methods": (
        at_parameters(lambda e: e.load),
        lambda m, k, t: m.slots[k].weight.target(t),
    ),
    "parameters' parts": (
        at_parameters(lambda e: e),
        lambda m, k, t: m.slots[k].weight.target.load(t),
    ),
    "parameters' views": (
        at_parameters(lambda e: e.weight.data[:]),
        lambda m, k, t: m.slots[k].weight.target.copy_(t),
    ),
    "tables": (
        lambda m, experts: setattr(m, "of", [table_of(m, e) for e in experts]),
        lambda m, k, t: m.slots[k].load(t[m.of[k]]),
    ),
    "parameters' tables": (
        tables_at_parameters,
        lambda m, k, t: m.slots[k].load(t[m.slots[k].weight.rows]),
    ),
}


@pytest.mark.parametrize("how", DEALT)
def test_experts_that_are_dealt_out_anew_get_their_own_weights(how: str) -> None:
    module = Dealt(*DEALT[how])
    loader = RecordedLoader(module, ignore=["*"])
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.deal([0, 1])  # all over again, and nothing else
        sync.update(draw(2))
        assert loader.reason == ""
        module.deal([1, 0])
        with pytest.raises(WsyncError, match="which load_weights goes by, was"):
            sync.update(draw(3))
        sync.update(draw(4))
    found = [tensor.clone() for tensor in module.state_dict().values()]
    module.load_weights(list(draw(4).items()))
    assert all(map(torch.equal, found, module.state_dict().values()))


@pytest.mark.parametrize("how", ["parts", "parameters", "buffers", "methods", "closures"])
def test_parts_and_tensors_may_be_replaced_by_such_as_they_are(how: str) -> None:
    module = Dealt(*DEALT[how])
    loader = RecordedLoader(module, ignore=["*"])
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.slots[0].weight = parameter(torch.zeros(32, 8))
        module.slots[1] = Expert()
        module.deal([0, 1])
        for seed in (2, 3):
            sync.update(draw(seed))
            found = [tensor.clone() for tensor in module.state_dict().values()]
            module.load_weights(list(draw(seed).items()))
            assert all(map(torch.equal, found, module.state_dict().values()))


def test_a_part_that_is_the_modules_no_more_is_noticed() -> None:
    module = Dealt(*DEALT["methods"])
    loader = RecordedLoader(module, ignore=["*"])
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.slots[1] = Expert()
        with pytest.raises(WsyncError, match="of, which load_weights goes by, was"):
            sync.update(draw(2))


class Own:
    """Holds numbers and words, and perhaps something else."""

    def __init__(self, *more: Any) -> None:
        self.first, self.more = 0, more


@pytest.mark.parametrize(
    ("hold", "find"),
    [
        (lambda m: m.register_buffer("kept", torch.zeros(3)), lambda m: m.kept),
        (lambda m: setattr(m, "kept", torch.zeros(3)), lambda m: m.kept),
        (lambda m: setattr(m, "own", argparse.Namespace()), lambda m: m.own),
        (lambda m: setattr(m, "own", Own(m.a)), lambda m: m.own),
        (lambda m: setattr(m, "own", Own(Own())), lambda m: m.own.more[0]),
    ],
    ids=["a buffer", "a tensor", "a namespace", "an object", "an object in one"],
)
def test_what_load_weights_reads_of_tensors_and_plain_objects_is_noticed(
    hold: Callable[[Any], object], find: Callable[[Any], Any]
) -> None:
    module = Ordered(0, lambda module: rows(getattr(find(module), "first", 0)))
    hold(module)
    find(module).first = 0
    loader = RecordedLoader(module, ignore=["*"])
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        sync.update(draw(2))
        assert loader.reason == ""
        for change in (
            lambda: setattr(find(module), "first", 3),
            lambda: delattr(find(module), "first"),
        ):
            change()
            with pytest.raises(WsyncError, match="which load_weights goes by, was"):
                sync.update(draw(3))
            sync.update(draw(4))
            assert torch.equal(module.a, draw(4)["a"][rows(getattr(find(module), "first", 0))])


def test_an_object_that_holds_what_cannot_be_compared_is_none_that_is_noticed() -> None:
    module = Ordered(Own(threading.Lock()), lambda module: rows(module.order.first))
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.order.count = 1  # as an engine's own objects count
        sync.update(draw(2))
    assert torch.equal(module.a, draw(2)["a"]) and loader.reason == ""


# --- learning has an end ----------------------------------------------------------------------


@pytest.mark.parametrize("swallows", [False, True])
def test_learning_ends_when_the_trainer_waits_no_longer(swallows: bool) -> None:
    stop, ended = threading.Event(), threading.Event()
    module = Loading()

    def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
        try:
            while not stop.is_set():
                torch.zeros(1)
        except Exception:
            if not swallows:
                raise
        finally:
            ended.set()

    module.load_weights = load  # type: ignore[method-assign]
    engine = ThreadEngine([RecordedLoader(module)])
    options = wsync.Options(deadline=2, progress=False)
    try:
        with wsync.connect(draw(0), engines=[engine], options=options) as sync:
            with pytest.raises(WsyncError):
                sync.update(draw(1))
            assert ended.wait(60)
    finally:
        stop.set()


def test_what_cannot_be_learnt_in_time_is_not_left_to_the_loader() -> None:
    builder = LayoutBuilder()
    for name in "ab":
        builder.add_tensor(name, "float32", [32, 8])
    model = builder.build()
    _, loader = learnt()
    with learning(-1.0), pytest.raises(DeadlineError, match=r"learning .* took over"):
        loader.learn(model)
    assert loader.recording is None
    loader.learn(model)
    assert loader.recording is not None


def test_memory_of_another_size_at_the_same_place_is_learnt_anew() -> None:
    module, loader = learnt()
    padded = np.zeros(2 * 32 * 8, np.float32)
    engine = ThreadEngine([loader])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        for seed, memory in enumerate((padded, padded[: 32 * 8])):
            module.a.data = torch.from_numpy(memory)[: 32 * 8].view(32, 8)
            sync.update(draw(seed))
            assert torch.equal(module.a, draw(seed)["a"])
    assert loader.reason == ""


def test_of_tensors_that_share_memory_no_more_the_first_is_named() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = parameter(torch.zeros(4))
            self.head = self.embedding
            self.later = parameter(torch.zeros(4))

    module = Tied()
    before = ModuleMemory(module)
    module.head = parameter(torch.zeros(4))
    text = ModuleMemory(module).difference(before.facts, before.names)
    assert re.match(r"head was .* embedding's storage and is .* head's storage$", text)
