"""Tiny trainers and checkpoints of families whose attention has query groups.

`plain` rewrites a family's checkpoint as one that has Qwen's names, `share` cuts it: plain torch
on whole tensors, after transformers' modules and Megatron-Core's, sharing nothing with wsync's
rules.  Where Megatron-Core 0.16 has no module for a parameter, `attach` adds a bare one that has
the name and the local shape which slime's or Megatron-Bridge's has.
"""

import re
import zlib
from dataclasses import dataclass, field

import torch
import transformers
from support import megatron_reference as reference
from torch import nn

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


@dataclass(frozen=True)
class Kind:
    """A family's tiny configuration and what Megatron is told beside it."""

    config: type
    settings: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    model_type: str = ""


KINDS = {
    "glm4": Kind(
        transformers.Glm4Config,
        {
            "head_dim": 8,
            "attention_bias": True,
            "pad_token_id": None,
            "partial_rotary_factor": 1.0,
        },
        {"add_qkv_bias": True, "rotary_interleaved": True},
    ),
    "glm4_moe": Kind(
        transformers.Glm4MoeConfig,
        {
            **MOE,
            "head_dim": 8,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 1.0,
        },
        {
            "add_qkv_bias": True,
            "qk_layernorm": True,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_shared_expert_intermediate_size": 48,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    ),
    "minimax_m2": Kind(  # transformers 4 has no class of it
        transformers.Qwen3MoeConfig,
        {**MOE, "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 48},
        {
            "qk_layernorm": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
        model_type="minimax_m2",
    ),
    "mixtral": Kind(transformers.MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mimo": Kind(transformers.Qwen2Config, {}, {"add_qkv_bias": True}, model_type="mimo"),
    "qwen3_vl": Kind(transformers.Qwen3VLConfig),
    "qwen3_vl_moe": Kind(transformers.Qwen3VLMoeConfig),
    "gpt_oss": Kind(
        transformers.GptOssConfig,
        {
            "head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * 4,
            "rope_scaling": None,
        },
        {
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "softmax_type": "learnable",
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        },
    ),
}


VISION = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "patch_size": 2,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}


def _vision_config(family, **changes):
    text = {**reference.SMALL, "head_dim": 8, **changes}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    if family == "qwen3_vl_moe":
        text |= {**MOE, "num_experts": 8}
    return KINDS[family].config(text_config=text, vision_config=VISION)


def config(family, **changes):
    kind = KINDS[family]
    if family.startswith("qwen3_vl"):
        return _vision_config(family, **changes)
    made = kind.config(**{**reference.SMALL, **kind.settings, **changes})
    if kind.model_type:
        made.model_type = kind.model_type
    return made


def experts(hf):
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((v for name in names if (v := getattr(hf, name, None))), 0)


def options(hf):
    """What Megatron's configuration has beside the sizes that megatron_cpu.build reads."""
    found = dict(KINDS[hf.model_type].options) if hf.model_type in KINDS else {}
    if getattr(hf, "num_nextn_predict_layers", None):
        found["mtp_num_layers"] = hf.num_nextn_predict_layers
    if hf.model_type == "gpt_oss":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        found["activation_func"] = quick_gelu
    if experts(hf):
        found |= {
            "num_moe_experts": experts(hf),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
        }
    return found


def hf_model(hf):
    """transformers' model with weights of its own."""
    kinds = {
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
        "qwen3_vl_moe": transformers.Qwen3VLMoeForConditionalGeneration,
    }
    return kinds.get(hf.model_type, transformers.AutoModelForCausalLM.from_config)(hf).eval()


def checkpoint(hf):
    """{name: tensor} of a checkpoint of the family, every element its own."""
    if hf.model_type.startswith("qwen3_vl"):
        return _vision_checkpoint(hf)
    if hf.model_type in ("minimax_m2", "mimo"):
        plain_hf = type(hf).from_dict(hf.to_dict())
        plain_hf.model_type = type(hf).model_type
        state = reference.hf_tensors(plain_hf)
    else:
        state = reference.hf_tensors(hf)
    if hf.model_type == "minimax_m2":
        state = _minimax(state, hf)
    for layer in range(getattr(hf, "num_nextn_predict_layers", None) or 0):
        state |= _mtp(state, hf, layer)
    for name, tensor in state.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.linspace(-1.0, 1.0, len(tensor)) + int(name.split(".")[2]))
    return state


def _vision_checkpoint(hf):
    state = hf_model(hf).state_dict()
    if hf.text_config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: _random(name, tensor.shape) for name, tensor in state.items()}


def _random(name, shape):
    """Values of this tensor alone, small enough for a forward pass to have a meaning."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return values * 0.2 + ("norm" in name)


def _minimax(state, hf):
    """Qwen3-MoE's tensors under MiniMax-M2's names, with norms over all heads."""
    found = {}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, tensor in state.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        name = re.sub(r"(gate|up|down)_proj", lambda match: names[match.group()], name)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            heads = hf.num_attention_heads if "q_norm" in name else hf.num_key_value_heads
            tensor = torch.cat([tensor + head for head in range(heads)])
        found[name] = tensor
        if name.endswith("block_sparse_moe.gate.weight"):
            bias = name.replace("gate.weight", "e_score_correction_bias")
            found[bias] = torch.empty(len(tensor))
    return found


def _mtp(state, hf, layer):
    """A layer of multi-token prediction, of the shape of the last layer."""
    last, base = f"model.layers.{hf.num_hidden_layers - 1}.", _mtp_base(hf, layer)
    shapes = {
        base + name.removeprefix(last): tensor.shape
        for name, tensor in state.items()
        if name.startswith(last)
    }
    names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    if hf.model_type == "mimo":
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
    shapes |= {f"{base}{name}.weight": (hf.hidden_size,) for name in names[:3]}
    shapes[f"{base}{names[3]}.weight"] = (hf.hidden_size, 2 * hf.hidden_size)
    return {name: _random(name, shape) for name, shape in shapes.items()}


def _mtp_base(hf, layer):
    if hf.model_type == "mimo":
        return f"model.mtp_layers.{layer}."
    return f"model.layers.{hf.num_hidden_layers + layer}."


def plain(state, hf):
    """The checkpoint under the names of Qwen's: experts one by one, gate and up apart."""
    found = {}
    for name, tensor in state.items():
        name = name.replace("model.language_model.", "model.")
        if name.endswith("input_proj.weight"):
            tensor = torch.cat([tensor[:, hf.hidden_size :], tensor[:, : hf.hidden_size]], 1)
        name = name.replace(".block_sparse_moe.e_score", ".mlp.gate.e_score")
        name = name.replace(".block_sparse_moe.", ".mlp.").replace(
            "shared_experts", "shared_expert"
        )
        for theirs, ours in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{theirs}.", f".{ours}.")
        match = re.fullmatch(r"(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias)?", name)
        if match:
            base, which, bias = match.groups()
            for expert, part in enumerate(tensor):
                rows = part if bias else part.t()
                _split(found, f"{base}{expert}.", which, rows, hf.model_type == "gpt_oss")
        elif name.endswith("mlp.gate_up_proj.weight"):
            base = name.removesuffix("gate_up_proj.weight")
            found[f"{base}gate_proj.weight"], found[f"{base}up_proj.weight"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def _split(found, base, which, part, alternating):
    """One of fused experts; the gate and up rows of gpt-oss's alternate."""
    kind = "weight" if part.dim() == 2 else "bias"
    if which == "down":
        found[f"{base}down_proj.{kind}"] = part
    else:
        both = (part[0::2], part[1::2]) if alternating else part.chunk(2)
        found[f"{base}gate_proj.{kind}"], found[f"{base}up_proj.{kind}"] = both


def share(name, state, hf, place, rows):
    """As megatron_reference.share, of a plain checkpoint and with what other families have."""
    tp_rank, tp, etp_rank, etp, *_ = place
    match = re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", name)
    if match:
        return _mtp_share(int(match[1]), match[2], state, hf, place, rows)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    base, rest = (f"model.layers.{match[1]}.", match[2]) if match else ("", "")
    attention = f"{base}self_attn."
    if rest in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
        return state[base + rest]
    if rest == "mlp.router.expert_bias":
        return state[f"{base}mlp.gate.e_score_correction_bias"]
    if rest == "mlp.router.weight" and hf.model_type == "gpt_oss":
        return state[f"{base}mlp.router.weight"]
    if rest == "mlp.router.bias":
        return state[f"{base}mlp.router.bias"]
    if rest == "self_attention.linear_proj.bias":
        return state[f"{attention}o_proj.bias"]
    if rest == "self_attention.core_attention.softmax_offset":
        return state[f"{attention}sinks"].chunk(tp)[tp_rank]
    if match and hf.model_type == "minimax_m2":
        found = re.fullmatch(r"self_attention\.([qk])_(norm|layernorm)\.weight", rest)
        if found:
            return _norm_of_heads(
                state[f"{attention}{found[1]}_norm.weight"], hf, place, *found.groups()
            )
    found = re.fullmatch(
        r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.bias|linear_fc([12])\.bias(\d+))",
        rest,
    )
    if found:
        base = f"{base}mlp.experts.{found[1] or found[4]}."
        if (found[2] or found[3]) == "2":
            return state[f"{base}down_proj.bias"]
        gate, up = (state[f"{base}{part}_proj.bias"].chunk(etp) for part in ("gate", "up"))
        return torch.cat([gate[etp_rank], up[etp_rank]])
    return reference.share(name, state, hf, place, rows)


def _mtp_share(layer, rest, state, hf, place, rows):
    base = _mtp_base(hf, layer)
    inner = f"decoder.layers.{hf.num_hidden_layers + layer}."
    if hf.model_type == "mimo":
        names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
        state = state | {
            name.replace(base, f"model.layers.{hf.num_hidden_layers + layer}."): tensor
            for name, tensor in state.items()
            if name.startswith(base)
        }
    else:
        names = {"final_layernorm": "shared_head.norm"}
    if rest.startswith("transformer_layer."):
        return share(inner + rest.removeprefix("transformer_layer."), state, hf, place, rows)
    kind = rest.removesuffix(".weight")
    whole = state[f"{base}{names.get(kind, kind)}.weight"]
    return whole.chunk(place[1])[place[0]] if kind == "eh_proj" else whole


def _norm_of_heads(whole, hf, place, which, spelling):
    """slime's norm is whole; Megatron-Bridge's has this rank's heads, and where there are fewer key
    heads than ranks, several ranks have the norm of one head."""
    tp_rank, tp, *_ = place
    if spelling == "norm":
        return whole
    parts = min(tp, hf.num_key_value_heads) if which == "k" else tp
    return whole.chunk(parts)[tp_rank // (tp // parts)]


def _norm_behind(module, hf):
    """A norm of what a half of a layer returns, which is (output, no bias)."""
    norm = nn.RMSNorm(hf.hidden_size, hf.rms_norm_eps)
    module.register_forward_hook(lambda _, arguments, found: (norm(found[0]), found[1]))
    return norm


class VisionLanguage(nn.Module):
    """A language model and, on the first stage, a vision tower of transformers beside it."""

    def __init__(self, language_model, tower, place):
        super().__init__()
        self.language_model = language_model
        if tower is not None and place == "vision_model":
            self.vision_model = tower
        elif tower is not None:
            self.model = nn.Module()
            self.model.visual = tower


def tower_of(hf, state):
    """The checkpoint's own vision tower."""
    tower = transformers.AutoModel.from_config(hf).visual
    beginning = "model.visual."
    found = {n.removeprefix(beginning): t for n, t in state.items() if n.startswith(beginning)}
    tower.load_state_dict(found)
    return tower


def attach(chunks, hf, parallel, form):
    """Adds the parameters that Megatron-Core 0.16.1 has no module for."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if hf.model_type == "glm4":
            layer.post_self_attn_layernorm = _norm_behind(layer.self_attention, hf)
            layer.post_mlp_layernorm = _norm_behind(layer.mlp, hf)
        if hf.model_type == "minimax_m2":
            q, k = (hf.head_dim * n for n in (hf.num_attention_heads, hf.num_key_value_heads))
            attention = layer.self_attention
            if form == "slime":
                attention.q_norm, attention.k_norm = nn.RMSNorm(q), nn.RMSNorm(k)
            else:
                attention.q_layernorm = nn.RMSNorm(q // parallel.tp)
                attention.k_layernorm = nn.RMSNorm(k // min(parallel.tp, hf.num_key_value_heads))
