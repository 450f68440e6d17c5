"""A module of two small parameters, a and b, and weights for them."""

from __future__ import annotations

import torch

Pairs = list[tuple[str, torch.Tensor]]


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in "ab"}


class TwoWeights(torch.nn.Module):
    a: torch.nn.Parameter
    b: torch.nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            data = torch.zeros(8, 8)
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
