"""SGLang's and vLLM's own model classes, updated through what was learnt of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.engines import NEWEST, engine_packages, engine_tree

SCRIPT = Path(__file__).parent / "support" / "learn_models.py"
ENGINES = [("sglang", "0.5.17"), ("sglang", NEWEST), ("vllm", "0.33.0")]
FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
TIED = {"tie_word_embeddings": True}


def learn(engine: str, version: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tree, packages = engine_tree(engine, version), engine_packages()
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), engine, str(tree), str(packages), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=240,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == sum(case["tp"] for case in cases)
    return results


def check(results: list[dict[str, Any]]) -> None:
    """Bytes are the engine's own in both ways of delivery; what is needed is sent once."""
    for result in results:
        assert result["held"] > 10
        for mode in ("needed", "full"):
            found = result[mode]
            where = f"{result['case']} rank {result['rank']} {mode}"
            assert found["reason"] == "", where
            assert found["fallback"] == {}, where
            assert found["differing"] == [], where
            assert not any(path.endswith("weight") for path in found["unwritten"]), where
        assert result["needed"]["redundancy"] == 1.0
        assert result["full"]["delivered"] == result["full"]["model"]


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_one_worker(engine: str, version: str) -> None:
    cases = [{"family": family, "tp": 1, "ep": 1} for family in FAMILIES]
    results = learn(engine, version, cases)
    check(results)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_every_worker_of_larger_engines(engine: str, version: str) -> None:
    cases = [{"family": family, "tp": 2, "ep": 1} for family in FAMILIES[1:3]]
    cases += [{"family": family, "tp": 2, "ep": 2} for family in FAMILIES[2:]]
    # fewer key-value heads than workers; one matrix for embedding and head
    cases += [{"family": "qwen3", "tp": 4, "ep": 1, "config": TIED}]
    check(learn(engine, version, cases))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_eight_workers_are_sent_a_fraction(engine: str, version: str) -> None:
    cases: list[dict[str, Any]] = [{"family": "qwen3_moe", "tp": 8, "ep": 8}]
    if engine == "sglang":
        cases += [{"family": "deepseek_v3", "tp": 8, "ep": 8, "dp_attention": True}]
    results = learn(engine, version, cases)
    check(results)
    experts = [result for result in results if result["case"]["family"] == "qwen3_moe"]
    needed = sum(result["needed"]["delivered"] for result in experts)
    full = sum(result["full"]["delivered"] for result in experts)
    assert needed < full / 6


@pytest.mark.parametrize("version", [version for engine, version in ENGINES if engine == "sglang"])
def test_checkpoints_in_fp8_with_a_scale_for_each_block(version: str) -> None:
    cases = [{"family": "qwen3_moe", "tp": 2, "ep": ep, "fp8": True} for ep in (1, 2)]
    check(learn("sglang", version, cases))
