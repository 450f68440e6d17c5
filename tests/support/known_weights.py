"""A tiny Qwen3 whose weights are a function of the version: which ones somebody has can be told."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from support import megatron_reference

from wsync import _core

Weights = dict[str, torch.Tensor]


@functools.cache
def config() -> Any:
    return megatron_reference.config("qwen3", max_position_embeddings=128)


@functools.cache
def _shapes() -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config())
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def weights(version: int) -> Weights:
    """Every tensor of a version, in float32, by Hugging Face name."""
    generator = torch.Generator().manual_seed(version)
    found = {}
    for name, shape in _shapes().items():
        values = torch.randn(shape, generator=generator)
        found[name] = 1.0 + 0.2 * values if "norm" in name else values / shape[-1] ** 0.5
    return found


def model(version: int) -> Any:
    """A transformers model with the weights of a version."""
    made = transformers.AutoModelForCausalLM.from_config(config()).float().eval()
    put(made, weights(version))
    return made


@torch.no_grad()
def put(into: Any, tensors: Weights) -> None:
    """Copies tensors into the model's parameters of their names."""
    parameters = dict(into.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def checksums(version: int) -> dict[str, str]:
    """What an engine's /weights_checker says of the weights of a version."""
    return {
        name: f"{_core.checksum(tensor.reshape(-1).view(torch.uint8).numpy()):016x}"
        for name, tensor in weights(version).items()
    }
