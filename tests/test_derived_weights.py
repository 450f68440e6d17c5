"""What a module derives from its weights and keeps is made anew after an update, as it is where its
own load_weights has loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
import wsync.fsdp
from wsync._core import LayoutBuilder, describe
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import LayoutLoader, ModuleLoader

OPTIONS = wsync.Options(deadline=20, progress=False)
Pairs = list[tuple[str, torch.Tensor]]


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in "ab"}


class Module(torch.nn.Module):
    """Two parameters; `answer` is made of one of them, by what is kept of it."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            data = torch.zeros(8, 8)
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        self.kept: dict[Any, torch.Tensor] = {}

    def answer(self) -> torch.Tensor:
        key = self.a.data_ptr(), self.a._version
        if key not in self.kept:
            self.kept = {key: self.a.t().contiguous()}
        return self.kept[key]

    def copy(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)


class Loading(Module):
    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)


def by_layout(module: Module) -> LayoutLoader:
    builder = LayoutBuilder()
    builder.add_tensors(["a", "b"], describe([module.a, module.b]))
    return LayoutLoader(builder.build(), [module.a, module.b])


@pytest.mark.parametrize(
    ("module", "make"),
    [(Module(), by_layout), (Module(), ModuleLoader), (Loading(), RecordedLoader)],
)
def test_copies_count_as_writes(module: Module, make: Any) -> None:
    with wsync.connect(draw(0), engines=[ThreadEngine([make(module)])], options=OPTIONS) as sync:
        for seed in (1, 2, 3):
            weights = draw(seed)
            sync.update(weights)
            assert torch.equal(module.answer(), weights["a"].t())


class Flag(Module):
    """Keeps a flag that says whether what it has made is stale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.zeros(8, 8), persistent=False)
        self.stale = True

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)
            self.stale = True

    def answer(self) -> torch.Tensor:
        if self.stale:
            self.made.copy_(self.a.t())
            self.stale = False
        return self.made


def test_an_update_leaves_attributes_as_a_load_does() -> None:
    module = Flag()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in range(1, 6):
            weights = draw(seed)
            sync.update(weights)
            assert loader.learnt is not None
            assert torch.equal(module.answer(), weights["a"].t())


def test_tensors_that_are_not_written_keep_their_versions() -> None:
    module = Loading()
    module.register_buffer("table", torch.ones(8))
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        versions = [tensor._version for tensor in (module.a, module.table)]
        sync.update(draw(2))
        assert module.a._version > versions[0]
        assert module.table._version == versions[1]
