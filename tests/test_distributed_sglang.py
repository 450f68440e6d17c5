"""SGLang's own receiving code and model classes, over wsync's groups and broadcasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import SGLANG_VERSIONS, engine_packages, engine_tree, results_of

SCRIPT = Path(__file__).parent / "support" / "sglang_distributed.py"
# glm4_moe has a float32 bias among bfloat16; deepseek_v3 wants two tensors in one call
FAMILIES = ("qwen3", "glm4_moe", "deepseek_v3")
FORMATS = {"bucket": "flattened_bucket", "tensor": "None"}


@pytest.fixture(scope="module", params=SGLANG_VERSIONS)
def results(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """Of one process with a version of SGLang, by broadcast."""
    tree, packages = engine_tree("sglang", request.param), engine_packages()
    arguments = tree, packages, ",".join(FORMATS), *FAMILIES
    found: dict[str, list[dict[str, Any]]] = results_of(SCRIPT, *arguments, timeout=240)
    return found


@pytest.mark.parametrize("broadcast", FORMATS)
def test_sglang_joins_the_group_and_loads_every_byte(
    results: dict[str, list[dict[str, Any]]], broadcast: str
) -> None:
    assert [result["family"] for result in results[broadcast]] == list(FAMILIES)
    for result in results[broadcast]:
        where = result["family"]
        assert result["differing"] == [], where
        assert result["held"] > 10, where
        assert result["version"] == "2", where
        assert result["formats"] == [FORMATS[broadcast]], where
        assert result["buckets"] == 2 * result["rounds"] > 2, where
        assert result["groups"] == 0, where  # left when the trainer had disconnected
