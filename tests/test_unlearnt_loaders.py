"""Loaders that cannot be learnt: what they are tried with, and what is refused all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from support.workers import ThreadEngine
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=16384)
Tensors = dict[str, torch.Tensor]
Copy = Callable[[torch.Tensor, torch.Tensor], object]


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape), requires_grad=False)


def by_numpy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.numpy()[:] = tensor.numpy()


COPIES = [lambda target, tensor: target.copy_(tensor * 1), by_numpy]


class Fused(torch.nn.Module):
    def __init__(self, copy: Copy) -> None:
        super().__init__()
        self.qkv = parameter(24, 8)
        self._copy = copy

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self._copy(self.qkv.data["qkv".index(name) * 8 :][:8], tensor)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("names", ["qkv", "qv"])
def test_each_byte_of_a_parameter_has_to_be_delivered(copy: Copy, names: str) -> None:
    """Whatever is delivered may be what is there already."""
    loader = RecordedLoader(Fused(copy))
    weights = {name: torch.randn(8, 8) for name in names}
    with wsync.connect(weights, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for _ in range(2):
            if names == "qkv":
                sync.update()
                continue
            with pytest.raises(wsync.WsyncError, match=r"qkv \(256 of its 768 bytes\)"):
                sync.update()


faults: list[str] = []


class Binding(torch.nn.Module):
    """Binds tensors anew at each call, as SGLang's Kimi-Linear and vLLM's Phi do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parameter(64, 64), parameter(64, 64)
        self.register_buffer("whole", torch.zeros(128, 64))
        self.twice = torch.zeros(64, 64)

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            setattr(self, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
            if faults:
                raise ValueError("half way")
        self.register_buffer("whole", torch.cat([self.a, self.b]))
        self.twice = self.b * 2


def test_what_a_loader_binds_anew_lies_where_cuda_graphs_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, plain = Binding(), Binding()
    names = "a", "b", "whole", "twice"
    graph = {name: getattr(module, name).detach() for name in names}
    weights = [{name: torch.randn(64, 64) for name in "ab"} for _ in range(4)]
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(weights[0], engines=[engine], options=OPTIONS) as sync:
        for given in weights[1:3]:
            sync.update(given)
            plain.load_weights(list(given.items()))
            assert all(torch.equal(graph[name], getattr(plain, name)) for name in names)
        monkeypatch.setattr(sys.modules[__name__], "faults", ["half way"])
        with pytest.raises(wsync.WsyncError, match="half way"):
            sync.update(weights[1])
        monkeypatch.undo()
        sync.update(weights[3])
    plain.load_weights(list(weights[3].items()))
    for name in names:
        assert torch.equal(graph[name], getattr(plain, name))
        assert getattr(module, name).data_ptr() == graph[name].data_ptr()


class Checked(torch.nn.Module):
    """Refuses made-up values, as loaders of fused layers do whose scales have to be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.left = (parameter(8, 8) for _ in range(3))

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        given = dict(pairs)
        if given["trained"].min() != given["trained"].max():
            raise ValueError("the scales of a layer have to be equal")
        for name, tensor in given.items():
            getattr(self, name).data.copy_(tensor)


def test_what_keeps_its_values_is_delivered_where_no_made_up_values_can_be_tried() -> None:
    module = Checked()

    def weights(number: int) -> Tensors:
        return {name: torch.ones(8, 8) for name in ("frozen", "left")} | {
            "trained": torch.full((8, 8), float(number))
        }

    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(weights(0), engines=[engine], options=OPTIONS) as sync:
        for number in range(1, 4):
            given = weights(number)
            sync.update(given)
            assert all(torch.equal(getattr(module, name), given[name]) for name in given)


class Sharded(torch.nn.Module):
    """Parameters are DTensors, as SGLang's torch_native_llama has them: they lie in other tensors
    than their own."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (1,))
        for name in "ab":
            whole = distribute_tensor(torch.zeros(64, 64), mesh, [Replicate()])
            self.register_parameter(name, torch.nn.Parameter(whole, requires_grad=False))

    @torch.no_grad()
    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            getattr(self, name).to_local().copy_(tensor)


@pytest.mark.usefixtures("group_of_one")
def test_dtensors_are_loaded() -> None:
    module = Sharded()
    weights = {name: torch.randn(64, 64) for name in "ab"}
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update()
        sync.update()  # what has not changed was delivered all the same
    for name in "ab":
        assert torch.equal(getattr(module, name).to_local(), weights[name])
