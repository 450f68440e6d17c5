"""A model whose weights lie in one storage with others': learning leaves theirs alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.loader import RecordedLoader

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
