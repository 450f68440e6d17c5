"""The tensors of Step-3.5, of which transformers has no model."""


def step_shapes(config):
    """{name: shape} of a checkpoint, after Megatron-Bridge's `step35_bridge.py`; only the inner
    layers of multi-token prediction."""
    h, d, other = config.hidden_size, config.head_dim, config.attention_other_setting
    groups, ends = config.num_attention_groups * d, (config.vocab_size, h)
    routed = {int(layer) for layer in config.moe_layers_enum.split(",")}
    shapes = {"model.embed_tokens": ends, "lm_head": ends, "model.norm": (h,)}
    for layer, kind in enumerate([*config.layer_types, *config.mtp_layer_types]):
        sliding = kind == other["attention_type"]
        heads = (other if sliding else vars(config))["num_attention_heads"]
        own = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        own |= {"self_attn.q_proj": (heads * d, h), "self_attn.g_proj": (heads, h)}
        own |= {f"self_attn.{name}_proj": (groups, h) for name in "kv"}
        own |= {"self_attn.o_proj": (h, heads * d)}
        own |= {f"self_attn.{name}_norm": (d,) for name in "qk"}
        parts = {"mlp.": ((), config.intermediate_size)}
        if layer in routed:
            experts = config.moe_num_experts
            own |= {"moe.gate": (experts, h), "moe.router_bias": (experts,)}
            parts = {
                "moe.": ((experts,), config.moe_intermediate_size),
                "share_expert.": ((), config.share_expert_dim),
            }
        for part, (many, size) in parts.items():
            own |= {f"{part}{name}_proj": (*many, size, h) for name in ("gate", "up")}
            own[f"{part}down_proj"] = (*many, h, size)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {n if n.endswith("bias") else f"{n}.weight": shape for n, shape in shapes.items()}
