"""Loading a round into an engine's own model: a replay against load_weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines import sglang_path

_HERE = Path(__file__).parent
GOAL = 0.01  # seconds of an update's audit
QWEN3_NBYTES, LINK_BYTES_A_SECOND = 61e9, 64e9  # a link of PCIe 5


def _run(script: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", str(_HERE / script), *sglang_path()],
        capture_output=True,
        text=True,
        timeout=600,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark load: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run() -> Iterator[dict[str, Any]]:
    found = _run("load_engine.py")
    yield {
        "benchmark": "load",
        "case": f"qwen3_moe, {found['tensors']} tensors",
        "peer": "SGLang 0.5.17 load_weights, one call",
        "ratio": found["peer_seconds"] / found["seconds"],
        "microseconds_a_tensor": 1e6 * found["seconds"] / found["tensors"],
        **found,
    }
    share = found["audit"] * LINK_BYTES_A_SECOND / QWEN3_NBYTES
    yield {
        "benchmark": "load",
        "case": f"the audit of an update, {found['tensors']} tensors",
        "bytes": found["bytes"],
        "seconds": found["audit"],
        "peer": "none; the goal",
        "peer_seconds": GOAL,
        "ratio": GOAL / found["audit"],
        "verified": found["verified"],
        "figure": f"{1e3 * found['longest_audit']:.1f} ms the longest; {share:.1%} of an update of "
        "Qwen3-30B-A3B's 61 GB at 64 GB/s",
    }
    found = _run("load_large.py")
    yield {
        "benchmark": "load",
        "case": f"one of 32 workers learns {found['bytes'] / 1e9:.0f} GB",
        "peer": "SGLang 0.5.17 load_weights, one call",
        "ratio": found["peer_seconds"] / found["seconds"],
        "figure": f"{found['calls']} calls; {found['memory'] / 1e9:.1f} GB of memory beside the "
        f"{found['kept'] / 1e9:.1f} GB that it keeps",
        **found,
    }
