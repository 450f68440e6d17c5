"""SGLang's and vLLM's own model classes, updated through what was learnt of them."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import draft_models, own_family, tiny_models
from support.engines import NEWEST, SGLANG_VERSIONS, engine_results

from wsync.families import registry

SCRIPT = Path(__file__).parent / "support" / "learn_models.py"
OLD = pytest.param("sglang", "0.5.17", marks=pytest.mark.slow)
VLLM = pytest.param("vllm", "0.33.0", marks=pytest.mark.slow)
ENGINES = [OLD, pytest.param("sglang", NEWEST), VLLM]
FAMILIES = tiny_models.FAMILIES
SAVED = (*tiny_models.SAVED, *tiny_models.UNKNOWN, "bailing_moe_v2")
TIED = {"tie_word_embeddings": True}
# SGLang serves Qwen3.5 with its vision tower only: a model without it is a part there; MiMo-V2's
# module of 0.5.17 imports what this transformers has not any more
_PARTS = {"qwen3_5_text", "qwen3_5_moe_text"}
UNSERVED = {
    "sglang 0.5.17": _PARTS | {"mimo_v2_flash"},
    "sglang newest": _PARTS,
    "vllm 0.33.0": set[str](),
}
# drafts that an engine does not build, and what it says then; one that has a dense layer where
# checkpoints have experts, and what wsync says
UNDRAFTED = {
    "vllm 0.33.0": {
        "qwen3_5_text": "Invalid model_type qwen3_5_mtp",
        "qwen3_5_moe_text": "Invalid model_type qwen3_5_mtp",
        "bailing_moe_v2": "Unsupported speculative method: 'mtp'",
    },
    "sglang 0.5.17": {
        "mimo_v2_flash": "cannot import name 'Qwen2_5_VisionRotaryEmbedding'",
        "bailing_moe_v2": "the trainer delivers nothing for draft.model.decoder.mlp.down",
    },
}
# tensors of which more is kept than copies, and why: SGLang has 1 + weight beside such norms, both
# engines keep -exp(A_log)
_ADDED = (r"norm(_embedding|_hidden)?\.weight", r"norm(_embedding|_hidden)?\.gemma_weight is no")
_ZERO = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_6_moe")
COMPUTED = {
    **{("sglang", family): _ADDED for family in _ZERO},
    **{(engine, "nemotron_h"): ("A_log", "mixer.A is not a copy") for engine in ("sglang", "vllm")},
}
# what Kimi's vision tower makes of positions
CONSTANT = "pos_emb.time_weight"
# why a class is given whole tensors: SGLang's Step-3.5 refuses calls with only some of its tensors
WHOLE = {("sglang", "step3p5"): "Error: Some parameters"}


def learn(engine: str, version: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = engine_results(SCRIPT, engine, version, cases)
    assert len(results) == sum(map(result_count, cases))
    return results


def result_count(case: dict[str, Any]) -> int:
    return len(case.get("ranks", range(case["tp"])))


def check(results: list[dict[str, Any]], engine: str = "") -> None:
    """Bytes are the engine's own in every way of delivery; what is needed is sent once."""
    for result in results:
        assert result["held"] > 10
        case = result["case"]
        for mode in case.get("modes", ("needed", "full")):
            found = result[mode]
            where = f"{case} rank {result['rank']} {mode}"
            reason = WHOLE.get((engine, case["family"]), "")
            assert reason in found["reason"] and bool(reason) == bool(found["reason"]), where
            computed = COMPUTED.get((engine, case["family"]))
            check_computed(found["fallback"], computed, where)
            assert found["differing"] == [], where
            kept = draft_models.SHARED if case.get("draft") else ()
            unwritten = [path for path in found["unwritten"] if path.endswith("weight")]
            unwritten = [path for path in unwritten if not path.endswith(CONSTANT)]
            assert all(any(map(partial(fnmatchcase, path), kept)) for path in unwritten), where
        assert result["needed"]["redundancy"] == 1.0
        if "full" in result:
            assert result["full"]["delivered"] == result["full"]["model"]


def check_computed(fallback: dict[str, str], expected: tuple[str, str] | None, where: str) -> None:
    """Only the tensors that are known to be go through the class's own loader, and for a reason."""
    assert bool(fallback) == bool(expected), (where, fallback)
    for name, reason in fallback.items():
        assert expected is not None
        assert re.search(f"{expected[0]}$", name), (where, name)
        assert re.search(expected[1], reason), (where, name, reason)


Learnt = tuple[str, str, dict[str, list[dict[str, Any]]]]  # engine, version, results by test


