"""Converters of slime's kind, convert(args, name, parameter): from one whole Megatron parameter to
the (name, tensor) pairs of a checkpoint.

Written from what is documented of the models' layouts, with the operations that such converters
use (view, split, reshape, chunk), sharing no code with wsync's rules.
"""

import re

EXPERT = (
    r"mlp\.experts\.(?:linear_fc([12])\.weight(\d+)|local_experts\.(\d+)\.linear_fc([12])\.weight)"
)
ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
COPIES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
NORMS_OF_HEADS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
LATENT = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}
MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def _layer(args, layer, rest, param, copies):
    base = f"model.layers.{layer}."
    if rest in copies:
        return [(base + copies[rest], param)]
    match = re.fullmatch(EXPERT, rest)
    if match:
        expert, part = match[2] or match[3], match[1] or match[4]
        if part == "2":
            return [(f"{base}mlp.experts.{expert}.down_proj.weight", param)]
        gate, up = param.chunk(2, dim=0)
        inner = f"{base}mlp.experts.{expert}."
        return [(f"{inner}gate_proj.weight", gate), (f"{inner}up_proj.weight", up)]
    match = re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc1\.weight", rest)
    if match:
        gate, up = param.chunk(2, dim=0)
        inner = f"{base}mlp.{match[1] or ''}"
        return [(f"{inner}gate_proj.weight", gate), (f"{inner}up_proj.weight", up)]
    match = re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest)
    if match:
        return _qkv(args, base, match[1], param)
    raise ValueError(f"unknown parameter {rest}")


def _qkv(args, base, kind, param):
    groups = args.num_query_groups
    heads = args.num_attention_heads // groups
    grouped = param.view(groups, heads + 2, args.kv_channels, *param.shape[1:])
    parts = grouped.split([heads, 1, 1], dim=1)
    return [
        (f"{base}self_attn.{which}_proj.{kind}", part.reshape(-1, *param.shape[1:]))
        for which, part in zip("qkv", parts, strict=True)
    ]


def _convert(args, name, param, copies):
    name = name.removeprefix("module.module.")
    assert not name.startswith("module.")
    if name in ENDS:
        return [(ENDS[name], param)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match:
        return _layer(args, int(match[1]), match[2], param, copies)
    match = re.fullmatch(r"mtp\.layers\.(\d+)\.(?:(transformer_layer)\.)?(.+)", name)
    if match:
        layer = args.num_layers + int(match[1])
        return _layer(args, layer, match[3], param, copies if match[2] else MTP)
    raise ValueError(f"unknown parameter {name}")


def grouped(args, name, param):
    """qwen3, qwen3_moe and glm4_moe."""
    return _convert(args, name, param, COPIES | NORMS_OF_HEADS)


def latent(args, name, param):
    """deepseek_v3."""
    return _convert(args, name, param, COPIES | LATENT)
