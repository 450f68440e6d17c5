"""Loaders that do things at random: what they load is right to the byte, learnt or not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from support.fused import differing
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
SIDE = 8
DTYPES = {"a": torch.float32, "b": torch.float32, "c": torch.bfloat16, "d": torch.float16}
PROGRAMS = 15
Tensor = torch.Tensor


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: (5 * torch.randn(SIDE, SIDE, generator=generator)).to(dtype)
        for name, dtype in DTYPES.items()
    }
    return {**found, "filler": torch.randn(64, 64, generator=generator)}


class Random(torch.nn.Module):
    """Does what a program, a number, says: the same in every load."""

    def __init__(self, program: int) -> None:
        super().__init__()
        self.program = program
        flat = torch.zeros(2, SIDE, SIDE)
        data = {
            "p": flat[0],
            "q": flat[1],  # in one storage
            "r": torch.zeros(SIDE, SIDE, dtype=torch.bfloat16).t(),
            "s": torch.zeros(SIDE, 2 * SIDE),
            "filler": torch.zeros(64, 64),
        }
        for name, tensor in data.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.register_buffer("buffer", torch.arange(64.0).view(SIDE, SIDE))
        self.register_buffer("order", torch.tensor([3, 1, 2, 5]))

    def held(self) -> dict[str, Tensor]:
        every = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in every}

    def load_weights(self, pairs: list[tuple[str, Tensor]]) -> None:
        given = dict(pairs)
        if "filler" in given:
            self.filler.copy_(given.pop("filler"))
        rng = random.Random(self.program)
        mine = [self.p.data, self.q.data, self.r.data, self.s.data, self.buffer]
        made: list[Tensor | None] = []
        for _ in range(rng.randint(2, 8)):
            step = random.Random(rng.random())
            found = [given.get(step.choice(list(DTYPES))) for _ in range(4)]
            source = step.choice([*found, *made])
            made.append(None)
            if source is not None:  # what is missing is passed over, and what would come of it
                target = view(step, step.choice(mine))
                made[-1] = step.choice(ACTIONS)(self, step, view(step, source), target)


def view(step: random.Random, tensor: Tensor) -> Tensor:
    for _ in range(step.randint(0, 3)):
        dim = step.randrange(tensor.dim())
        size = tensor.shape[dim]
        what = step.choice(["narrow", "transpose", "step", "split"])
        if what == "narrow":
            start = step.randrange(size)
            tensor = tensor.narrow(dim, start, step.randint(1, size - start))
        elif what == "transpose":
            tensor = tensor.transpose(dim, step.randrange(tensor.dim()))
        elif what == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif size % 2 == 0 and tensor.dim() < 4:
            tensor = tensor.unflatten(dim, (2, -1))
    return tensor


def copied(_: Random, step: random.Random, source: Tensor, target: Tensor) -> None:
    if source.shape == target.shape:
        target.copy_(source)
    else:
        target.copy_(source.flatten()[:1].view([1] * target.dim()))


def filled(_: Random, step: random.Random, source: Tensor, target: Tensor) -> None:
    target.fill_(step.randint(0, 3))


def scaled(_: Random, step: random.Random, source: Tensor, target: Tensor) -> None:
    source.mul_(3)


def erased(_: Random, step: random.Random, source: Tensor, target: Tensor) -> None:
    source.zero_()


def put(module: Random, step: random.Random, source: Tensor, target: Tensor) -> None:
    if target.shape[0] > 5:
        target[module.order] = source.flatten()[0].to(target.dtype)


def cloned(_: Random, step: random.Random, source: Tensor, target: Tensor) -> Tensor:
    return source.clone()


def cast(_: Random, step: random.Random, source: Tensor, target: Tensor) -> Tensor:
    return source.to(step.choice([torch.float32, torch.bfloat16, torch.float16]))


def joined(_: Random, step: random.Random, source: Tensor, target: Tensor) -> Tensor:
    return torch.cat([source, source], step.randrange(source.dim()))


def computed(_: Random, step: random.Random, source: Tensor, target: Tensor) -> Tensor:
    return source * source


def gathered(module: Random, step: random.Random, source: Tensor, target: Tensor) -> Tensor | None:
    return source[module.order] if source.shape[0] > 5 else None


ACTIONS: list[Callable[[Random, random.Random, Tensor, Tensor], Tensor | None]] = [
    *([copied] * 5),
    *(filled, scaled, erased, put, cloned, cast, joined, computed, gathered),
]


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 60, 180])
def test_whatever_a_loader_does(first: int) -> None:
    learnt = 0
    for program in range(first, first + PROGRAMS):
        module, other = Random(program), Random(program)
        loader = RecordedLoader(module, ignore=[*dict(module.named_parameters())])
        for seed in (1, 2):
            other.load_weights(list(draw(seed).items()))
        with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
            for seed in (1, 2):
                sync.update(draw(seed))
        assert differing(module.held(), other.held()) == [], f"program {program}: {loader.reason}"
        learnt += loader.learnt is not None
    assert learnt > 0