def cases_of(engine: str) -> dict[str, list[dict[str, Any]]]:
    """By test; engine: its name and version."""
    one = {"ep": 1, "modes": ["needed"]}
    draft = {**one, "tp": 2, "ranks": [1], "draft": True}
    undrafted = UNDRAFTED.get(engine, {})
    return {
        "one": [{"family": family, "tp": 1, "ep": 1} for family in FAMILIES],
        "every": [
            {**one, "family": family, "tp": 2, "ranks": [1]}
            for family in (*SAVED, own_family.NAME)
            if family not in UNSERVED[engine]
        ],
        "draft": [draft | {"family": f, "refused": f in undrafted} for f in draft_models.FAMILIES],
        "fp8": [{"family": "qwen3_moe", "tp": 2, "ep": 2, "fp8": True}],
        # vLLM's stock classes are given no buckets
        "stock": [{"family": "qwen3_5_moe", "tp": 2, "ep": 2, "modes": ["stock"]}]
        if engine.startswith("sglang")
        else [],
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(each.values, marks=each.marks) for each in ENGINES],
    ids=lambda values: "-".join(values),
)
def learnt(request: pytest.FixtureRequest) -> Learnt:
    """What one process makes of all cases of an engine, which takes long to import."""
    engine, version = request.param
    cases = cases_of(f"{engine} {version}")
    results = iter(learn(engine, version, [*itertools.chain(*cases.values())]))
    counts = {name: sum(map(result_count, cases[name])) for name in cases}
    return engine, version, {n: list(itertools.islice(results, counts[n])) for n in cases}


def test_one_worker(learnt: Learnt) -> None:
    _, _, results = learnt
    assert len(results["one"]) == len(FAMILIES)
    check(results["one"])


def test_every_family(learnt: Learnt) -> None:
    """Checkpoints are as transformers saves them; of two workers the second is looked at."""
    assert registry.FAMILIES.keys() - draft_models.LIKE.keys() <= {*FAMILIES, *SAVED}
    engine, _, results = learnt
    check(results["every"], engine)


def test_every_familys_draft(learnt: Learnt) -> None:
    """The classes that compute layers of multi-token prediction, beside the model's class, by
    checkpoints that have one.  Embedding and head are the model's own where they load none."""
    predicting = {name for name in registry.FAMILIES if mtp_targets(name)}
    # their checkpoints have no such layer
    unpublished = {"kimi_k2", "kimi_k25", "moonlight"}
    assert predicting | registry.BRIDGED.keys() == unpublished | {*draft_models.FAMILIES}
    engine, version, found = learnt
    undrafted, results = UNDRAFTED.get(f"{engine} {version}", {}), found["draft"]
    for result in results:
        family = result["case"]["family"]
        if family in undrafted:
            print(f"{engine} {version} has no draft of {family}: {result['refused']}")
            assert undrafted[family] in result["refused"]
        elif family not in registry.BRIDGED:
            assert {name for name in result["names"] if mtp_targets(family, name)}
    check([result for result in results if "refused" not in result], engine)


def test_a_stock_class_takes_fused_experts_one_by_one(learnt: Learnt) -> None:
    """What it holds is what its own load_weights makes of the fused tensors."""
    engine, _, results = learnt
    assert bool(results["stock"]) == (engine == "sglang")
    for result in results["stock"]:
        found = result["stock"]
        assert found["differing"] == []
        assert result["held"] > 10
        experts = [name for name in found["names"] if ".mlp.experts." in name]
        assert "gate_up_proj" not in "".join(experts)
        assert sum(name.endswith(".up_proj.weight") for name in experts) * 3 == len(experts) > 6


def test_checkpoints_in_fp8_with_a_scale_for_each_block(learnt: Learnt) -> None:
    check(learnt[2]["fp8"])


def mtp_targets(family: str, name: str = "") -> list[str]:
    """Tensors that the family's table has in a first MTP layer of a model of two layers, as regular
    expressions; those that match a name, if one is given."""
    found = []
    for rule in registry.FAMILIES[family].rules:
        for target in rule.targets if "{mtp}" in rule.name else ():
            numbers = target.name.replace("{mtp}", "0").replace("{layer}", "2")
            text = re.escape(numbers.replace("{first}", "0").replace("{last}", "1"))
            found.append(re.sub(r"\\{(experts?|inner)\\}", r"\\d+", text))
    return [text for text in found if not name or re.fullmatch(text, name)]


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
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_every_family_on_one_worker(engine: str, version: str) -> None:
    served = [name for name in SAVED if name not in UNSERVED[f"{engine} {version}"]]
    one = {"tp": 1, "ep": 1, "modes": ["needed"]}
    check(learn(engine, version, [{**one, "family": name} for name in served]), engine)


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
