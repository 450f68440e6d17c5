"""Tiny models of five families: their configs and the tensors of their checkpoints."""

from __future__ import annotations

from typing import Any

import torch

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
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def config(family: str, **changes: Any) -> Any:
    import transformers

    name, own = _OWN[family]
    made = getattr(transformers, name)(**{**_COMMON, **own, **changes})
    made.architectures = [_ARCHITECTURES[family]]
    # attributes of transformers 4 that engines go on reading
    parameters = getattr(made, "rope_parameters", None) or {}
    for attribute, value in {
        "rope_theta": parameters.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }.items():
        if not hasattr(made, attribute):
            setattr(made, attribute, value)
    return made


def checkpoint(family: str, made: Any) -> Shapes:
    """Names, shapes and dtypes of a checkpoint."""
    hidden, bf16 = made.hidden_size, torch.bfloat16
    shapes: Shapes = {"model.embed_tokens.weight": ((made.vocab_size, hidden), bf16)}
    for layer in range(made.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = _latent(made) if family == "deepseek_v3" else _grouped(family, made)
        for name, shape in attention.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (shape, bf16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = ((hidden,), bf16)
        for name, (shape, dtype) in _mlp(family, made, layer).items():
            shapes[f"{prefix}mlp.{name}"] = (shape, dtype)
    shapes["model.norm.weight"] = ((hidden,), bf16)
    if not made.tie_word_embeddings:
        shapes["lm_head.weight"] = ((made.vocab_size, hidden), bf16)
    return shapes


def _grouped(family: str, made: Any) -> dict[str, tuple[int, ...]]:
    hidden, size = made.hidden_size, made.head_dim
    queries, keys = made.num_attention_heads * size, made.num_key_value_heads * size
    norms = {} if family == "llama" else {"q_norm": (size,), "k_norm": (size,)}
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
    experts = getattr(made, "n_routed_experts", None) or getattr(made, "num_experts", None) or 0
    if not experts or layer < getattr(made, "first_k_dense_replace", 0):
        return _gated("", made.intermediate_size, hidden)
    inner = made.moe_intermediate_size
    shapes: Shapes = {"gate.weight": ((experts, hidden), bf16)}
    if family != "qwen3_moe":
        shapes["gate.e_score_correction_bias"] = ((experts,), torch.float32)
        shapes |= _gated("shared_experts.", inner * made.n_shared_experts, hidden)
    for expert in range(experts):
        shapes |= _gated(f"experts.{expert}.", inner, hidden)
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
