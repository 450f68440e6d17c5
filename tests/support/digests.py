"""What a model holds, in short."""

from __future__ import annotations

import hashlib

import torch


def digests(model: torch.nn.Module) -> dict[str, str]:
    from wsync.engine.learn.module_memory import ModuleMemory

    held = ModuleMemory(model)
    return {fact[0]: digest(tensor) for fact, tensor in zip(held.facts, held.tensors, strict=True)}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()
