"""Loaders that put two tensors into one place: both are the same to the bit, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync._core import WsyncError
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=20, progress=False)
Tensors = dict[str, torch.Tensor]
Load = Callable[["Head", Tensors], None]


class Head(torch.nn.Module):
    """An embedding, padded, and a head that is tied to it."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.filler = torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.head = self.embed
        self._load = load

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(pairs))


def common(module: Head, tensors: Tensors) -> None:
    module.embed[:6].copy_(tensors["embed"])
    module.embed[6:].fill_(0)
    module.filler.copy_(tensors["filler"])


def both(module: Head, tensors: Tensors) -> None:
    common(module, tensors)
    module.head[:6].copy_(tensors["head"])


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(6, 4, generator=generator).bfloat16().float()
    return {
        "embed": embed,
        "head": embed.clone(),
        "filler": torch.randn(64, 64, generator=generator),
    }


@pytest.mark.parametrize("load", [common, both])
@pytest.mark.parametrize("needed", [True, False])
def test_what_is_loaded_twice_is_compared_at_every_update(load: Load, needed: bool) -> None:
    module = Head(load)
    loader = RecordedLoader(module, needed=needed)
    engine = ThreadEngine([loader])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert torch.equal(module.embed[:6], draw(seed)["embed"])
        assert loader.reason == ""
        other = draw(3)
        other["head"][4, 2] += 1
        with pytest.raises(
            WsyncError, match=r"embed: (embed and head|head and embed) are one tensor of the module"
        ):
            sync.update(other)
        assert not engine.receivers[0].state.consistent
        sync.update(draw(4))
        assert engine.receivers[0].state.consistent
    assert torch.equal(module.embed[:6], draw(4)["embed"])


def test_what_is_compared_can_be_inspected() -> None:
    loader = RecordedLoader(Head(both))
    facts: dict[str, Any] = {}
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        facts = loader.facts()
    assert facts["same_place"]
    assert {box["into"] for tensor in facts["tensors"] for box in tensor["boxes"]} == {
        "embed",
        "filler",
    }


def fused(module: Head, tensors: Tensors) -> None:
    for name, rows in (("embed", slice(0, 6)), ("more", slice(6, 8))):
        if name in tensors:
            module.embed[rows].copy_(tensors[name])
    if "filler" in tensors:
        module.filler.copy_(tensors["filler"])


def opaque(module: Head, tensors: Tensors) -> None:
    fused(module, {name: tensor * 2 for name, tensor in tensors.items()})


LACKING = {
    "whole": (fused, ["embed", "more"], r"filler \(16384 of its 16384 bytes\)"),
    "part": (fused, ["embed", "filler"], r"embed \(32 of its 128 bytes\)"),
    "opaque": (opaque, ["filler"], r"embed \(128 of its 128 bytes\)"),
}


@pytest.mark.parametrize("kind", LACKING)
@pytest.mark.parametrize("way", ["refused", "ignore", "variable"])
def test_a_parameter_that_the_trainer_lacks_is_refused_unless_it_is_to_stay(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, names, text = LACKING[kind]
    if way == "variable":
        monkeypatch.setenv("WSYNC_KEEP", "embed, filler")
    every = {**draw(1), "more": torch.ones(2, 4)}
    tensors = {name: every[name] for name in names}
    module = Head(load)
    loader = RecordedLoader(module, ignore=["embed", "fill*"] if way == "ignore" else [])
    engine = ThreadEngine([loader])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        if way == "refused":
            for _ in range(2):
                with pytest.raises(WsyncError, match=text):
                    sync.update(version=3)
            assert engine.version is None
            return
        sync.update(version=3)
    assert bool(loader.reason) == (kind == "opaque")
    other = Head(load)
    other.load_weights(list(tensors.items()))
    for name in names:
        part = "filler" if name == "filler" else "embed"
        rows = slice(6, 8) if name == "more" else slice(0, 6) if name == "embed" else slice(None)
        assert torch.equal(getattr(module, part)[rows], getattr(other, part)[rows])
