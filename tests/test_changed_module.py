"""Modules that change between updates and in the midst of one: noticed, or it does no harm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync._core import WsyncError
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import CallingLoader, ModuleLoader

OPTIONS = wsync.Options(deadline=20, progress=False)
Tensors = dict[str, torch.Tensor]


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


class Pair(torch.nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parameter(torch.zeros(32, 8))
        self.b = parameter(torch.zeros(32, 8))


class Loading(Pair):
    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(32, 8, generator=generator) for name in "ab"}


def by_name() -> tuple[Pair, Any]:
    module = Pair()
    return module, ModuleLoader(module)


def learnt() -> tuple[Pair, Any]:
    module = Loading()
    return module, RecordedLoader(module)


class Rebinding(Pair):
    """Has other tensors after each call, which it processes further when all has come."""

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            setattr(self, name, parameter(tensor.clone()))

    def process(self, _: object = None) -> None:
        for each in (self.a, self.b):
            each.data = each.data.clone()
        self.b = parameter(self.b.data)


def other_data(module: Pair) -> None:
    module.a.data = torch.full((32, 8), 7.0)


def other_parameter(module: Pair) -> None:
    module.a = parameter(torch.full((32, 8), 7.0))


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


@pytest.mark.parametrize("make", [CallingLoader, RecordedLoader])
def test_a_load_weights_that_is_patched_later_is_called(make: Callable[[Loading], Any]) -> None:
    module = Loading()
    engine, first = ThreadEngine([make(module)]), module.load_weights
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update()
        module.load_weights = lambda pairs: first([(n, t.flip(0)) for n, t in pairs])  # type: ignore[method-assign]
        sync.update(draw(1))
        for tensor, name in (module.a, "a"), (module.b, "b"):
            assert torch.equal(tensor, draw(1)[name].flip(0))
        sync.update(draw(2))


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


@pytest.mark.parametrize("when", ["begin", "finish"])
@pytest.mark.parametrize(
    ("make", "change"),
    [(learnt, other_data), (learnt, other_parameter), (by_name, other_data)],
)
def test_a_module_that_changes_in_the_midst_of_an_update_is_not_called_updated(
    make: Callable[[], tuple[Pair, Any]], change: Callable[[Pair], None], when: str
) -> None:
    module, loader = make()
    engine = ThreadEngine([Midway(loader, when, lambda: change(module))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="while the update ran"):
            sync.update(draw(1), version=1)
        assert not engine.receivers[0].state.consistent
        assert engine.version is None
        sync.update(draw(2))
    assert engine.receivers[0].state.consistent
    assert torch.equal(module.a, draw(2)["a"])
    assert torch.equal(module.b, draw(2)["b"])


@pytest.mark.parametrize("make", [CallingLoader, RecordedLoader])
def test_load_weights_and_what_follows_it_may_replace_tensors(make: Callable[..., Any]) -> None:
    options = dataclasses.replace(OPTIONS, round_nbytes=draw(0)["a"].nbytes)
    module = Rebinding()
    loader = make(module, **({"after": module.process} if make is RecordedLoader else {}))
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=options) as sync:
        for seed in range(3):
            sync.update(draw(seed))
            assert torch.equal(module.a, draw(seed)["a"])
            assert torch.equal(module.b, draw(seed)["b"])
