"""Loaders that do more than copy: what they load is right to the byte, or they are refused."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fused import bytes_of, differing
from support.workers import ThreadEngine
from torch.testing._internal.two_tensor import TwoTensor

import wsync
from wsync import sglang
from wsync._core import LayoutBuilder, Stream
from wsync.engine.learn import recorded_loader, verify
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.module_memory import ModuleMemory
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.learn.recorder import record
from wsync.engine.learn.recording import RecordingError
from wsync.engine.post_load import run_in_place
from wsync.engine.ring_loaders import ModuleLoader
from wsync.sglang import SglangLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
Tensors = dict[str, torch.Tensor]
SIDE = 8


class Square(torch.nn.Module):
    """Parameters of one shape, and what a loader may go by."""

    def __init__(self, load: Callable[[Square, Tensors], None]) -> None:
        super().__init__()
        for name in "abc":
            self.register_parameter(name, parameter(torch.zeros(SIDE, SIDE)))
        self.filler = parameter(torch.zeros(64, 64))  # most of the model is copied
        self.register_buffer("order", torch.arange(SIDE).flip(0))
        self.register_buffer("first", torch.zeros(SIDE, SIDE))
        self.register_buffer("second", torch.zeros(SIDE, SIDE))
        self.outside = [torch.zeros(SIDE, SIDE)]
        self._load = load

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(pairs))

    def held(self) -> Tensors:
        every = [*self.named_parameters(), *self.named_buffers(), ("outside", self.outside[0])]
        return {name: tensor.detach().clone() for name, tensor in every}


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {name: 5 * torch.randn(SIDE, SIDE, generator=generator) for name in "abc"}
    return {**found, "filler": torch.randn(64, 64, generator=generator)}


def plain(module: Square, tensors: Tensors, *without: str) -> None:
    for name, tensor in tensors.items():
        if name not in without:
            getattr(module, name).data.copy_(tensor)


def updated(module: Square, *seeds: int) -> RecordedLoader:
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in seeds:
            sync.update(draw(seed))
    return loader


def loaded(load: Callable[[Square, Tensors], None], *seeds: int) -> Tensors:
    module = Square(load)
    for seed in seeds:
        module.load_weights(list(draw(seed).items()))
    return module.held()


# --- loaders that change what they are given --------------------------------------------------


def zeroing(module: Square, tensors: Tensors) -> None:
    tensors["a"][0].zero_()
    tensors["a"][3:5] = 7.0
    plain(module, tensors)


def overwriting(module: Square, tensors: Tensors) -> None:
    tensors["a"][2:].copy_(tensors["b"][2:])
    tensors["b"][0].copy_(torch.arange(8.0))
    plain(module, tensors)


def copying_copies(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    module.second.copy_(module.a)
    module.first.copy_(module.second)


@pytest.mark.parametrize("load", [zeroing, overwriting, copying_copies])
def test_what_is_moved_is_learnt(load: Any) -> None:
    module = Square(load)
    loader = updated(module, 1, 2)
    assert (loader.reason, loader.recording and loader.recording.fallback) == ("", {})
    assert differing(module.held(), loaded(load, 1, 2)) == []


# --- loaders that do what no copy does ------------------------------------------------------


def scaling_its_input(module: Square, tensors: Tensors) -> None:
    tensors["a"].mul_(2)
    plain(module, tensors)


def keeping_a_copy(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        module.outside[0].copy_(tensors["a"])


def keeping_its_input(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        module.outside[0] = tensors["a"]


def keeping_a_copied_copy(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        module.second.copy_(module.a)
        module.first.copy_(module.second)
        module.outside[0] = module.first.clone()


def branching_on_a_list(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors and max(tensors["a"][0].tolist()) > 3:
        module.a.data.zero_()


def branching_on_an_array(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors and tensors["a"].numpy().max() > 3:
        module.a.data.zero_()


def branching_on_words(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors and "-" not in repr(tensors["a"]):
        module.a.data.zero_()


def branching_on_format(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors and "-" not in f"{tensors['a']}":
        module.a.data.zero_()


def branching_on_each(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        tensors["a"].clone().apply_(lambda value: abs(value) < 1e9 or module.a.data.zero_() is None)


def keeping_pickled(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        module.outside[0] = pickle.loads(pickle.dumps(tensors["a"]))


def keeping_in_a_file(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        file = io.BytesIO()
        torch.save({"a": tensors["a"]}, file)
        file.seek(0)
        module.outside[0] = torch.load(file)["a"]


def keeping_by_address(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        data = ctypes.string_at(tensors["a"].data_ptr(), tensors["a"].nbytes)
        module.outside[0] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(SIDE, SIDE)


def branching_on_memory(module: Square, tensors: Tensors) -> None:
    if "a" in tensors:
        place = getattr(tensors["a"], "const_data_ptr", tensors["a"].data_ptr)()
        if ctypes.c_float.from_address(place).value > 1e9:
            module.a.data.zero_()
    plain(module, tensors)


def branching_on_storage(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    if "a" in tensors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is old
            place = tensors["a"].storage().data_ptr()
        if abs(ctypes.c_float.from_address(place).value) < 1e9:
            module.a.data.mul_(0.5)


def masking(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    if "a" in tensors:
        rows = tensors["a"][tensors["a"][:, 0].abs() < 4]
        module.a.data.zero_()[: len(rows)].copy_(rows)


def rounding(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    if "a" in tensors:
        module.a.data.copy_(tensors["a"].bfloat16())


def joining_into(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    if "a" in tensors:
        torch.cat([tensors["a"][4:], tensors["a"][:4]], out=module.a.data)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (scaling_its_input, "a: mul_"),
        (keeping_a_copy, "it is kept outside the module"),
        (keeping_its_input, "it is kept outside the module"),
        (keeping_a_copied_copy, "it is kept outside the module"),
        (branching_on_a_list, "its values are looked at"),
        (branching_on_an_array, "its values are looked at"),
        (branching_on_words, "its values are looked at"),
        (branching_on_format, "its values are looked at"),
        (branching_on_each, "its values are looked at"),
        (keeping_pickled, "its values are looked at"),
        (keeping_in_a_file, "its values are looked at"),
        (keeping_by_address, "its values are looked at"),
        (branching_on_memory, "its values are looked at"),
        (branching_on_storage, "its values are looked at"),
        (masking, "its values are looked at"),
        (rounding, "a: converted torch.float32 to torch.bfloat16 to torch.float32"),
        (joining_into, "a: cat"),
    ],
)
def test_the_rest_is_left_to_the_loader(load: Any, reason: str) -> None:
    module = Square(load)
    loader = updated(module, 1, 2)
    assert loader.reason == ""
    assert loader.recording is not None
    assert loader.recording.fallback == {"a": reason}
    assert differing(module.held(), loaded(load, 1, 2)) == []


def clearing(module: Square, tensors: Tensors) -> None:
    if "a" in tensors and tensors["a"].isnan().any():
        module.b.data.zero_()
    plain(module, tensors)


def turning(module: Square, tensors: Tensors) -> None:
    if "a" in tensors:
        module.turned = bool(tensors["a"].isnan().any())
    turned = getattr(module, "turned", False)
    plain(module, {name: tensor.t() if turned else tensor for name, tensor in tensors.items()})


def without_numbers(load: Callable[[Square, Tensors], None]) -> tuple[Square, Tensors, Tensors]:
    """A module, tensors whose values no made-up ones have, and what the loader makes of these."""
    odd, other = draw(2), Square(load)
    odd["a"].fill_(float("nan"))
    other.load_weights(list(odd.items()))
    return Square(load), odd, other.held()


class Scaled(torch.nn.Module):
    """A weight and scalars in each layer, as Gemma 4 and Apertus have them.  Engines fill a
    parameter of one element with item()."""

    kinds = ("alpha", "beta", "gamma", "delta", "epsilon")

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(6))
        for layer in self.layers:
            layer.weight = parameter(torch.zeros(8, 8))
            for kind in self.kinds:
                setattr(layer, kind, parameter(torch.zeros(1)))

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            data = self.get_parameter(name).data
            if data.numel() == 1:
                data.fill_(tensor.item())
            else:
                data.copy_(tensor)


def test_scalars_of_every_layer_may_be_looked_at() -> None:
    module = Scaled()
    weights = [{n: torch.randn(t.shape) for n, t in module.named_parameters()} for _ in range(3)]
    loader = RecordedLoader(module)
    with wsync.connect(weights[0], engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for given in weights:
            sync.update(given)
            assert differing(dict(module.named_parameters()), given) == []
    assert loader.recording is not None
    scalars = {name for name in weights[0] if not name.endswith(".weight")}
    assert loader.recording.fallback.keys() == scalars


def test_values_that_have_a_loader_write_over_what_is_copied_end_the_update() -> None:
    module, odd, expected = without_numbers(clearing)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        with pytest.raises(wsync.RemoteError, match="with the values of a it also writes to b"):
            sync.update(odd)
        sync.update(odd)
        assert differing(module.held(), expected) == []


@pytest.mark.parametrize("known", [False, True])
def test_values_that_say_how_others_are_loaded_make_no_mixture(known: bool) -> None:
    module, odd, expected = without_numbers(turning)
    if known:
        module.turned = False
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        if known:
            with pytest.raises(wsync.RemoteError, match=r"turned, which .* was False and is True"):
                sync.update(odd)
        sync.update(odd)
        assert differing(module.held(), expected) == []


def loading_once(module: Square, tensors: Tensors) -> None:
    had = module.__dict__.setdefault("had", set())
    plain(module, tensors, *had)
    had.update(tensors)


def test_a_loader_that_loads_a_tensor_only_once_is_refused_at_the_second_update() -> None:
    engine = ThreadEngine([RecordedLoader(Square(loading_once))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        with pytest.raises(wsync.RemoteError, match="no tensor of the trainer is loaded to a "):
            sync.update(draw(2))


class Chain(torch.nn.Module):
    """Every second one is multiplied with the parameter before it, as that is by then."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = {name: f"p{number}" for number, name in enumerate(names)}
        for place in self.names.values():
            self.register_parameter(place, parameter(torch.ones(SIDE, SIDE)))
        self.filler = parameter(torch.zeros(64, 64))

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name == "filler":
                self.filler.data.copy_(tensor)
                continue
            place = self.names[name]
            number = int(place[1:])
            factor = getattr(self, f"p{number - 1}") if number % 2 else None
            getattr(self, place).data.copy_(tensor if factor is None else tensor * factor)

    def draw(self) -> Tensors:
        found = {name: torch.randn(SIDE, SIDE) for name in self.names}
        return {**found, "filler": torch.randn(64, 64)}


