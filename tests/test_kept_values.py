"""What load_weights keeps of the values that it was tried with: nothing."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=256, ring_nbytes=8192)
Pairs = list[tuple[str, torch.Tensor]]
Load = Callable[[Any, Pairs], None]


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


_given: list[torch.Tensor] = []


class Module(torch.nn.Module):
    """Three tensors fused, each of 256 bytes, and one that is copied or computed."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.qkv = parameter(torch.full((24, 8), -7.0))
        self.o = parameter(torch.zeros(8, 8))
        self.register_buffer("largest", torch.zeros(()))
        self.scale: Any = None
        self.scales: dict[str, Any] = {"of each": []}
        self.array = np.zeros(1)
        self._load = load

    @cached_property
    def largest_given(self) -> float:
        if not _given:
            raise AttributeError("there is none before a load")
        return _given[0].abs().max().item()

    def load_weights(self, pairs: Pairs) -> None:
        self._load(self, pairs)

    def place(self, name: str) -> torch.Tensor:
        return self.o.data if name == "o" else self.qkv.data["qkv".index(name) * 8 :][:8]


def draw(names: str = "qkvo", seed: int = 0) -> dict[str, torch.Tensor]:
    """Smaller than what loaders are tried with, as weights are."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) * 0.02 for name in names}


def each(copy: Callable[[torch.Tensor, torch.Tensor], object]) -> Load:
    def load(module: Module, pairs: Pairs) -> None:
        for name, tensor in pairs:
            copy(module.place(name), tensor)

    return load


def first_scale(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        if module.scale is None:
            module.scale = tensor.abs().max().item()
        module.place(name).copy_(tensor / module.scale)


def first_tensor(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        if module.scale is None:
            module.scale = tensor.abs().max()
        module.place(name).copy_(tensor / module.scale)


def largest(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        module.scale = max(module.scale or 0.0, tensor.abs().max().item())
        module.place(name).copy_(tensor / module.scale)


def first_scale_by_vars(module: Module, pairs: Pairs) -> None:
    held = vars(module)
    for name, tensor in pairs:
        if held["scale"] is None:
            held["scale"] = tensor.abs().max().item()
        module.place(name).copy_(tensor / held["scale"])


def first_scale_by_thread(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        if module.scale is None:
            value = tensor.abs().max().item()
            thread = threading.Thread(target=setattr, args=(module, "scale", value))
            thread.start()
            thread.join()
        module.place(name).copy_(tensor / module.scale)


def first_scale_in_a_cached_property(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        _given[:] = [tensor]
        module.place(name).copy_(tensor / module.largest_given)
        _given.clear()


def largest_of_each(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        known = module.scales.get(name, 0.0)
        module.scales[name] = max(known, tensor.abs().max().item())
        module.scales["of each"].append(name)
        module.place(name).copy_(tensor / module.scales[name])


def at_a_parameter(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        known = getattr(module.o, "scale", 0.0)
        module.o.scale = max(known, tensor.abs().max().item())  # type: ignore[attr-defined]
        module.place(name).copy_(tensor / module.o.scale)


def largest_aside(module: Module, pairs: Pairs) -> None:
    each(torch.Tensor.copy_)(module, pairs)
    given = dict(pairs)
    if "o" in given:
        module.scale = max(module.scale or 0.0, given["o"].abs().max().item())
    if "q" in given:
        module.scales["q"] = "loaded"


def largest_in_a_buffer(module: Module, pairs: Pairs) -> None:
    module.o = parameter(module.o.clone())
    for name, tensor in pairs:
        module.largest.copy_(torch.maximum(module.largest, tensor.abs().max()))
        module.place(name).copy_(tensor / module.largest)


def largest_in_a_buffer_later(module: Module, pairs: Pairs) -> None:
    if module.scale is None:
        module.scale = torch.zeros(())
    for name, tensor in pairs:
        module.largest.copy_(torch.maximum(module.largest, tensor.abs().max()))
        module.place(name).copy_(tensor / module.largest)


def beside(note: Callable[[Module, torch.Tensor], object]) -> Load:
    """Copies all tensors, and notes something of one."""

    def load(module: Module, pairs: Pairs) -> None:
        each(torch.Tensor.copy_)(module, pairs)
        if "o" in (given := dict(pairs)):
            note(module, given["o"])

    return load


def raise_out(module: Module, tensor: torch.Tensor) -> None:
    torch.maximum(module.largest, tensor.abs().max(), out=module.largest)


def add_out(module: Module, tensor: torch.Tensor) -> None:
    torch.add(module.largest, tensor.sum(), out=module.largest)


def replace_smaller(module: Module, tensor: torch.Tensor) -> None:
    if tensor.abs().max() > module.largest:
        module.largest.copy_(tensor.abs().max())


def running_mean(module: Module, tensor: torch.Tensor) -> None:
    module.largest.mul_(0.9).add_(0.1 * tensor.mean().item())


def in_an_array(module: Module, tensor: torch.Tensor) -> None:
    module.array[0] = max(module.array[0], tensor.abs().max().item())
    module.largest.fill_(float(module.array[0]))


def in_a_tensor_made_later(module: Module, pairs: Pairs) -> None:
    if module.scale is None:
        module.scale = torch.zeros(())
    beside(raise_out)(module, pairs)


@pytest.mark.parametrize(
    ("load", "learnt"),
    [
        (first_scale, False),
        (first_tensor, False),
        (largest, False),
        (first_scale_by_vars, False),
        (first_scale_by_thread, False),
        (first_scale_in_a_cached_property, False),
        (largest_of_each, False),
        (at_a_parameter, False),
        (largest_aside, True),
        (largest_in_a_buffer, False),
        (largest_in_a_buffer_later, False),
        (beside(raise_out), True),
        (beside(add_out), False),
        (beside(replace_smaller), True),
        (beside(running_mean), False),
        (beside(in_an_array), True),
        (in_a_tensor_made_later, False),
    ],
)
def test_nothing_is_kept_of_made_up_values(load: Load, learnt: bool) -> None:
    module, other = Module(load), Module(load)
    loader = RecordedLoader(module)
    with wsync.connect(draw(), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed=seed))
            other.load_weights(list(draw(seed=seed).items()))
            for name in ("qkv", "o", "largest"):
                assert torch.equal(getattr(module, name), getattr(other, name)), name
            assert (module.scale, module.scales) == (other.scale, other.scales)
            assert module.array == other.array
            assert getattr(module.o, "scale", None) == getattr(other.o, "scale", None)
    assert (loader.reason == "") == learnt


class OwnDict(dict[str, float]):
    """One whose other methods are not for filling it."""

    def copy(self) -> Any:
        raise AssertionError

    __iter__ = items = keys = clear = update = copy  # type: ignore[assignment]


class OwnList(list[float]):
    def copy(self) -> Any:
        raise AssertionError

    __iter__ = clear = extend = copy  # type: ignore[assignment]


@dataclass(slots=True)
class Largest:
    value: float = 0.0

    def raise_to(self, value: float) -> None:
        self.value = value


class Object:
    def __init__(self) -> None:
        self.value = 0.0

    def raise_to(self, value: float) -> None:
        self.value = value


def locked(array: Any) -> Any:
    array.flags.writeable = False
    return array


def unlock(array: Any, value: float) -> None:
    array.flags.writeable = True
    array[0] = value
    array.flags.writeable = False


def at_a_tensor(module: Module) -> Any:
    tensor = torch.zeros(1)
    tensor.top = 0.0  # type: ignore[attr-defined]
    return tensor


def at_the_buffer(module: Module) -> Any:
    module.largest.top = 0.0  # type: ignore[assignment]


def at_a_parameter_too(module: Module) -> Any:
    module.o.top = torch.zeros(1)  # type: ignore[attr-defined]


def with_a_view(module: Module) -> Any:
    packed = bytearray(8)
    return packed, np.frombuffer(packed, dtype=np.float64)


def in_order(store: Any, value: float) -> None:
    store[value] = None
    store.move_to_end(value, last=False)


@pytest.mark.parametrize(
    ("make", "get", "put"),
    [
        (lambda _: np.zeros(1), lambda m: m.store[0], lambda m, v: unlock(m.store, v)),
        (lambda _: locked(np.zeros(1)), lambda m: m.store[0], lambda m, v: unlock(m.store, v)),
        (
            lambda _: np.zeros(4)[:1],
            lambda m: m.store[0],
            lambda m, v: m.store.__setitem__(0, v),
        ),
        (with_a_view, lambda m: m.store[1][0], lambda m, v: m.store[1].__setitem__(0, v)),
        (
            lambda _: OwnDict(a=0.0),
            lambda m: m.store["a"],
            lambda m, v: m.store.__setitem__("a", v),
        ),
        (lambda _: OwnList([0.0]), lambda m: m.store[0], lambda m, v: m.store.__setitem__(0, v)),
        (
            lambda _: type("Own", (deque,), {})([0.0]),
            lambda m: m.store[-1],
            lambda m, v: m.store.append(v),
        ),
        (
            lambda _: type("Own", (set,), {})(),
            lambda m: max(m.store, default=0.0),
            lambda m, v: m.store.add(v),
        ),
        (
            lambda _: OrderedDict({0.0: None}),
            lambda m: next(iter(m.store)),
            lambda m, v: in_order(m.store, v),
        ),
        (
            lambda _: ({"a": 0.0},),
            lambda m: m.store[0]["a"],
            lambda m, v: m.store[0].__setitem__("a", v),
        ),
        (
            lambda _: UserDict(a=0.0),
            lambda m: m.store["a"],
            lambda m, v: m.store.__setitem__("a", v),
        ),
        (
            lambda _: SimpleNamespace(a=0.0),
            lambda m: m.store.a,
            lambda m, v: setattr(m.store, "a", v),
        ),
        (lambda _: Largest(), lambda m: m.store.value, lambda m, v: m.store.raise_to(v)),
        (lambda _: Object(), lambda m: m.store.value, lambda m, v: m.store.raise_to(v)),
        (
            lambda _: Object().raise_to,
            lambda m: m.store.__self__.value,
            lambda m, v: m.store(v),
        ),
        (at_a_tensor, lambda m: m.store.top, lambda m, v: setattr(m.store, "top", v)),
        (at_the_buffer, lambda m: m.largest.top, lambda m, v: setattr(m.largest, "top", v)),
        (
            lambda _: {"a": torch.zeros(1).expand(2)},
            lambda m: m.store["a"][0].item(),
            lambda m, v: m.store["a"][0].fill_(v),
        ),
        (at_a_parameter_too, lambda m: m.o.top.item(), lambda m, v: m.o.top.fill_(v)),
    ],
    ids=[
        *("array", "locked array", "view of an array", "bytearray with a view", "dict", "list"),
        *("deque", "set", "order", "tuple", "UserDict", "namespace", "slots", "object", "method"),
        *("attribute of a tensor", "attribute of a buffer", "tensor in a dict"),
        "tensor of a parameter",
    ],
)
def test_nothing_made_up_stays_in_what_a_module_holds(
    make: Callable[[Module], Any],
    get: Callable[[Any], float],
    put: Callable[[Any, float], None],
) -> None:
    def load(module: Module, pairs: Pairs) -> None:
        for name, tensor in pairs:
            put(module, max(get(module), tensor.abs().max().item()))
            module.place(name).copy_(tensor / get(module))

    modules = Module(load), Module(load)
    for module in modules:
        module.store = make(module)
    module, other = modules
    loader = RecordedLoader(module)
    with wsync.connect(draw(), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed=seed))
            other.load_weights(list(draw(seed=seed).items()))
            assert get(module) == get(other)
            assert torch.equal(module.qkv, other.qkv)
            assert torch.equal(module.o, other.o)


class Own(dict[str, float]):
    """One that there can be weak references to."""


OWN = Own(a=0.0)


def test_what_stands_for_a_container_is_left_alone() -> None:
    module = Module(each(torch.Tensor.copy_))
    module.store = weakref.proxy(OWN), MagicMock(spec=dict)  # type: ignore[assignment]
    loader = RecordedLoader(module)
    with wsync.connect(draw(), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(seed=1))
    assert loader.reason == "" and torch.equal(module.o, draw(seed=1)["o"])


def test_nothing_is_loaded_where_made_up_values_stay() -> None:
    views = []

    def longer_with_a_view(module: Module, pairs: Pairs) -> None:
        """Of what has a view, nobody can change the length."""
        if not views:
            module.store.extend(b"01234567")
            views.append(memoryview(module.store))
        for name, tensor in pairs:
            module.scales[name] = max(module.scales.get(name, 0.0), tensor.abs().max().item())
            module.place(name).copy_(tensor / module.scales[name])

    module = Module(longer_with_a_view)
    module.store = bytearray(8)  # type: ignore[assignment]
    loader = RecordedLoader(module)
    with wsync.connect(draw(), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for _ in range(2):
            with pytest.raises(wsync.WsyncError, match=r"store: of Module, keeps .*BufferError"):
                sync.update(draw(seed=1))
    assert module.scales == {"of each": []}  # all else is put back
    with pytest.raises(wsync.LayoutError, match="store: of Module"):
        loader.begin(1)
