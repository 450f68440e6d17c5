"""What a Megatron rank must hold, made from Hugging Face tensors; the opposite way of wsync's.

Plain torch.cat, chunk and view on whole tensors, by the layouts that Megatron-Core documents in
its own sources; shares no code and no table with wsync.
"""

import re
import zlib

import torch
import transformers

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config(family, **changes):
    """A tiny configuration of a family."""
    kinds = {
        "llama": (transformers.LlamaConfig, {"head_dim": 8}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "qwen2_moe": (
            transformers.Qwen2MoeConfig,
            {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        ),
        "qwen3_moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "head_dim": 16}),
    }
    kind, extra = kinds[family]
    return kind(**{**SMALL, **extra, **changes})


def hf_model(hf):
    """A transformers model with weights that tell every element apart."""
    model = transformers.AutoModelForCausalLM.from_config(hf).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(values + 1.0 if "norm" in name else values)
    return model


def hf_tensors(hf):
    """The checkpoint of that model: {name: tensor}, without lm_head where it is tied."""
    state = {name: tensor.clone() for name, tensor in hf_model(hf).state_dict().items()}
    if hf.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def _heads(hf):
    head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return hf.num_key_value_heads, hf.num_attention_heads // hf.num_key_value_heads, head


def _qkv(state, layer, kind, hf):
    groups, per_group, head = _heads(hf)
    q, k, v = (state[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
    parts = []
    for group in range(groups):
        parts.append(q[group * per_group * head : (group + 1) * per_group * head])
        parts.append(k[group * head : (group + 1) * head])
        parts.append(v[group * head : (group + 1) * head])
    return torch.cat(parts)


def _padded(tensor, rows):
    out = torch.full((rows, *tensor.shape[1:]), 0.5, dtype=tensor.dtype)
    out[: len(tensor)] = tensor
    return out


def share(name, state, hf, place, padded):
    """The tensor that a rank holds under a global Megatron name.

    place: (tp rank, tp, etp rank, etp, ep rank, ep); padded: rows of the padded vocabulary.
    """
    tp_rank, tp, etp_rank, etp, ep_rank, ep = place
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        key = "lm_head.weight" if name.startswith("output") else "model.embed_tokens.weight"
        table = state.get(key, state["model.embed_tokens.weight"])
        return _padded(table, padded).chunk(tp)[tp_rank]
    if name == "decoder.final_layernorm.weight":
        return state["model.norm.weight"]
    layer, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name).groups()
    base = f"model.layers.{layer}."

    def gated(prefix, rank, ranks):
        gate = state[f"{base}{prefix}gate_proj.weight"].chunk(ranks)[rank]
        return torch.cat([gate, state[f"{base}{prefix}up_proj.weight"].chunk(ranks)[rank]])

    def down(prefix, rank, ranks):
        return state[f"{base}{prefix}down_proj.weight"].chunk(ranks, 1)[rank]

    found = re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest)
    if found:
        return _qkv(state, layer, found[1], hf).chunk(tp)[tp_rank]
    if rest == "self_attention.linear_proj.weight":
        return state[f"{base}self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
    found = re.fullmatch(r"self_attention\.([qk])_layernorm\.weight", rest)
    if found:
        return state[f"{base}self_attn.{found[1]}_norm.weight"]
    if rest in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        return state[f"{base}input_layernorm.weight"]
    if rest in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        return state[f"{base}post_attention_layernorm.weight"]
    if rest == "mlp.router.weight":
        return state[f"{base}mlp.gate.weight"]
    if rest == "mlp.shared_experts.gate_weight":
        return state[f"{base}mlp.shared_expert_gate.weight"]
    found = re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc([12])\.weight", rest)
    if found:
        prefix = "mlp.shared_expert." if found[1] else "mlp."
        return (gated if found[2] == "1" else down)(prefix, tp_rank, tp)
    found = re.fullmatch(r"mlp\.experts\.weight([12])", rest)
    if found:
        count = hf.num_experts // ep
        pieces = []
        for expert in range(ep_rank * count, (ep_rank + 1) * count):
            make = gated if found[1] == "1" else down
            pieces.append(make(f"mlp.experts.{expert}.", etp_rank, etp).t())
        whole = torch.stack(pieces)  # (experts, rows, columns), each transposed
        columns = hf.hidden_size if found[1] == "2" else None
        return whole.reshape(-1, columns) if columns else whole.reshape(hf.hidden_size, -1)
    found = re.fullmatch(
        r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight"
        r"|linear_fc([12])\.weight(\d+))",
        rest,
    )
    expert = found[1] or found[4]
    make = gated if (found[2] or found[3]) == "1" else down
    return make(f"mlp.experts.{expert}.", etp_rank, etp)