def chained(module: Chain, other: Chain) -> RecordedLoader:
    """Updates a module three times, and loads the same to another one."""
    loader = RecordedLoader(module)
    engine = ThreadEngine([loader])
    with wsync.connect(module.draw(), engines=[engine], options=OPTIONS) as sync:
        for _ in range(3):
            weights = module.draw()
            sync.update(weights)
            other.load_weights(list(weights.items()))
    return loader


def test_what_the_loader_loads_itself_comes_in_the_trainers_order() -> None:
    names = [f"w{number}" for number in range(16)]
    module, other = Chain(*names), Chain(*names)
    loader = chained(module, other)
    assert loader.recording is not None and loader.recording.fallback.keys() == {*names}
    assert differing(dict(module.named_parameters()), dict(other.named_parameters())) == []


def test_one_call_with_everything_has_the_trainers_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds have another one: two of these are kept together."""
    layer = "model.layers.0.self_attn"
    kept = f"{layer}.q_a_proj.weight", f"{layer}.kv_a_proj_with_mqa.weight"
    names = "first", kept[0], "middle", kept[1]
    monkeypatch.setattr(recorded_loader, "record", raising)
    module, other = Chain(*names), Chain(*names)
    loader = chained(module, other)
    assert loader.reason == "Chain cannot be learnt: not this one"
    assert differing(dict(module.named_parameters()), dict(other.named_parameters())) == []


def raising(*_: object) -> None:
    raise RecordingError("not this one")


def test_a_loader_that_goes_by_the_order_of_calls_is_called_once() -> None:
    module, builder = Chain("a", "b"), LayoutBuilder()
    for name, tensor in module.draw().items():
        builder.add_tensor(name, "float32", tuple(tensor.shape))
    load, model = module.load_weights, builder.build()
    ways = [(load, True), (load, False)]
    assert verify.first_that_makes_same(module, load, ways[:1], model) is None
    assert verify.first_that_makes_same(module, load, ways, model) == (load, False)


class Capsule:
    """What torch hands to others, by a function that is no method of tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return torch.utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def by_capsule(tensor: torch.Tensor) -> float:
    return float(np.abs(np.from_dlpack(Capsule(tensor))).max())


