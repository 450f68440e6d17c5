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


def run() -> Iterator[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", str(_HERE / "load_engine.py"), *sglang_path()],
        capture_output=True,
        text=True,
        timeout=600,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark load: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    yield {
        "benchmark": "load",
        "case": f"qwen3_moe, {found['tensors']} tensors",
        "peer": "SGLang 0.5.17 load_weights, one call",
        "ratio": found["peer_seconds"] / found["seconds"],
        "microseconds_a_tensor": 1e6 * found["seconds"] / found["tensors"],
        **found,
    }
