"""The tensors of Nemotron 3, of which transformers 4 has no model."""


def nemotron_shapes(config):
    """{name: shape} of a checkpoint, after Megatron-Bridge's `nemotron_h_bridge.py` and the code
    that comes with the checkpoints."""
    h, ends = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes = {"backbone.embeddings.weight": ends, "lm_head.weight": ends}
    shapes["backbone.norm_f.weight"] = (h,)
    make = {"M": _mamba, "-": _dense, "*": _attention, "E": _experts}
    for layer, kind in enumerate(config.hybrid_override_pattern):
        base = f"backbone.layers.{layer}."
        shapes[f"{base}norm.weight"] = (h,)
        shapes |= {f"{base}mixer.{name}": shape for name, shape in make[kind](config).items()}
    return shapes


def _mamba(config):
    heads, states = config.mamba_num_heads, config.n_groups * config.ssm_state_size
    inner = heads * config.mamba_head_dim
    convolved = inner + 2 * states
    return {
        **{"A_log": (heads,), "D": (heads,), "dt_bias": (heads,), "norm.weight": (inner,)},
        **{"conv1d.weight": (convolved, 1, config.conv_kernel), "conv1d.bias": (convolved,)},
        "in_proj.weight": (inner + convolved + heads, config.hidden_size),
        "out_proj.weight": (config.hidden_size, inner),
    }


def _attention(config):
    rows = {"q": config.num_attention_heads} | dict.fromkeys("kv", config.num_key_value_heads)
    found = {f"{n}_proj.weight": (r * config.head_dim, config.hidden_size) for n, r in rows.items()}
    return found | {"o_proj.weight": found["q_proj.weight"][::-1]}


def _linear(prefix, size, config):
    return {
        f"{prefix}up_proj.weight": (size, config.hidden_size),
        f"{prefix}down_proj.weight": (config.hidden_size, size),
    }


def _dense(config):
    return _linear("", config.intermediate_size, config)


def _experts(config):
    count = config.n_routed_experts
    found = _linear("shared_experts.", config.moe_shared_expert_intermediate_size, config)
    for expert in range(count):
        found |= _linear(f"experts.{expert}.", config.moe_intermediate_size, config)
    return found | {
        "gate.weight": (count, config.hidden_size),
        "gate.e_score_correction_bias": (count,),
    }