def without_modes(tensor: torch.Tensor) -> float:
    with torch._C.DisableTorchFunction():
        return max(abs(value) for row in tensor.tolist() for value in row)


@pytest.mark.parametrize("read", [by_capsule, without_modes])
def test_who_goes_by_the_size_of_values_is_found_however_they_were_read(read: Any) -> None:
    def load(module: Square, tensors: Tensors) -> None:
        plain(module, tensors)
        if "a" in tensors and read(tensors["a"]) < 1e6:
            module.a.data.mul_(0.5)

    module = Square(load)
    loader = updated(module, 1, 2)
    assert "of its storage is" in loader.reason
    assert differing(module.held(), loaded(load, 1, 2)) == []


def keeping_by_thread(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    a = tensors.get("a", module.outside[0])  # a call need not bring it
    thread = threading.Thread(target=lambda: module.outside[0].copy_(a))
    thread.start()
    thread.join()


def keeping_by_threads_thread(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    a = tensors.get("a", module.outside[0])
    inner = threading.Thread(target=lambda: module.outside[0].copy_(a))
    outer = threading.Thread(target=inner.start)
    outer.start()
    outer.join()
    inner.join()


def branching_by_thread(module: Square, tensors: Tensors) -> None:
    plain(module, tensors)
    with ThreadPool(1) as pool:
        if pool.map(lambda name: tensors[name].max().item() > 1e9, ["a"])[0]:
            module.a.data.zero_()


@pytest.mark.parametrize(
    "load", [keeping_by_thread, keeping_by_threads_thread, branching_by_thread]
)
def test_what_threads_do_is_left_to_the_loader(load: Any) -> None:
    module = Square(load)
    loader = updated(module, 1, 2)
    assert "threads that it starts work on the tensors" in loader.reason
    assert differing(module.held(), loaded(load, 1, 2)) == []


def test_threads_that_have_nothing_to_do_with_the_tensors_are_no_hindrance() -> None:
    def load(module: Square, tensors: Tensors) -> None:
        thread = threading.Thread(target=lambda: torch.zeros(3).add_(1))
        thread.start()
        thread.join()
        if module.a.data_ptr() != module.b.untyped_storage().data_ptr():
            plain(module, tensors)

    loader = updated(Square(load), 1, 2)
    assert (loader.reason, loader.recording and loader.recording.fallback) == ("", {})


def marking_what_is_missing(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    module.a.data.copy_(tensors["a"].half())
    if "b" not in tensors:
        module.order.fill_(1)


def marking_behind_torch(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    module.a.data.copy_(tensors["a"].half())
    if "b" not in tensors:
        ctypes.memset(module.order.data_ptr(), 1, 8)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (marking_what_is_missing, "order is written when it is given a alone"),
        (marking_behind_torch, "order: written by means that cannot be seen"),
    ],
)
def test_a_loader_that_needs_everything_at_once_gets_it(load: Any, reason: str) -> None:
    module = Square(load)
    loader = updated(module, 1, 2)
    assert reason in loader.reason
    if load is marking_what_is_missing:
        assert differing(module.held(), loaded(load, 1, 2)) == []


# --- loaders that go by what an earlier load has left ---------------------------------------


def adding(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    module.a.data.add_(tensors["a"])


def scaling_all_of_it(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    module.a.data[0].copy_(tensors["a"][0])
    module.a.data.mul_(2)


def keeping_the_old(module: Square, tensors: Tensors) -> None:
    module.first.copy_(module.a)
    plain(module, tensors)


def keeping_the_old_aside(module: Square, tensors: Tensors) -> None:
    old = torch.empty(SIDE, SIDE)
    old.copy_(module.a)
    plain(module, tensors)
    module.first.copy_(old)


def keeping_the_old_twice(module: Square, tensors: Tensors) -> None:
    old = torch.cat([module.a, module.b])
    plain(module, tensors)
    module.first.copy_(old[:SIDE])


def counting_the_old(module: Square, tensors: Tensors) -> None:
    large = bool((module.a.abs() > 8).any())
    plain(module, tensors)
    module.first.fill_(large)


def listing_the_old(module: Square, tensors: Tensors) -> None:
    large = max(module.a[0].tolist()) > 3
    plain(module, tensors)
    module.first.fill_(large)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (adding, "it looks at values of a, and then replaces them"),
        (scaling_all_of_it, "it looks at values of a, and then replaces them"),
        (keeping_the_old, "first: a copy of what is written over later"),
        (keeping_the_old_aside, "first: a copy of what is written over later"),
        (keeping_the_old_twice, "first: a copy of what is written over later"),
        (counting_the_old, "it looks at values of a, and then replaces them"),
        (listing_the_old, "it looks at values of a, and then replaces them"),
    ],
)
def test_weights_that_a_loader_goes_by_are_not_lost(load: Any, reason: str) -> None:
    module = Square(load)
    module.load_weights(list(draw(5).items()))
    loader = updated(module, 1, 2)
    assert reason in loader.reason
    assert differing(module.held(), loaded(load, 5, 1, 2)) == []


# --- modules that change between updates ----------------------------------------------------


def gathering(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    module.a.data.copy_(tensors["a"][module.order])


def placing(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    for row in range(SIDE):
        module.a.data[int(module.order[row].item())].copy_(tensors["a"][row])


def listing(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    for row, place in enumerate(module.order.tolist()):
        module.a.data[place].copy_(tensors["a"][row])


def turned(module: Square) -> None:
    module.order.copy_(module.order.roll(1))


def transposed(module: Square) -> None:
    module.a.data = module.a.data.t()


@pytest.mark.parametrize(
    ("load", "change", "reason"),
    [
        (gathering, turned, "order, which load_weights goes by, has other values"),
        (placing, turned, "order, which load_weights goes by, has other values"),
        (listing, turned, "order, which load_weights goes by, has other values"),
        (plain, transposed, r"a was float32 .* strides \(8, 1\) .* \(1, 8\)"),
    ],
)
def test_a_module_that_has_changed_is_learnt_anew(load: Any, change: Any, reason: str) -> None:
    module, other = Square(load), Square(load)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        change(module)
        before = module.held()
        with pytest.raises(wsync.RemoteError, match=reason):
            sync.update(draw(2))
        assert engine.receivers[0].consistent
        assert differing(module.held(), before) == []
        sync.update(draw(3))
    change(other)
    other.load_weights(list(draw(3).items()))
    assert differing(module.held(), {**other.held(), "outside": module.outside[0]}) == []


def test_experts_that_sglang_deals_out_anew_are_learnt_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = torch.arange(SIDE)
    metadata = SimpleNamespace(physical_to_logical_map=places)
    balancer = SimpleNamespace(get_global_expert_location_metadata=lambda: metadata)
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", balancer)

    def load(module: Square, tensors: Tensors) -> None:
        plain(module, tensors, "a")
        for place, expert in enumerate(places):
            module.a.data[place].copy_(tensors["a"][int(expert)])

    module = Square(load)
    engine = ThreadEngine([SglangLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        places.copy_(places.flip(0))
        with pytest.raises(wsync.RemoteError, match="outside the module that has other values"):
            sync.update(draw(2))
        sync.update(draw(3))
    assert torch.equal(module.a, draw(3)["a"].flip(0))


def test_sglang_may_replace_and_copy_its_model(caplog: pytest.LogCaptureFixture) -> None:
    model = Square(plain)
    sglang.load_weights(model, [("stranger", torch.zeros(1))])
    assert "the payload is not a control message" in caplog.text
    other = copy.deepcopy(model)
    sglang.load_weights(other, [("stranger", torch.zeros(1))])
    assert caplog.text.count("the payload is not a control message") == 2
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_weights_that_an_engine_has_replaced_are_let_go() -> None:
    module = Square(plain)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        old = weakref.ref(module.a)
        module.a = parameter(torch.zeros(SIDE, SIDE))
        gc.collect()
        assert old() is None
        sync.update(draw(2))
    assert bytes_of(module.a) == bytes_of(draw(2)["a"])


def test_weights_are_intact_where_nothing_had_to_be_learnt() -> None:
    module = Square(plain)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))

    class Broken(RecordedLoader):
        def learn(self, *_: Any) -> bytes:
            raise KeyError("another worker")

    engines = [engine, ThreadEngine([Broken(Square(plain))])]
    with (
        wsync.connect(draw(0), engines=engines, options=OPTIONS) as sync,
        pytest.raises(wsync.RemoteError, match="another worker"),
    ):
        sync.update(draw(2))
    assert engine.receivers[0].consistent
    assert bytes_of(module.a) == bytes_of(draw(1)["a"])


@pytest.mark.parametrize("needed", [True, False])
def test_a_worker_that_has_learnt_and_loaded_nothing_is_inconsistent(needed: bool) -> None:
    class Late(RecordedLoader):
        def begin(self, rounds: int) -> None:
            raise KeyError(f"before {rounds} rounds")

    module = Square(plain)
    before = module.held()
    engine = ThreadEngine([Late(module, needed=needed)])
    with (
        wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync,
        pytest.raises(wsync.RemoteError, match="before 1 rounds"),
    ):
        sync.update(draw(1))
    assert differing(module.held(), before)
    assert not engine.receivers[0].consistent


# --- the proof ------------------------------------------------------------------------------


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verify, "_BATCH", 1)
    yield


@pytest.mark.usefixtures("small_batches")
def test_copies_in_a_wrong_order_are_found_in_small_batches() -> None:
    module = Square(copying_copies)
    builder = LayoutBuilder()
    for name, tensor in draw(0).items():
        builder.add_tensor(name, "float32", tuple(tensor.shape))
    layout = builder.build()
    recording = record(module, module.load_weights, MadeUpModel(layout))
    trial, held = MadeUpModel(layout, seed=1), ModuleMemory(module)
    verify.verify(module, module.load_weights, trial, recording, Stream(1), held)
    recording.copies.reverse()
    with pytest.raises(RecordingError, match="first: byte 0 of its storage"):
        verify.verify(module, module.load_weights, trial, recording, Stream(1), held)


def test_made_up_values_are_finite_large_and_small() -> None:
    builder = LayoutBuilder()
    dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    for dtype in dtypes:
        builder.add_tensor(dtype, dtype, (4096,))
    model = MadeUpModel(builder.build())
    for _, tensor in model.pairs():
        assert tensor.float().isfinite().all()
        assert tensor.float().abs().max() > 7
        assert tensor.float().abs().min() < 0.1
        tensor.view(torch.uint8).zero_()
    assert all(tensor.float().any() for _, tensor in model.pairs())


# --- hooks ----------------------------------------------------------------------------------


def test_a_hook_may_bind_other_views_of_the_same_memory() -> None:
    module = Square(plain)
    module.load_weights(list(draw(1).items()))
    places = {name: getattr(module, name).data_ptr() for name in "abc"}

    def hook() -> None:
        module.a = parameter(module.a.data.t())
        module.b, module.c = module.c, module.b
        module.filler.data = module.filler.data + 1

    run_in_place(module, hook)
    assert {name: getattr(module, name).data_ptr() for name in "abc"} == places
    wanted = draw(1)
    assert torch.equal(module.a, wanted["a"].t())
    assert torch.equal(module.filler, wanted["filler"] + 1)
    assert torch.equal(module.b, wanted["c"])
    assert torch.equal(module.c, wanted["b"])


@pytest.mark.parametrize("kind", ["sparse", "csr", "mkldnn", "nested", "wrapper", "uninitialised"])
@pytest.mark.parametrize("learnt", [True, False])
def test_tensors_without_memory_of_their_own_are_left_alone(kind: str, learnt: bool) -> None:
    square = torch.eye(3)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": square.to_sparse,
        "csr": square.to_sparse_csr,
        "mkldnn": square.to_mkldnn,
        "nested": lambda: torch.nested.nested_tensor([square, square[:2]]),
        "wrapper": lambda: TwoTensor(square, square),
        "uninitialised": torch.nn.UninitializedBuffer,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about sparse and nested tensors
        other = made[kind]()
    module = Square(plain)
    module.register_buffer("other", other)
    module.also = other
    run_in_place(module, lambda: None)
    loader = RecordedLoader(module) if learnt else ModuleLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
    assert getattr(loader, "reason", "") == ""
    assert module.other is module.also is other
    assert all(torch.equal(getattr(module, name), tensor) for name, tensor in draw(1).items())
