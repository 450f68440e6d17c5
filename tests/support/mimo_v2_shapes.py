"""The tensors of MiMo-V2-Flash, of which transformers has no model."""


def mimo_v2_shapes(config):
    """{name: shape} of a checkpoint, after Megatron-Bridge's `mimo_v2_flash_bridge.py`; only the
    inner part of one layer of multi-token prediction."""
    h, ends = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes = {"model.embed_tokens": ends, "lm_head": ends, "model.norm": (h,)}
    for layer, windowed in enumerate(config.hybrid_layer_pattern):
        own = _attention(config, windowed) | {"post_attention_layernorm": (h,)}
        if config.moe_layer_freq[layer]:
            own |= {"mlp.gate": (config.n_routed_experts, h)}
            own["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
            for expert in range(config.n_routed_experts):
                own |= _gated(f"mlp.experts.{expert}.", config.moe_intermediate_size, h)
        else:
            own |= _gated("mlp.", config.intermediate_size, h)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    own = _attention(config, True) | _gated("mlp.", config.intermediate_size, h)
    own["pre_mlp_layernorm"] = (h,)
    shapes |= {f"model.mtp.layers.0.{name}": shape for name, shape in own.items()}
    return {n if n.endswith("bias") else f"{n}.weight": shape for n, shape in shapes.items()}


def _attention(config, windowed):
    h, heads, d, dv = (
        *(config.hidden_size, config.num_attention_heads),
        *(config.head_dim, config.v_head_dim),
    )
    groups = config.swa_num_key_value_heads if windowed else config.num_key_value_heads
    found = {"q_proj": (heads * d, h), "k_proj": (groups * d, h), "v_proj": (groups * dv, h)}
    found["o_proj"] = (h, heads * dv)
    if windowed:
        found["attention_sink_bias"] = (heads,)
    return {f"self_attn.{n}": shape for n, shape in found.items()} | {"input_layernorm": (h,)}


def _gated(prefix, size, h):
    up = {f"{prefix}{name}_proj": (size, h) for name in ("gate", "up")}
    return up | {f"{prefix}down_proj": (h, size)}
