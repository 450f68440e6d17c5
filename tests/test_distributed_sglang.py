"""SGLang's own receiving code and model classes, over wsync's groups and broadcasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engines import SGLANG_VERSIONS, engine_packages, engine_tree

SCRIPT = Path(__file__).parent / "support" / "sglang_distributed.py"
# glm4_moe has a float32 bias among bfloat16; deepseek_v3 wants two tensors in one call
FAMILIES = ("qwen3", "glm4_moe", "deepseek_v3")
FORMATS = {"bucket": "flattened_bucket", "tensor": "None"}


@pytest.mark.parametrize("broadcast", FORMATS)
@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_sglang_joins_the_group_and_loads_every_byte(version: str, broadcast: str) -> None:
    tree, packages = engine_tree("sglang", version), engine_packages()
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(tree), str(packages), broadcast, *FAMILIES],
        capture_output=True,
        text=True,
        timeout=240,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert [result["family"] for result in results] == list(FAMILIES)
    for result in results:
        where = result["family"]
        assert result["differing"] == [], where
        assert result["held"] > 10, where
        assert result["version"] == "2", where
        assert result["formats"] == [FORMATS[broadcast]], where
        assert result["buckets"] == 2 * result["rounds"] > 2, where
        assert result["groups"] == 0, where  # left when the trainer had disconnected
