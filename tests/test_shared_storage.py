"""A model whose weights lie in one storage with others': learning leaves theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
Tensors = dict[str, torch.Tensor]
Load = Callable[["Part", Tensors], None]
Place = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in "abc"}


class Part(torch.nn.Module):
    """Three weights, and tensors that share memory with them, which lie in 8 columns."""

    def __init__(self, columns: torch.Tensor, load: Load) -> None:
        super().__init__()
        for number, name in enumerate("abc"):
            self.register_parameter(name, parameter(columns[number * 8 :][:8]))
        self.register_buffer("tops", columns[:16:8])
        self._load = load

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(pairs))


def before(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[:200].view(25, 8), flat[200:]


def behind(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[200:].view(25, 8), flat[:200]


def columns(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = flat.view(25, 16)
    return table[:, :8], table[:, 8:]


def rows_apart(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = flat.view(50, 8)
    return table[::2], table[1::2]


def copied(part: Part, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        getattr(part, name).copy_(tensor)


def computed(part: Part, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        getattr(part, name).copy_(tensor * 2 if name == "b" else tensor)


def unlearnable(part: Part, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        getattr(part, name).copy_(tensor / 2)


@pytest.mark.parametrize("place", [before, behind, columns, rows_apart])
@pytest.mark.parametrize("load", [copied, computed, unlearnable])
def test_what_another_model_has_in_a_storage_is_its_own(place: Place, load: Load) -> None:
    flat = torch.zeros(400)
    mine, theirs = place(flat)
    their, seen = theirs.numpy(), list[bool]()

    def load_meanwhile(part: Part, tensors: Tensors) -> None:
        """Each time the other model has been updated, and finds that there."""
        seen.append(bool((their == len(seen)).all()))
        load(part, tensors)
        their[...] = len(seen)

    module, plain = Part(mine, load_meanwhile), Part(torch.zeros(25, 8), load)
    for part in (module, plain) if load is unlearnable else ():
        part.register_buffer("repeated", part.a[0].expand(3, 8))
        part.register_buffer("windows", part.a[0].as_strided((4, 3), (1, 1)))
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            plain.load_weights(list(draw(seed).items()))
            for name, tensor in plain.state_dict().items():
                assert torch.equal(module.state_dict()[name], tensor), name
    assert len(seen) >= 3
    assert all(seen)
    assert (their == len(seen)).all()
    assert bool(loader.reason) == (load is unlearnable)


# --- loaders that go by memory of a storage that is no tensor -----------------------------------


def scratch(part: Part) -> torch.Tensor:
    return part.a.data.as_strided((8, 8), (8, 1), 200)


def by_scratch(part: Part, tensors: Tensors, behind_torch: Any) -> None:
    copied(part, {name: tensor for name, tensor in tensors.items() if name != "b"})
    if "b" in tensors:
        scratch(part).copy_(tensors["b"])
        part.b.copy_(scratch(part))


def by_scratch_behind_torch(part: Part, tensors: Tensors, behind_torch: Any) -> None:
    copied(part, {name: tensor for name, tensor in tensors.items() if name != "b"})
    behind_torch += 1
    part.b.copy_(scratch(part))


def by_scratch_of_others(part: Part, tensors: Tensors, behind_torch: Any) -> None:
    copied(part, {name: tensor for name, tensor in tensors.items() if name != "b"})
    part.b.copy_(scratch(part))


def made(load: Callable[[Part, Tensors, Any], None]) -> Part:
    flat = torch.zeros(400)
    behind_torch = flat[200:264].view(8, 8).numpy()
    return Part(flat[:200].view(25, 8), lambda part, tensors: load(part, tensors, behind_torch))


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (by_scratch, ""),
        (by_scratch_behind_torch, "it goes by values outside the module, which it changes"),
    ],
)
def test_what_a_loader_leaves_beside_its_tensors_is_right(load: Any, reason: str) -> None:
    module, plain = made(load), made(load)
    loader = RecordedLoader(module, ignore=["b"])
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            plain.load_weights(list(draw(seed).items()))
            for name in "ac":
                assert torch.equal(getattr(module, name), getattr(plain, name)), name
            if load is by_scratch:
                assert torch.equal(module.b, plain.b)
    assert loader.reason.endswith(reason)
    assert bool(loader.reason) == bool(reason)


def test_other_values_beside_its_tensors_that_a_loader_goes_by_are_noticed() -> None:
    module = made(by_scratch_of_others)
    scratch(module).fill_(3)
    loader = RecordedLoader(module, ignore=["b"])
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
        assert (module.b == 3).all()
        assert loader.reason == ""
        scratch(module).fill_(4)
        with pytest.raises(wsync.RemoteError, match="values outside the module"):
            sync.update()
        sync.update()
        assert (module.b == 4).all()
