"""SGLang's and vLLM's own model classes, updated through what was learnt of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.engines import NEWEST, SGLANG_VERSIONS, engine_packages, engine_tree

from wsync.families import tables

SCRIPT = Path(__file__).parent / "support" / "learn_models.py"
OLD = pytest.param("sglang", "0.5.17", marks=pytest.mark.slow)
ENGINES = [OLD, ("sglang", NEWEST), ("vllm", "0.33.0")]
FAMILIES = tiny_models.FAMILIES
TIED = {"tie_word_embeddings": True}
# SGLang serves Qwen3.5 with its vision tower only: a model without it is a part there
UNSERVED = {"sglang": {"qwen3_5_text", "qwen3_5_moe_text"}, "vllm": set[str]()}
# tensors of which more is kept than copies, and why: SGLang has 1 + weight beside such norms, both
# engines keep -exp(A_log)
_ADDED = ("norm.weight", "norm.gemma_weight: add")
COMPUTED = {
    **{("sglang", family): _ADDED for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    **{(engine, "nemotron_h"): ("A_log", "mixer.A: neg") for engine in ("sglang", "vllm")},
}


def learn(engine: str, version: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tree, packages = engine_tree(engine, version), engine_packages()
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), engine, str(tree), str(packages), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=600,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == sum(len(case.get("ranks", range(case["tp"]))) for case in cases)
    return results


def check(results: list[dict[str, Any]], engine: str = "") -> None:
    """Bytes are the engine's own in every way of delivery; what is needed is sent once."""
    for result in results:
        assert result["held"] > 10
        case = result["case"]
        for mode in case.get("modes", ("needed", "full")):
            found = result[mode]
            where = f"{case} rank {result['rank']} {mode}"
            assert found["reason"] == "", where
            check_computed(found["fallback"], COMPUTED.get((engine, case["family"])), where)
            assert found["differing"] == [], where
            assert not any(path.endswith("weight") for path in found["unwritten"]), where
        assert result["needed"]["redundancy"] == 1.0
        if "full" in result:
            assert result["full"]["delivered"] == result["full"]["model"]


def check_computed(fallback: dict[str, str], expected: tuple[str, str] | None, where: str) -> None:
    """Only the tensors that are known to be go through the class's own loader, and for a reason."""
    assert bool(fallback) == bool(expected), (where, fallback)
    for name, reason in fallback.items():
        assert expected is not None
        assert name.endswith(expected[0]) and expected[1] in reason, (where, name, reason)


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_one_worker(engine: str, version: str) -> None:
    cases = [{"family": family, "tp": 1, "ep": 1} for family in FAMILIES]
    results = learn(engine, version, cases)
    check(results)


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_every_family(engine: str, version: str) -> None:
    """Checkpoints are as transformers saves them; of two workers the second is looked at."""
    no_class = {"bailing_moe_v2", "step3p5"}  # in transformers: code comes with checkpoints
    assert tables.FAMILIES.keys() - no_class <= {*FAMILIES, *tiny_models.SAVED}
    cases = [
        {"family": family, "tp": tp, "ep": 1, "ranks": [tp - 1], "modes": ["needed"]}
        for family in tiny_models.SAVED
        for tp in (1, 2)
        if family not in UNSERVED[engine]
    ]
    check(learn(engine, version, cases), engine)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_every_worker_of_larger_engines(engine: str, version: str) -> None:
    cases = [{"family": family, "tp": 2, "ep": 1} for family in FAMILIES]
    cases += [{"family": family, "tp": 2, "ep": 2} for family in FAMILIES[2:]]
    # fewer key-value heads than workers; one matrix for embedding and head
    cases += [{"family": "qwen3", "tp": 4, "ep": 1, "config": TIED}]
    cases += [{"family": "llama", "tp": 2, "ep": 1, "config": TIED}]
    check(learn(engine, version, cases))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_eight_workers_are_sent_a_fraction(engine: str, version: str, family: str) -> None:
    ep = 8 if family in FAMILIES[2:] else 1
    results = learn(engine, version, [{"family": family, "tp": 8, "ep": ep}])
    check(results)
    needed = sum(result["needed"]["delivered"] for result in results)
    full = sum(result["full"]["delivered"] for result in results)
    print(f"{engine} {family} TP8 EP{ep}: {needed} bytes, {full / needed:.2f} times less than full")
    assert needed < full / (6 if family == "qwen3_moe" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_attention_that_is_data_parallel(version: str, family: str) -> None:
    """Every worker keeps all of the attention, and its own experts."""
    check(learn("sglang", version, [{"family": family, "tp": 8, "ep": 8, "dp_attention": True}]))


@pytest.mark.parametrize(
    ("engine", "version"),
    [OLD, ("sglang", NEWEST), pytest.param("vllm", "0.33.0", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_checkpoints_in_fp8_with_a_scale_for_each_block(engine: str, version: str, ep: int) -> None:
    check(learn(engine, version, [{"family": "qwen3_moe", "tp": 2, "ep": ep, "fp8": True}]))
