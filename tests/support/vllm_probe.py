"""What vLLM's workers get in tests; importable where vLLM is."""

from __future__ import annotations

from typing import Any

import torch
from support.digests import digest, digests

from wsync.vllm import WorkerExtension


def _inputs(layer: Any) -> int:
    width: int = getattr(layer, "input_size_per_partition", layer.input_size)
    return width


class Probe(WorkerExtension):
    """wsync's extension, and what a worker holds."""

    def held(self) -> dict[str, str]:
        """Digests of all weights and buffers of the model, and of what linear layers make of unit
        vectors: on a CPU their kernels have their weights."""
        model: Any = self.model_runner.get_model()
        found = {name: value for name, value in digests(model).items() if ".kv_cache" not in name}
        for path, layer in model.named_modules():
            if hasattr(layer, "cpu_linear"):
                width = layer.weight.shape[1] if layer.weight.dim() > 1 else _inputs(layer)
                units = torch.eye(width, dtype=layer.weight.dtype)
                made = layer.cpu_linear(units, layer.weight, None)
                found[f"{path} of unit vectors"] = digest(made)
        return found

    def set_fault(self, raises: bool) -> None:
        """Has the model's load_weights raise, or not any more."""
        model: Any = self.model_runner.get_model()
        if not raises:
            del model.load_weights
            return

        def load_weights(pairs: Any) -> None:
            raise KeyError("half way")

        model.load_weights = load_weights
