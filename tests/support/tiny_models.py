"""Tiny models: their configs and the tensors of their checkpoints.

Those of FAMILIES are written down here; those of SAVED are what transformers saves of the model.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.mimo_v2_shapes import mimo_v2_shapes
from support.step_shapes import step_shapes

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 151,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "intermediate_size": 128,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_SHARED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "qwen3": ("Qwen3Config", _GROUPED),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "num_experts": 8}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_GROUPED, **_EXPERTS, **_SHARED, "n_group": 1, "use_qk_norm": True}
        | {"num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_EXPERTS, **_SHARED, "n_group": 2, "q_lora_rank": 24, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"num_key_value_heads": 8}
        | {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0},
                **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
                "original_max_position_embeddings": 4096,
            }
        },
    ),
    # a family that a user registers: wsync has no table for it
    # engines compute its heads' size, and never read head_dim
    "mixtral": (
        "MixtralConfig",
        {**_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # transformers has no class for it: its code comes with its checkpoints
    "bailing_moe_v2": (
        "PretrainedConfig",
        {**_GROUPED, **_EXPERTS, "num_experts": 4, "num_shared_experts": 1, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "score_function": "sigmoid"}
        | {"use_qk_norm": True, "use_rmsnorm": True, "use_bias": False, "use_qkv_bias": False}
        | {"moe_router_enable_expert_bias": True, "router_dtype": "fp32", "norm_head": False}
        | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "embedding_dropout": 0.0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rotary_dim": 16},
    ),
}
_HEADS = {"num_key_value_heads": 2}
_SHARED_EXPERT = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}
_LATENT = {**_OWN["deepseek_v3"][1], "n_routed_experts": 4}
_INDEXER = {**_LATENT, "index_n_heads": 2, "index_head_dim": 128, "index_topk": 16}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "full_attention_interval": 2, **_GROUPED},
    "layer_types": ["linear_attention", "full_attention"],
}
_SECTIONS = {
    **_GROUPED,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True},
        "mrope_section": [4, 2, 2],
    },
}
# family: the names of transformers' classes of configuration and model, and fields
_SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _HEADS),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_HEADS, **_SHARED_EXPERT}),
    "glm4": (
        *("Glm4Config", "Glm4ForCausalLM"),
        {**_GROUPED, "attention_bias": True, "pad_token_id": None},
    ),
    "glm4_moe_lite": (
        *("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
        {**_LATENT, "n_group": 1},
    ),
    # MiMo is a Qwen2 but for layers that predict further tokens
    "mimo": ("Qwen2Config", "Qwen2ForCausalLM", _HEADS),
    "minimax_m2": (
        *("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
        {**_GROUPED, "num_local_experts": 4, "rotary_dim": 16, "use_routing_bias": True},
    ),
    "gpt_oss": (
        *("GptOssConfig", "GptOssForCausalLM"),
        {**_GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 64}
        | {"swiglu_limit": 7.0},
    ),
    "kimi_k2": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "moonlight": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, "q_lora_rank": None}),
    "kimi_k25": (
        *("Kimi_K25Config", "Kimi_K25ForConditionalGeneration"),
        {**_LATENT, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    ),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", _INDEXER),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _INDEXER),
    "nemotron_h": (
        *("NemotronHConfig", "NemotronHForCausalLM"),
        {**_GROUPED, **_EXPERTS, "hybrid_override_pattern": "M-*E", "n_routed_experts": 4}
        | {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 64}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 8, "ssm_state_size": 16},
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_DELTA, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _DELTA),
    "qwen3_5_moe": (
        *("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        {**_DELTA, **_SHARED_EXPERT, "num_experts": 2},
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
    "qwen3_5_moe_text": (
        *("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        {**_DELTA, **_SHARED_EXPERT},
    ),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", _SECTIONS),
    "qwen3_vl_moe": (
        *("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
        {**_SECTIONS, **_EXPERTS, "num_experts": 2},
    ),
}
SAVED = tuple(_SAVED)
# Those of which transformers has no model: the class of engines, and fields.
_UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        {**_GROUPED, **_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"swa_num_key_value_heads": 4, "v_head_dim": 8, "swa_head_dim": 16, "swa_v_head_dim": 8}
        | {"swa_num_attention_heads": 8, "rope_theta": 1e6, "swa_rope_theta": 1e4}
        | {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "sliding_window_size": 16}
        | {"sliding_window": 16, "layernorm_epsilon": 1e-5, "attention_value_scale": 0.7}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu"}
        | {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
        | {"attention_bias": False, "partial_rotary_factor": 0.5},
    ),
    "step3p5": (
        "Step3p5ForCausalLM",
        {**_EXPERTS, "num_attention_groups": 2, "head_dim": 16, "use_qk_norm": True}
        | {"moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 64, "share_expert_dims": 64}
        | {"moe_layers_enum": "1", "use_moe_router_bias": True, "need_fp32_gate": True}
        | {
            "norm_expert_weight": True,
            "moe_router_activation": "sigmoid",
            "moe_router_scaling_factor": 3.0,
        }
        | {"use_head_wise_attn_gate": True, "sliding_window": 16, "rms_norm_eps": 1e-5}
        | {"layer_types": ["full_attention", "sliding_attention"], "mtp_layer_types": []}
        | {
            "rope_theta": [10000.0, 10000.0],
            "rope_scaling": None,
            "partial_rotary_factors": [0.5, 1.0],
        }
        | {"swiglu_limits": [0.0, 0.0], "swiglu_limits_shared": [0.0, 0.0]}
        | {
            "attention_other_setting": {
                **{"attention_type": "sliding_attention", "num_attention_heads": 12},
                **{"num_attention_groups": 2, "head_dim": 16},
            }
        },
    ),
}
UNKNOWN = tuple(_UNKNOWN)
_VISION = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    **{"out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4},
}
# of which the published configuration has other names than transformers
_KIMI_VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "patch_size": 4},
    **{"num_hidden_layers": 1, "pos_emb_height": 4, "pos_emb_width": 4},
    **{"init_pos_emb_height": 4, "init_pos_emb_width": 4, "vt_hidden_size": 32},
    **{"text_hidden_size": 64, "mm_hidden_size": 32},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
}


def config(family: str, **changes: Any) -> Any:
    import transformers

    if family in UNKNOWN:
        return _unknown(family, changes)
    if family in SAVED:
        name, architecture, own = _SAVED[family]
    else:
        name, own = _OWN[family]
        architecture = _ARCHITECTURES[family]
    fields = {**_COMMON, **copy.deepcopy(own), **changes}
    kind = getattr(transformers, name)
    if kind is transformers.PretrainedConfig:
        kind = type("WrittenConfig", (kind,), {"model_type": family})
        transformers.AutoConfig.register(family, kind)
    if "vision_config" in kind.sub_configs:
        ties = fields["tie_word_embeddings"]
        seen = _VISION | {"deepstack_visual_indexes": [0] if "vl" in family else []}
        more = {"projection_hidden_size": 32} if family == "kimi_k25" else {}
        seen = _KIMI_VISION if family == "kimi_k25" else seen
        made = kind(text_config=fields, vision_config=seen, tie_word_embeddings=ties, **more)
    else:
        made = kind(**fields)
    made.architectures = [architecture]
    # attributes of transformers 4 that engines go on reading
    text = made.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    for attribute, value in {
        "rope_theta": parameters.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }.items():
        if not hasattr(text, attribute):
            setattr(text, attribute, value)
    return made


def _unknown(family: str, changes: dict[str, Any]) -> Any:
    import transformers

    architecture, own = _UNKNOWN[family]
    kind: Any = type(family, (transformers.PretrainedConfig,), {"model_type": family})
    transformers.AutoConfig.register(family, kind, exist_ok=True)
    return kind(**{**_COMMON, **copy.deepcopy(own), **changes}, architectures=[architecture])


def published(made: Any) -> Any:
    """A config as checkpoints have it, where engines do not read what transformers 5 saves."""
    if made.model_type == "kimi_k25":
        made.architectures = ["KimiK25ForConditionalGeneration"]
    if made.model_type != "nemotron_h":
        return made
    import transformers

    fields = made.to_dict()
    fields["layers_block_type"] = ["mamba", "mlp", "attention", "moe"]
    fields["mtp_layers_block_type"] = ["attention", "moe"]
    kind: Any = type("Published", (transformers.PretrainedConfig,), {"model_type": "nemotron_h"})
    return kind(**fields)


def checkpoint(family: str, made: Any) -> Shapes:
    """Names, shapes and dtypes of a checkpoint."""
    if family in SAVED:
        return _saved(made)
    if family in UNKNOWN:
        named = {"step3p5": step_shapes, "mimo_v2_flash": mimo_v2_shapes}[family](made)
        wide = ("router_bias", "correction_bias")
        return {
            name: (shape, torch.float32 if name.endswith(wide) else torch.bfloat16)
            for name, shape in named.items()
        }
    hidden, bf16 = made.hidden_size, torch.bfloat16
    ling = family == "bailing_moe_v2"
    embedding = f"model.{'word_embeddings' if ling else 'embed_tokens'}.weight"
    shapes: Shapes = {embedding: ((made.vocab_size, hidden), bf16)}
    for layer in range(made.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in _attention(family, made).items():
            shapes[f"{prefix}{name}.weight"] = (shape, bf16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = ((hidden,), bf16)
        moe = "block_sparse_moe" if family == "mixtral" else "mlp"
        for name, (shape, dtype) in _mlp(family, made, layer).items():
            shapes[f"{prefix}{moe}.{name}"] = (shape, dtype)
    shapes["model.norm.weight"] = ((hidden,), bf16)
    if not made.tie_word_embeddings:
        shapes["lm_head.weight"] = ((made.vocab_size, hidden), bf16)
    return shapes


def _saved(made: Any) -> Shapes:
    """Those of the file that transformers saves; routers' corrections are float32 in all."""
    import transformers

    model = getattr(transformers, made.architectures[0])(made).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder, "model.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    header.pop("__metadata__", None)
    shapes = {
        name: (
            tuple(facts["shape"]),
            torch.float32 if name.endswith("correction_bias") else torch.bfloat16,
        )
        for name, facts in header.items()
    }
    return _as_published(made.model_type, shapes)


