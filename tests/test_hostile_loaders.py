"""Loaders that look at what they load, modules that change, and hooks."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fused import bytes_of, differing
from support.workers import ThreadEngine
from torch.testing._internal.two_tensor import TwoTensor

import wsync
from wsync import sglang
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.post_load import run_in_place
from wsync.engine.ring_loaders import CallingLoader
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
        self._load = load

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(pairs))

    def held(self) -> Tensors:
        every = [*self.named_parameters(), *self.named_buffers()]
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
    assert loader.learnt is not None
    assert not loader.computed()


def gathering(module: Square, tensors: Tensors) -> None:
    plain(module, tensors, "a")
    module.a.data.copy_(tensors["a"][module.order])


def turned(module: Square) -> None:
    module.order.copy_(module.order.roll(1))


def transposed(module: Square) -> None:
    module.a.data = module.a.data.t()


@pytest.mark.parametrize(
    ("load", "change", "reason"),
    [
        (gathering, turned, "load_weights loads a"),
        (plain, transposed, "a has another dtype, shape or strides"),
    ],
)
def test_a_module_that_has_changed_is_learnt_anew(
    load: Any, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, other = Square(load), Square(load)
    engine = ThreadEngine([RecordedLoader(module)])
    options = dataclasses.replace(OPTIONS, delivery="wsync", stage="on")
    with wsync.connect(draw(0), engines=[engine], options=options) as sync:
        sync.update(draw(1))
        assert sync.stage(draw(2))
        change(module)
        before = module.held()
        with pytest.raises(wsync.RemoteError, match=reason):
            sync.commit()
        # an audit cannot tell what else load_weights has written
        assert engine.receivers[0].state.consistent == (change is transposed)
        assert differing(module.held(), before) == []
        sync.update(draw(3))
        change(module)
        sync.update(draw(3), version="again")
        assert reason in caplog.text and engine.version == "again"
    change(other)
    change(other)
    other.load_weights(list(draw(3).items()))
    assert differing(module.held(), other.held()) == []


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
        sync.update(draw(2))
    assert torch.equal(module.a, draw(2)["a"].flip(0))


def test_sglang_may_replace_its_model(caplog: pytest.LogCaptureFixture) -> None:
    model = Square(plain)
    sglang.load_weights(model, [("stranger", torch.zeros(1))])
    assert "the payload is a list, not a control message" in caplog.text
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
    assert engine.receivers[0].state.consistent
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
    assert not engine.receivers[0].state.consistent


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


@pytest.mark.parametrize("learnt", [True, False])
def test_tensors_without_memory_of_their_own_are_left_alone(learnt: bool) -> None:
    """As wrapper subclasses are, torchao's among them."""
    other = TwoTensor(torch.eye(3), torch.eye(3))
    module = Square(plain)
    module.register_buffer("other", other)
    module.also = other
    run_in_place(module, lambda: None)
    loader = RecordedLoader(module) if learnt else CallingLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
    assert getattr(loader, "reason", "") == ""
    assert module.other is module.also is other
    assert all(torch.equal(getattr(module, name), tensor) for name, tensor in draw(1).items())
