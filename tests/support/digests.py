"""What a model holds, in short."""

from __future__ import annotations

import hashlib

import torch


def digests(model: torch.nn.Module) -> dict[str, str]:
    return {path: digest(tensor) for path, tensor in everything(model).items()}


def everything(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors that a model has, plain attributes too."""
    from wsync.module_tensors.held import bound_tensors

    return {path: tensor for path, *_, tensor in bound_tensors(model) if tensor.numel()}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()
