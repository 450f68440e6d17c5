"""Megatron trainers' weights, quantised on the way, in SGLang's and vLLM's own workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support import quantised_ranks
from support.engines import NEWEST, engine_packages, engine_tree
from support.megatron_cpu import Parallel
from support.procs import Ranks
from support.quantised_models import EXPERTS
from support.quantised_ranks import Case

FP8 = ("fp8_block", (128, 128))
INT4 = ("int4", (1, 128))
INT4_EXPERTS = ("int4", (1, 32), EXPERTS)
STAGES = Parallel(tp=2, pp=2)
SPREAD = Parallel(tp=2, pp=2, ep=2, etp=1)
EACH = ("sglang, learnt", "sglang, stock", "vllm")
FOUR = {"num_experts": 4}
WIDE = {
    "intermediate_size": 384
}  # half of it is no multiple of 128; so it is with 128 rows of keys

CASES = {
    "fp8": Case(
        *("qwen3", FP8, WIDE, STAGES, EACH),
        odd=True,
        cut=("down_proj", "gate_up_proj", "qkv_proj"),
    ),
    "fp8, latent attention": Case(
        *("deepseek_v3", FP8, {}, SPREAD, EACH), cut=("fused_qkv_a_proj",)
    ),
    "fp8, experts": Case(
        *("qwen3_moe", FP8, FOUR | {"head_dim": 128}, SPREAD, ("sglang", "vllm")), slime=True
    ),
    "int4": Case("qwen3", INT4, WIDE, STAGES, ("vllm",), odd=True, cut=("down_proj",)),
    "int4, experts": Case("qwen3_moe", INT4_EXPERTS, FOUR, SPREAD, EACH),
    "int4, experts, slime": Case(
        *("qwen3_moe", INT4_EXPERTS, FOUR, Parallel(ep=4, etp=1), ("sglang",)), slime=True
    ),
}
# what SGLang loads itself of what wsync writes in place: part of its names
LOADED = {"fp8, latent attention": "kv_b_proj"}


@pytest.fixture(scope="module")
def trainers() -> Iterator[Ranks]:
    engine_tree("sglang", NEWEST)
    engine_tree("vllm", "0.33.0")
    engine_packages()
    with Ranks(4, path=sys.path) as started:
        started.run(quantised_ranks.start, timeout=240)
        yield started
        started.run(quantised_ranks.stop)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engines_hold_what_their_own_loading_gives(name: str, trainers: Ranks) -> None:
    case = CASES[name]
    facts, *_ = trainers.run(quantised_ranks.update, case, timeout=240)
    assert facts["wrong"] == {engine: [] for engine in case.engines}
    # and it is seen where the ranks that share a block do not compare what they hold of it
    for engine in case.engines if case.cut else ():
        modules = {path.split(".")[-2] for path in facts["unmerged"][engine]}
        assert {name.removesuffix("_with_mqa") for name in modules} == set(case.cut)
    for engine in case.engines:
        if engine == "vllm":  # makes INT4 layers anew, from whole tensors
            assert bool(facts["learnt"][engine][0]) == name.startswith("int4")
        elif engine != "sglang, stock":
            reason, loaded = facts["learnt"][engine]
            assert reason == ""
            assert bool(loaded) == (name in LOADED)
            assert all(LOADED[name] in path for path in loaded)
