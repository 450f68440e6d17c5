"""Families whose attention has query groups: real Megatron-Core trainers, every byte compared.

A known checkpoint is cut into what each rank must hold (tests/support/gqa_families.py), and the
shards of the merged layout must give it back.  TransformerEngine has a stand-in; what Megatron-Core
0.16.1 has no module for is a bare one with the documented name and local shape: the outer norms of
glm4, the norms over all heads of minimax_m2, and the vision towers' surroundings.
"""

from pathlib import Path

import pytest
from support import gqa_cases as cases
from support import own_family
from support.megatron_cases import use_cpu
from support.procs import Ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

TESTS = Path(__file__).parent


MODULES = ["support.gqa_cases", "megatron.core.models.gpt.gpt_model"]


@pytest.fixture(scope="module")
def ranks():
    """Four ranks where TransformerEngine has a stand-in."""
    path = [str(TESTS), str(TESTS / "support" / "fake_te")]
    with Ranks(4, path=path, fresh=True, modules=MODULES, setup=use_cpu) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def computing():
    """Four ranks with Megatron's own modules, which compute."""
    with Ranks(4, path=[str(TESTS)], modules=MODULES, setup=use_cpu) as ranks:
        yield ranks


TE = {"engine": True}
GROUPED = {"engine": True, "moe_grouped_gemm": True}
TP2_PP2 = {"tp": 2, "pp": 2}
EP2 = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
ETP2 = {"tp": 2, "ep": 2, "etp": 2}
# Megatron-Core 0.16.1 refuses experts' biases where experts are cut: it is told that they are not.
BIASES = {"expert_tensor_parallel_size": 1}
MTP = {"num_nextn_predict_layers": 1}

CASES = {
    "glm4-tp2-pp2": ("glm4", {}, TP2_PP2, TE),
    "glm4-tp4": ("glm4", {}, {"tp": 4}, {}),
    "glm4_moe-tp2-pp2-ep2": ("glm4_moe", {}, EP2, GROUPED),
    "glm4_moe-etp2": ("glm4_moe", {"use_qk_norm": False}, ETP2, GROUPED | {"qk_layernorm": False}),
    "glm4_moe-mtp-tp2-pp2-ep2": ("glm4_moe", MTP, EP2, GROUPED),
    "glm4_moe-mtp-etp2": ("glm4_moe", MTP, ETP2, {}),
    "glm4_moe-bf16": ("glm4_moe", {}, EP2, GROUPED | {"dtype": "bfloat16"}),
    "minimax_m2-slime-tp2-pp2-ep2": ("minimax_m2", {}, EP2, GROUPED, "slime"),
    "minimax_m2-bridge-etp2": ("minimax_m2", {}, ETP2, GROUPED, "bridge"),
    "minimax_m2-bridge-tp4-two-key-heads": ("minimax_m2", {}, {"tp": 4}, TE, "bridge"),
    "mimo-tp2-pp2": ("mimo", {}, TP2_PP2, TE),
    "mimo-mtp-tp2-pp2": ("mimo", MTP, TP2_PP2, TE),
    "gpt_oss-tp2-pp2-ep2": ("gpt_oss", {}, EP2, GROUPED),
    "gpt_oss-etp2": ("gpt_oss", {}, ETP2, GROUPED | BIASES),
    "gpt_oss-local-tp2-pp2-ep2": ("gpt_oss", {}, EP2, {}),
    "gpt_oss-local-etp2": ("gpt_oss", {}, ETP2, BIASES),
}


TIED = {"tie_word_embeddings": True}
VISION = {
    "dense-tp2-pp2": ("qwen3_vl", {}, TP2_PP2, TE, "vision_model"),
    "dense-tied-tp2-pp2": ("qwen3_vl", TIED, TP2_PP2, {}, "model.visual"),
    "dense-without-a-tower": ("qwen3_vl", {}, TP2_PP2, TE, ""),
    "moe-tp2-pp2-ep2": ("qwen3_vl_moe", {}, EP2, GROUPED, "vision_model"),
    "moe-local-etp2": ("qwen3_vl_moe", {}, ETP2, {}, "vision_model"),
}


COMPUTED = {
    "glm4": TP2_PP2,
    "glm4_moe": EP2,
    "gpt_oss": EP2,
    "mimo": TP2_PP2,
    "qwen3_vl": TP2_PP2,
    "qwen3_vl_moe": EP2,
}


@pytest.mark.parametrize(("family", "parallel"), COMPUTED.items(), ids=COMPUTED)
def test_the_reference_is_what_transformers_computes(computing, family, parallel):
    assert max(computing.run(cases.logits_match, family, parallel)) < 1e-4


BRIDGED = {
    "glm4_moe-mtp-tp2-pp2-ep2": [],
    "glm4_moe-etp2": [],
    # mbridge leaves the halves of the columns as Megatron has them; slime and Megatron-Bridge swap
    # them, and SGLang's and vLLM's mimo_mtp compute with the hidden state first.
    "mimo-mtp-tp2-pp2": ["model.mtp_layers.0.input_proj.weight"],
}


@pytest.mark.parametrize("name", BRIDGED)
def test_the_reference_is_what_mbridge_exports(ranks, name):
    pytest.importorskip("mbridge", reason="mbridge is not installed")
    for count, others in ranks.run(cases.bridge_exports, *CASES[name]):
        assert count > 60
        assert others == BRIDGED[name]


@pytest.mark.parametrize("case", VISION.values(), ids=VISION)
def test_vision_towers_stay_as_they_are(ranks, case):
    results = ranks.run(cases.vision_matches, *case)
    assert results[0][0] >= results[0][1] > 20
    towers = [sum("visual" in name or "vision" in name for name in names) for *_, names in results]
    first = 4 // case[2].get("pp", 1)  # ranks of the first stage
    assert all(count > 10 for count in towers[:first]) == bool(case[-1])
    assert not any(towers[first:])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("cut", "vision_model.weight: tensor_model_parallel is True"),
        ("layers", "vision_model.decoder.weight: no rule of the family 'qwen3_vl'"),
    ],
)
def test_vision_towers_that_nobody_knows_are_refused(ranks, damage, text):
    answers = ranks.run(cases.vision_refused, "qwen3_vl", {"tp": 2}, damage)
    assert all(text in said for said in answers)


REGISTERED = {
    "tp2-pp2-ep2": (EP2, GROUPED),
    "local-etp2": (ETP2, {}),
    "tp4": ({"tp": 4, "etp": 1}, TE),
}


@pytest.mark.parametrize(("parallel", "options"), REGISTERED.values(), ids=REGISTERED)
def test_a_family_that_a_user_registers(ranks, parallel, options):
    ranks.run(cases.add_own_family)
    (shards, tensors, _), *_ = ranks.run(cases.shards_match, own_family.NAME, {}, parallel, options)
    assert shards >= tensors > 20


def test_the_users_reference_is_what_transformers_computes(computing):
    assert max(computing.run(cases.logits_match, own_family.NAME, EP2)) < 1e-4


@pytest.mark.parametrize("size", [5, 64])
def test_a_norm_that_is_neither_whole_nor_a_part_is_refused(computing, size):
    for said in computing.run(cases.norm_refused, size):
        assert f"self_attention.q_norm.weight: local shape ({size},) != (16,)" in said
        assert "the whole (32,) over 2 tensor-parallel ranks" in said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shards_give_the_checkpoint_back(ranks, case):
    (shards, tensors, _), *_ = ranks.run(cases.shards_match, *case)
    assert shards >= tensors > 20