def _as_published(family: str, shapes: Shapes) -> Shapes:
    """With the experts of two families as they are in published checkpoints, and not as
    transformers 5 saves them: turned round, and one by one; and a third's names."""
    if family == "kimi_k25":
        return {
            name.replace(".model.blocks.", ".model.layers.")
            .removeprefix("model.")
            .replace("encoder.patch_embed.", "patch_embed."): facts
            for name, facts in shapes.items()
        }
    if family == "qwen3_vl_moe":
        return {
            name: ((shape[0], *shape[:0:-1]) if ".experts." in name else shape, dtype)
            for name, (shape, dtype) in shapes.items()
        }
    if family != "qwen3_5_moe":
        return shapes
    found = {name: facts for name, facts in shapes.items() if ".experts." not in name}
    for name, (shape, dtype) in shapes.items():
        prefix, one, rest = name.partition(".experts.0.")
        if one and rest != "up_proj.weight":
            gated = rest == "gate_proj.weight"
            experts = shapes[f"{prefix}.gate.weight"][0][0]
            fused = (experts, shape[0] * (1 + gated), shape[1])
            found[f"{prefix}.experts.{'gate_up_proj' if gated else 'down_proj'}"] = (fused, dtype)
    return found


def _attention(family: str, made: Any) -> dict[str, tuple[int, ...]]:
    if family == "bailing_moe_v2":
        found = _grouped(family, made)
        rows = sum(found[f"{name}_proj"][0] for name in "qkv")
        return {
            "attention.query_key_value": (rows, made.hidden_size),
            "attention.dense": found["o_proj"],
            "attention.query_layernorm": found["q_norm"],
            "attention.key_layernorm": found["k_norm"],
        }
    found = _latent(made) if family == "deepseek_v3" else _grouped(family, made)
    return {f"self_attn.{name}": shape for name, shape in found.items()}


