"""Layouts against Megatron-Bridge: two processes per stack go through all families in turn.

transformers saves a small checkpoint, Megatron-Bridge makes a Megatron model of it and exports it
again, and the shards of all ranks must give the checkpoint back, bit for bit.  Both ways of a
bridge share their row orders; Megatron's logits on what it has loaded prove them.

The packages are not among the test extra's: `.ci/run bridge` installs them.
"""

import dataclasses
import os
from pathlib import Path

import pytest
from support import bridge_cases as cases
from support.bridge_cases import Case, Mtp
from support.mimo_v2_shapes import mimo_v2_shapes
from support.nemotron_shapes import nemotron_shapes
from support.procs import Ranks
from support.step_shapes import step_shapes

pytestmark = pytest.mark.bridge
TESTS = Path(__file__).parent
PLACE = "WSYNC_BRIDGE_PACKAGES"  # a folder that holds one of packages for each stack

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
HEADS = SMALL | {"head_dim": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MOE = HEADS | ROUTED | {"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
SHARED = {"shared_expert_intermediate_size": 24}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
NEXT = MOE | SHARED | DELTA | {"partial_rotary_factor": 0.25}
GROUPS = ROUTED | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    **SMALL,
    **GROUPS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
KIMI = {
    "text_config": {"model_type": "deepseek_v3", **LATENT},
    "vision_config": {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1},
    "tie_word_embeddings": False,
    "architectures": ["KimiK25ForConditionalGeneration"],
}
GLM = HEADS | GROUPS | {"partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True}
INDEXER = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}
SINKS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
# What Megatron-Bridge reads of a configuration, and transformers' class does not have.
SIGMOID = {"scoring_func": "sigmoid", "num_nextn_predict_layers": 0}
LING = {"num_shared_experts": 1, "pad_token_id": 0, "eos_token_id": 1}
INTERLEAVE = {"indexer_rope_interleave": False}


def predicting(layer, beside, names, **options):
    """Layers of multi-token prediction, whose own tensors have these names behind `beside`."""
    return Mtp(layer, tuple(f"{beside}{name}.weight" for name in names.split()), **options)


PREDICT = {"num_nextn_predict_layers": 1}
LAYER, MTP_LAYER = "model.layers.{layer}.", "mtp.layers.{mtp}."
NEXTN = predicting(LAYER, LAYER, "enorm hnorm shared_head.norm eh_proj")
LING_MTP = predicting(LAYER, LAYER, "enorm hnorm final_layernorm eh_proj")
STEP_MTP = predicting(LAYER, LAYER, "enorm hnorm transformer.shared_head.norm eh_proj", block=0)
MIMO_V2_MTP = predicting(
    *["model.mtp.layers.{mtp}."] * 2, "enorm hnorm final_layernorm eh_proj", block=0
)
QWEN_MTP = predicting(MTP_LAYER, "mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden norm fc")
FUSED_MTP = dataclasses.replace(QWEN_MTP, fused=True)
MIMO_LAYER = "model.mtp_layers.{mtp}."
MIMO_MTP = predicting(
    *(MIMO_LAYER, MIMO_LAYER), "token_layernorm hidden_layernorm final_layernorm input_proj"
)
ENDS = "0.enorm 0.hnorm 1.final_layernorm 0.eh_proj"
NEMOTRON_MTP = predicting(MTP_LAYER, "mtp.layers.", ENDS, block=2)

TP2, PP2, EP2 = {"tp": 2}, {"pp": 2}, {"tp": 2, "ep": 2, "etp": 1}
DENSE, EXPERTS = (TP2, PP2), (TP2, PP2, EP2)
WHOLE = ({"tp": 2, "etp": 1}, EP2)  # Megatron-Bridge knows these experts whole only

NEMOTRON = HEADS | {
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 4,
    "ssm_state_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_latent_size": 16,
}

# The older Megatron-Bridge knows no latent experts.
OLD_NEMOTRON = NEMOTRON | {
    **{"moe_latent_size": None, "conv_kernel": 4, "architectures": ["NemotronHForCausalLM"]},
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
}

STEP = {
    **{name: size for name, size in SMALL.items() if name != "num_key_value_heads"},
    **{"num_attention_groups": 2, "head_dim": 16, "use_qk_norm": True},
    **{"moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 24, "share_expert_dim": 24},
    **{"moe_layers_enum": "1,2,3", "use_moe_router_bias": True},
    **{"moe_router_activation": "sigmoid", "num_nextn_predict_layers": 1},
    # With stages, Megatron-Bridge takes a layer of MTP for one without a window.
    "layer_types": [*(["full_attention", "sliding_attention"] * 2), "full_attention"],
    "attention_other_setting": {
        **{"attention_type": "sliding_attention", "num_attention_heads": 8},
        **{"num_attention_groups": 2, "head_dim": 16},
    },
    "architectures": ["Step3p5ForCausalLM"],
}

MIMO_V2 = {
    **{name: size for name, size in HEADS.items() if name != "max_position_embeddings"},
    **{"swa_num_key_value_heads": 4, "v_head_dim": 8, "rope_theta": 1e6, "swa_rope_theta": 1e4},
    **{"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window_size": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{
        "scoring_func": "sigmoid",
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "attention_value_scale": 0.7,
    },
    **{"max_position_embeddings": 64, "architectures": ["MiMoV2FlashForCausalLM"]},
}

# Megatron-Core 0.16.1, Megatron-Bridge 0.3.1, transformers 4.57.6.
MCORE016 = [
    (Case("llama", SMALL | {"head_dim": 8}), DENSE),
    (Case("qwen2", SMALL), DENSE),
    (Case("qwen3", HEADS), DENSE),
    (Case("qwen3_moe", MOE), EXPERTS),
    (Case("deepseek_v3", LATENT | {"rope_scaling": None}, SIGMOID), EXPERTS),
    (Case("glm4_moe", GLM, SIGMOID), EXPERTS),
    (Case("gpt_oss", HEADS | SINKS | LAYERS), WHOLE),
    (Case("qwen3_next", NEXT, {"full_attention_interval": 4}), EXPERTS),
]
MCORE016_PREDICTING = [  # this version exports none with stages
    (Case("glm4_moe", GLM, SIGMOID | PREDICT, NEXTN), (TP2, EP2)),
    (Case("qwen3_next", NEXT, {"full_attention_interval": 4}, QWEN_MTP), (TP2, EP2)),
]
MCORE016_UNKNOWN = [(Case("nemotron_h", OLD_NEMOTRON, {}, None, nemotron_shapes), EXPERTS)]
MCORE016_MAPPED = MCORE016 + MCORE016_PREDICTING + MCORE016_UNKNOWN
# Megatron-Core 0.19.2, Megatron-Bridge 0.6.2, transformers 5.23.0.
MCORE019 = [
    (Case("llama", SMALL | {"head_dim": 8}), DENSE),
    (Case("qwen3_moe", MOE), EXPERTS),
    (Case("deepseek_v3", LATENT, SIGMOID | PREDICT, NEXTN), EXPERTS),
    (Case("glm4_moe", GLM, SIGMOID | PREDICT, NEXTN), EXPERTS),
    (Case("glm4_moe_lite", LATENT, SIGMOID | PREDICT, NEXTN), EXPERTS),
    (Case("glm_moe_dsa", LATENT | INDEXER, SIGMOID | INTERLEAVE | PREDICT, NEXTN), EXPERTS),
    (Case("kimi_k25", KIMI, {}, None, cases.kimi_shapes), EXPERTS),
    (Case("mimo", SMALL, PREDICT, MIMO_MTP), DENSE),
    (Case("minimax_m2", HEADS | SINKS | {"rotary_dim": 8}), EXPERTS),
    (Case("bailing_moe_v2", MOE | GROUPS | LING | PREDICT, {}, LING_MTP), EXPERTS),
    (Case("nemotron_h", NEMOTRON | PREDICT, {}, NEMOTRON_MTP), EXPERTS),
    (Case("qwen3_next", NEXT, {}, QWEN_MTP), EXPERTS),
    (Case("qwen3_5_text", HEADS | DELTA, {}, QWEN_MTP), DENSE),
    (Case("qwen3_5_moe_text", MOE | SHARED | DELTA, {}, QWEN_MTP), EXPERTS),
]
# With vision towers of Megatron's own layers, of two heads a rank, deeper than the language model.
SEEING = {
    "vision_config": {
        **{"depth": 5, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24},
        **{"out_hidden_size": 32, "patch_size": 2, "num_position_embeddings": 16},
        "deepstack_visual_indexes": [0, 2],
    },
    "tie_word_embeddings": False,
}
FLAT = SEEING | {"vision_config": SEEING["vision_config"] | {"deepstack_visual_indexes": []}}
QWEN_MOE = FLAT | {"text_config": MOE | SHARED | DELTA}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
MCORE019_SEEING = [
    (Case("qwen3_vl", SEEING | {"text_config": HEADS | {"rope_parameters": SECTIONS}}), DENSE),
    (Case("qwen3_vl_moe", SEEING | {"text_config": MOE | {"rope_parameters": SECTIONS}}), EXPERTS),
    (Case("qwen3_5", FLAT | {"text_config": HEADS | DELTA}, {}, QWEN_MTP), DENSE),
    (Case("qwen3_5_moe", QWEN_MOE, {}, QWEN_MTP), EXPERTS),
    (Case("qwen3_5_moe", QWEN_MOE, {}, FUSED_MTP, named="qwen3_6_moe"), EXPERTS),
]
# Families without a table of rules.
MCORE019_BRIDGED = [
    (Case("mimo_v2_flash", MIMO_V2, {}, MIMO_V2_MTP, mimo_v2_shapes), EXPERTS),
    (Case("step3p5", STEP, {}, STEP_MTP, step_shapes), EXPERTS),
]
MCORE019_COMPUTED = [row for row in MCORE019 if row[0].family == "nemotron_h"]


def rows(table, *, first=False, last=False):
    """(case, arrangement) of all families; of each only its first or last one."""
    found = []
    for case, arrangements in table:
        name = case.named or case.family
        what = name if case.mtp is None else f"{name}-mtp"
        for parallel in arrangements[-1 if last else 0 : 1 if first else None]:
            label = "-".join([what, *(f"{key}{size}" for key, size in parallel.items())])
            found.append(pytest.param(case, parallel, id=label))
    return found


def _ranks(stack):
    if PLACE not in os.environ:
        pytest.skip(f"needs Megatron-Bridge: `.ci/run bridge` installs it and sets {PLACE}")
    packages = Path(os.environ[PLACE], stack)
    assert packages.is_dir(), packages
    path = [str(TESTS), str(packages), str(TESTS / "support" / "fake_te")]
    with Ranks(2, path=path, modules=["support.bridge_stack"], fresh=True) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def mcore016():
    yield from _ranks("mcore016")


@pytest.fixture(scope="module")
def mcore019():
    yield from _ranks("mcore019")


def _matches(ranks, folder, case, parallel):
    (tensors, shards, planted), _ = ranks.run(cases.matches, folder, case, parallel, timeout=280)
    assert shards >= tensors > 20
    # of nemotron_h's parameters one is put together from pieces; the others are copied whole
    assert len(planted) >= (1 if case.family == "nemotron_h" else 2)


@pytest.mark.parametrize(("case", "parallel"), rows(MCORE016_MAPPED))
def test_shards_give_back_what_bridge_031_exports(mcore016, tmp_path, case, parallel):
    _matches(mcore016, tmp_path, case, parallel)


@pytest.mark.parametrize(("case", "parallel"), rows(MCORE019 + MCORE019_SEEING))
def test_shards_give_back_what_bridge_062_exports(mcore019, tmp_path, case, parallel):
    _matches(mcore019, tmp_path, case, parallel)


def _gives_back(ranks, folder, case, parallel):
    (tensors, shards), _ = ranks.run(cases.learnt, folder, case, parallel, timeout=280)
    assert shards >= tensors > 20


@pytest.mark.parametrize(("case", "parallel"), rows(MCORE016_MAPPED, last=True))
def test_mappings_of_bridge_031_make_layouts(mcore016, tmp_path, case, parallel):
    _gives_back(mcore016, tmp_path, case, parallel)


@pytest.mark.parametrize(("case", "parallel"), rows(MCORE019, last=True) + rows(MCORE019_BRIDGED))
def test_mappings_of_bridge_062_make_layouts(mcore019, tmp_path, case, parallel):
    _gives_back(mcore019, tmp_path, case, parallel)


def _computes(ranks, folder, case, parallel):
    for difference, largest in ranks.run(cases.logits_differ, folder, case, parallel, timeout=280):
        assert difference < 2e-5 * largest
        assert largest > 1


@pytest.mark.parametrize(("case", "parallel"), rows(MCORE016, first=True))
def test_megatron_016_computes_what_transformers_does(mcore016, tmp_path, case, parallel):
    _computes(mcore016, tmp_path, case, parallel)


@pytest.mark.parametrize(("case", "parallel"), rows(MCORE019_COMPUTED, first=True))
def test_megatron_019_computes_what_transformers_does(mcore019, tmp_path, case, parallel):
    _computes(mcore019, tmp_path, case, parallel)
