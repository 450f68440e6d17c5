"""Tensors that forward keeps on a module, with which load_weights has nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync._core import WsyncError
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
Pairs = list[tuple[str, torch.Tensor]]


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in "abc"}


class Part(torch.nn.Module):
    """A parameter, and what its forward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.zeros(4, 8), persistent=False)
        self.last: Any = None
        self.weight = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)


class Kept(torch.nn.Module):
    """Three parts and a copy; one part may go through its own load_weights."""

    a: Any
    b: Any
    c: Any

    def __init__(self, computes: bool) -> None:
        super().__init__()
        for name in "abc":
            self.add_module(name, Part())
        self.twin = torch.zeros(8, 8)
        self.computes = computes

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            computed = name == "b" and self.computes
            parameters = dict(getattr(self, name).named_parameters())
            parameters["weight"].data.copy_(tensor.sin() if computed else tensor)
            if name == "c":
                self.twin.copy_(parameters["weight"])


def logits(part: Any, step: int) -> None:
    part.last = torch.full((step, 8), 1.0)


def now_and_then(part: Any, step: int) -> None:
    if step % 2:
        part.last = torch.ones(4)
    else:
        del part.last


def rotary(part: Any, step: int) -> None:
    part.register_buffer("cos", torch.ones(8 * step, 8), persistent=False)


def in_another_order(part: Any, step: int) -> None:
    del part.cos
    if step % 3:
        part.register_buffer("cos", torch.ones(8 * step, 8), persistent=False)


@pytest.mark.parametrize("serve", [logits, now_and_then, rotary, in_another_order])
@pytest.mark.parametrize("computes", [False, True])
def test_what_forward_keeps_may_change_between_updates(serve: Any, computes: bool) -> None:
    module, plain = Kept(computes), Kept(computes)
    loader = RecordedLoader(module)
    kept: Any = None
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for step in range(1, 7):
            sync.update(draw(step))
            plain.load_weights(list(draw(step).items()))
            for (name, one), two in zip(module.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two), name
            assert torch.equal(module.twin, plain.twin)
            assert kept is None or getattr(module.a, "last", None) is kept
            for part in (module.a, module.b):
                if serve is not in_another_order or hasattr(part, "cos"):
                    serve(part, step)
            kept = getattr(module.a, "last", None)
    assert not loader.reason


def test_what_forward_keeps_beside_a_parameter_that_moves_is_found_again() -> None:
    module = Kept(False)
    with wsync.connect(
        draw(0), engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        for step in range(1, 5):
            sync.update(draw(step))
            assert torch.equal(module.c.weight, draw(step)["c"])
            rotary(module.a, step)
            module.c.weight.data = torch.zeros(8, 8)
        module.c.weight = torch.nn.Parameter(torch.zeros(9, 8), requires_grad=False)
        with pytest.raises(WsyncError, match=r"c.weight was float32 \(8, 8\)"):
            sync.update(draw(5))


def by_shape(module: Kept, pairs: Pairs) -> None:
    """Of what it asks for by name."""
    longer = module.a.cos.shape[0] > 8
    Kept.load_weights(module, [(name, t.flip(0) if longer else t) for name, t in pairs])


def by_values(module: Kept, pairs: Pairs) -> None:
    """Of what it comes across."""
    Kept.load_weights(module, pairs)
    found = vars(module.a)["last"]
    if found is not None:
        module.a.weight.data[:1].copy_(found[:1])


def into(module: Kept, pairs: Pairs) -> None:
    Kept.load_weights(module, pairs)
    found = vars(module.a)["last"]
    if found is not None:
        found.copy_(dict(pairs)["a"][:1])


def by_name(module: Kept, pairs: Pairs) -> None:
    """Of a buffer that the trainer has, where it has the same shape."""
    given = dict(pairs)
    found = given.pop("cos", None)
    Kept.load_weights(module, list(given.items()))
    for name, buffer in module.a.named_buffers():
        if found is not None and name == "cos" and found.shape == buffer.shape:
            buffer.copy_(found)


@pytest.mark.parametrize(
    ("load", "serve"),
    [(by_shape, rotary), (by_values, logits), (into, logits), (by_name, rotary)],
)
def test_what_load_weights_has_to_do_with_is_learnt_anew(load: Any, serve: Any) -> None:
    class Other(Kept):
        def load_weights(self, pairs: Pairs) -> None:
            load(self, pairs)

    module, plain = Other(False), Other(False)
    failed = 0
    more = {"cos": torch.full((16, 8), 3.0)} if load is by_name else {}
    with wsync.connect(
        draw(0) | more, engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        for step in range(1, 4):
            weights = draw(step) | more
            try:
                sync.update(weights)
            except WsyncError as error:
                assert "has changed since it was learnt: a." in str(error)
                failed += 1
                sync.update(weights)
            plain.load_weights(list(weights.items()))
            for (name, one), two in zip(module.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two), name
            assert torch.equal(module.a.cos, plain.a.cos)
            if plain.a.last is not None:
                assert torch.equal(module.a.last, plain.a.last)
            serve(module.a, 1 if load is not by_name else step)
            serve(plain.a, 1 if load is not by_name else step)
            if load is by_shape:
                rotary(module.a, step + 1)
                rotary(plain.a, step + 1)
    assert failed