def _grouped(family: str, made: Any) -> dict[str, tuple[int, ...]]:
    hidden, size = made.hidden_size, made.head_dim
    queries, keys = made.num_attention_heads * size, made.num_key_value_heads * size
    norms = {} if family in ("llama", "mixtral") else {"q_norm": (size,), "k_norm": (size,)}
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        **norms,
    }


def _latent(made: Any) -> dict[str, tuple[int, ...]]:
    hidden, heads = made.hidden_size, made.num_attention_heads
    query = made.qk_nope_head_dim + made.qk_rope_head_dim
    return {
        "q_a_proj": (made.q_lora_rank, hidden),
        "q_a_layernorm": (made.q_lora_rank,),
        "q_b_proj": (heads * query, made.q_lora_rank),
        "kv_a_proj_with_mqa": (made.kv_lora_rank + made.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (made.kv_lora_rank,),
        "kv_b_proj": (heads * (made.qk_nope_head_dim + made.v_head_dim), made.kv_lora_rank),
        "o_proj": (hidden, heads * made.v_head_dim),
    }


def _mlp(family: str, made: Any, layer: int) -> Shapes:
    hidden, bf16 = made.hidden_size, torch.bfloat16
    if family == "mixtral":
        return _mixtral(made)
    experts = getattr(made, "n_routed_experts", None) or getattr(made, "num_experts", None) or 0
    if not experts or layer < getattr(made, "first_k_dense_replace", 0):
        return _gated("", made.intermediate_size, hidden)
    inner = made.moe_intermediate_size
    shapes: Shapes = {"gate.weight": ((experts, hidden), bf16)}
    if family == "bailing_moe_v2":
        shapes["gate.expert_bias"] = ((experts,), torch.float32)
        shapes |= _gated("shared_experts.", inner * made.num_shared_experts, hidden)
    elif family != "qwen3_moe":
        shapes["gate.e_score_correction_bias"] = ((experts,), torch.float32)
        shapes |= _gated("shared_experts.", inner * made.n_shared_experts, hidden)
    for expert in range(experts):
        shapes |= _gated(f"experts.{expert}.", inner, hidden)
    return shapes


def _mixtral(made: Any) -> Shapes:
    hidden, inner, bf16 = made.hidden_size, made.intermediate_size, torch.bfloat16
    shapes: Shapes = {"gate.weight": ((made.num_local_experts, hidden), bf16)}
    for expert in range(made.num_local_experts):
        for name in ("w1", "w3"):
            shapes[f"experts.{expert}.{name}.weight"] = ((inner, hidden), bf16)
        shapes[f"experts.{expert}.w2.weight"] = ((hidden, inner), bf16)
    return shapes


def _gated(prefix: str, inner: int, hidden: int) -> Shapes:
    bf16 = torch.bfloat16
    return {
        f"{prefix}gate_proj.weight": ((inner, hidden), bf16),
        f"{prefix}up_proj.weight": ((inner, hidden), bf16),
        f"{prefix}down_proj.weight": ((hidden, inner), bf16),
    }


def blockwise_fp8(shapes: Shapes, block: int = 16) -> Shapes:
    """The checkpoint with its projections in FP8, and a scale for each square block of them."""
    quantised: Shapes = {}
    for name, (shape, dtype) in shapes.items():
        if name.endswith("_proj.weight"):
            blocks = tuple(-(-extent // block) for extent in shape)
            quantised[name] = (shape, torch.float8_e4m3fn)
            quantised[f"{name}_scale_inv"] = (blocks, torch.float32)
        else:
            quantised[name] = (shape, dtype)
    return quantised


def tensors(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }


def weights(shapes: Shapes, given: int | str) -> dict[str, torch.Tensor]:
    """Tensors of a seed, or those that a file holds."""
    if isinstance(given, int):
        return tensors(shapes, given)
    loaded: dict[str, torch.Tensor] = torch.load(given)
    return loaded
