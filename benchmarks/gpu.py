"""`gpu`: what crosses between two processes on one GPU, and what it costs.

Memory that is handed to another process, words that order two processes, the kernels that copy and
quantise, and updates of Qwen3-30B-A3B; see benchmarks/README.md.  On tests/fakecuda, which calls
itself a fake, everything that needs no torch on the GPU runs with small sizes: a dry run, whose
figures say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import gpu_copy, gpu_memory, gpu_order, gpu_quantise, gpu_update
from benchmarks.gpu_device import find_gpu

LAYERS = 48


def run(layers: int = LAYERS, only: str = "") -> Iterator[dict[str, Any]]:
    """Rows, of one part or of all; Skipped says why there are none."""
    gpu = find_gpu()
    print(gpu.title(), flush=True)
    parts = {
        "memory": gpu_memory.run,
        "order": gpu_order.run,
        "copy": gpu_copy.run,
        "quantise": gpu_quantise.run,
        "update": lambda gpu: gpu_update.run(gpu, layers),
    }
    for name, part in parts.items():
        if only in ("", name):
            yield from part(gpu)
