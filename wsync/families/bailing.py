"""Ling 2.0 (bailing_moe_v2).

Names follow Megatron-Bridge 0.6.2 (`bailing_moe2_bridge.py`) and the modelling code it ships
(`modeling_bailing_moe_v2.py`).
"""

from __future__ import annotations

from wsync.families.blocks import (
    DENSE_MLP,
    HF_LAYER,
    LAYER,
    NORMS,
    UNGATED_SHARED_EXPERTS,
    layer_rules,
    linear,
    mtp,
    renamed,
    routed_experts,
    vocabulary,
    with_bias,
)
from wsync.families.rules import Rule

_QKV = with_bias(
    f"{LAYER}self_attention.linear_qkv",
    "*(g (n | k:1 | v:1) d)",
    (f"{HF_LAYER}attention.query_key_value", "(g n d | g k d | g v d)"),
)
_LAYER: tuple[Rule, ...] = (
    *_QKV,
    *linear(f"{LAYER}self_attention.linear_proj", "h", "*(g n d)", f"{HF_LAYER}attention.dense"),
    *layer_rules(
        ("self_attention.q_layernorm.weight", "d", "attention.query_layernorm.weight"),
        ("self_attention.k_layernorm.weight", "d", "attention.key_layernorm.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", "h", "input_layernorm.weight"),
    ),
    *NORMS,
    *DENSE_MLP,
    *routed_experts(bias="gate.expert_bias"),
    *UNGATED_SHARED_EXPERTS,
)
BAILING_MOE_V2: tuple[Rule, ...] = (
    vocabulary("embedding.word_embeddings.weight", "model.word_embeddings.weight"),
    vocabulary("output_layer.weight", "lm_head.weight"),
    renamed("decoder.final_layernorm.weight", "h", "model.norm.weight"),
    *_LAYER,
    *mtp(_LAYER, norm=f"{HF_LAYER}final_layernorm"),
)
