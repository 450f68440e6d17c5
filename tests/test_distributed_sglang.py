"""SGLang's own receiving code and model classes, over wsync's groups and broadcasts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines import SGLANG_VERSIONS, engine_packages, engine_tree, results_of

SCRIPT = Path(__file__).parent / "support" / "sglang_distributed.py"
# glm4_moe has a float32 bias among bfloat16; deepseek_v3 wants two tensors in one call
FAMILIES = ("qwen3", "glm4_moe", "deepseek_v3")
FORMATS = {"bucket": "flattened_bucket", "tensor": "None"}


@pytest.mark.parametrize("broadcast", FORMATS)
@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_sglang_joins_the_group_and_loads_every_byte(version: str, broadcast: str) -> None:
    tree, packages = engine_tree("sglang", version), engine_packages()
    results = results_of(SCRIPT, tree, packages, broadcast, *FAMILIES, timeout=240)
    assert [result["family"] for result in results] == list(FAMILIES)
    for result in results:
        where = result["family"]
        assert result["differing"] == [], where
        assert result["held"] > 10, where
        assert result["version"] == "2", where
        assert result["formats"] == [FORMATS[broadcast]], where
        assert result["buckets"] == 2 * result["rounds"] > 2, where
        assert result["groups"] == 0, where  # left when the trainer had disconnected
