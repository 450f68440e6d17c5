"""What a trainer does in tests/test_soak.py: it connects, updates an engine and lets go."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from support import tiny_qwen3

import wsync

WAYS: dict[str, dict[str, Any]] = {
    "receiver": {"delivery": "wsync"},
    "direct": {"delivery": "direct"},
    "stock": {"delivery": "stock"},
    "distributed": {"delivery": "distributed", "broadcast": "wsync"},
    "broadcast": {"delivery": "distributed", "broadcast": "bucket"},
    "disk": {},
}
_MEMORY = ("RssAnon:", "RssShmem:")
_weights: list[tiny_qwen3.Weights] = []  # of odd and of even versions


def figures(pid: int) -> dict[str, int]:
    """Bytes of a process's own and of shared memory, descriptors and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    parts = [line.split()[1] for line in status.splitlines() if line.startswith(_MEMORY)]
    return {
        "pid": pid,
        "memory": sum(map(int, parts)) * 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def run(url: str, way: str, folder: str, config: Any, count: int) -> int:
    """`count` cycles; the id of this process."""
    if not _weights:
        _weights.extend(tiny_qwen3.draw(config, seed) for seed in (1, 2))
        if way == "direct":
            for tensor in (tensor for each in _weights for tensor in each.values()):
                tensor.share_memory_()
    for cycle in range(count):
        weights = _weights[cycle % 2]
        with _connect(weights, url, way, folder, config) as sync:
            sync.update(version=cycle + 1)
    assert tiny_qwen3.in_server(url) == tiny_qwen3.sums(weights)
    gc.collect()
    return os.getpid()


def _connect(
    weights: tiny_qwen3.Weights, url: str, way: str, folder: str, config: Any
) -> wsync.Sync | wsync.DiskSync:
    if way == "disk":
        options = wsync.Options(deadline=120.0, progress=False)
        return wsync.DiskSync(weights, [url], folder=folder, base=config, options=options)
    small = {"round_nbytes": 1 << 16, "ring_nbytes": 1 << 17, "bucket_nbytes": 1 << 16}
    options = wsync.Options(deadline=120.0, progress=False, **small, **WAYS[way])
    return wsync.connect(weights, [url], options=options)
