"""Tiny checkpoints of Qwen3-Next and Qwen3.5, and what a Megatron rank must hold of them.

Plain torch on whole tensors: `plain` takes a checkpoint apart into pieces that have one meaning
each, `share` puts a rank's parts of them together, after transformers' and Megatron-Core's modules;
both share nothing with wsync's rules.
"""

import types
import zlib

import torch
import transformers
from support import megatron_reference as reference
from torch import nn

SMALL = {
    **reference.SMALL,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
MOE = {
    **reference.EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}


def config(family, **changes):
    """A configuration; transformers 4 has no classes of Qwen3.5."""
    made = transformers.Qwen3NextConfig(**{**SMALL, **MOE, **changes})
    mtp = changes.pop("mtp_num_hidden_layers", 0)
    if family == "qwen3_next":
        made.mtp_num_hidden_layers = mtp
        return made
    known = {**SMALL, **changes, "layer_types": made.layer_types, "mtp_num_hidden_layers": mtp}
    if "moe" in family:
        known |= MOE | {"mlp_only_layers": []}
    known |= {"model_type": family, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    text = types.SimpleNamespace(**known)
    if family.endswith("_text"):
        return text
    return types.SimpleNamespace(model_type=family, text_config=text)


def text_of(hf):
    return getattr(hf, "text_config", hf)


def linear(hf):
    """1 for each layer with a delta net, 0 for each with attention."""
    return [int(kind == "linear_attention") for kind in hf.layer_types]


def options(hf, native):
    """What Megatron's configuration has beside what megatron_cpu.build reads."""
    found = {"attention_output_gate": True, "qk_layernorm": True}
    if native:
        found |= {name: getattr(hf, name) for name in SMALL if name.startswith("linear_")} | {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": linear(hf),
            "layernorm_zero_centered_gamma": True,
        }
    if hf.mtp_num_hidden_layers:
        found["mtp_num_layers"] = hf.mtp_num_hidden_layers
    return found


def _sizes(hf):
    key, value = hf.linear_key_head_dim, hf.linear_value_head_dim
    each = hf.linear_num_value_heads // hf.linear_num_key_heads
    return key, value, each, hf.linear_num_key_heads


def _net_shapes(hf, flat):
    key, value, each, heads = _sizes(hf)
    h, keys, values = hf.hidden_size, key * heads, value * each * heads
    count = each * heads
    found = {
        "dt_bias": (count,),
        "A_log": (count,),
        "conv1d.weight": (2 * keys + values, 1, hf.linear_conv_kernel_dim),
        "norm.weight": (value,),
        "out_proj.weight": (h, values),
    }
    if flat:
        rows = {"qkv": 2 * keys + values, "z": values, "b": count, "a": count}
    else:
        rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * count}
    return found | {f"in_proj_{name}.weight": (n, h) for name, n in rows.items()}


def _mlp_shapes(hf, dense, fused):
    h = hf.hidden_size

    def gated(prefix, ffn):
        pairs = (("gate", (ffn, h)), ("up", (ffn, h)), ("down", (h, ffn)))
        return {f"{prefix}{name}_proj.weight": shape for name, shape in pairs}

    if dense:
        return gated("mlp.", hf.intermediate_size)
    count, ffn = hf.num_experts, hf.moe_intermediate_size
    found = {
        "mlp.gate.weight": (count, h),
        "mlp.shared_expert_gate.weight": (1, h),
        **gated("mlp.shared_expert.", hf.shared_expert_intermediate_size),
    }
    if fused:
        found["mlp.experts.gate_up_proj"] = (count, 2 * ffn, h)
        found["mlp.experts.down_proj"] = (count, h, ffn)
        return found
    return found | {
        name: shape
        for expert in range(count)
        for name, shape in gated(f"mlp.experts.{expert}.", ffn).items()
    }


def _layer_shapes(hf, net, dense, *, flat=False, fused=False):
    h, head = hf.hidden_size, hf.head_dim
    q, kv = hf.num_attention_heads * head, hf.num_key_value_heads * head
    found = {f"{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
    if net:
        found |= {f"linear_attn.{name}": s for name, s in _net_shapes(hf, flat).items()}
    else:
        rows = {"q_proj": (2 * q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        rows |= {"q_norm": (head,), "k_norm": (head,)}
        found |= {f"self_attn.{name}.weight": shape for name, shape in rows.items()}
    return found | _mlp_shapes(hf, dense, fused)


def shapes(hf):
    """{name: shape} of a checkpoint."""
    text = text_of(hf)
    whole, h = hf.model_type, text.hidden_size
    base = "model.language_model." if text is not hf else "model."
    flat, moe = whole != "qwen3_next", "num_experts" in vars(text)
    found = {f"{base}embed_tokens.weight": (text.vocab_size, h), f"{base}norm.weight": (h,)}
    found["lm_head.weight"] = (text.vocab_size, h)
    for layer, net in enumerate(linear(text)):
        dense = not moe or layer in text.mlp_only_layers
        inner = _layer_shapes(text, net, dense, flat=flat, fused=text is not hf)
        found |= {f"{base}layers.{layer}.{name}": shape for name, shape in inner.items()}
    for layer in range(text.mtp_num_hidden_layers):
        inner = _layer_shapes(text, 0, not moe)
        found |= {f"mtp.layers.{layer}.{name}": shape for name, shape in inner.items()}
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        found |= {f"mtp.{name}.weight": (h,) for name in names} | {"mtp.fc.weight": (h, 2 * h)}
    return found


def checkpoint(hf):
    """{name: tensor}, every element its own; norms so near to 1 that taking 1 off loses nothing."""
    found = {}
    for name, shape in shapes(hf).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator) * 0.2
        found[name] = 0.75 + torch.rand(shape, generator=generator) if "norm" in name else values
    return found


def _pieces(state, base, hf):
    """The rows of a delta net's projections by meaning, whole, heads in order."""
    key, value, each, heads = _sizes(hf)
    if f"{base}in_proj_qkv.weight" in state:
        keys = key * heads
        q, k, v = state[f"{base}in_proj_qkv.weight"].split([keys, keys, value * each * heads])
        z, b, a = (state[f"{base}in_proj_{name}.weight"] for name in "zba")
        return [q, k, v, z, b, a]
    rows = state[f"{base}in_proj_qkvz.weight"].view(heads, -1, hf.hidden_size)
    qkvz = rows.split([key, key, each * value, each * value], 1)
    rows = state[f"{base}in_proj_ba.weight"].view(heads, -1, hf.hidden_size)
    return [part.reshape(-1, hf.hidden_size) for part in (*qkvz, *rows.split([each, each], 1))]


def plain(state, hf):
    """A checkpoint under the names of Qwen3-Next, experts one by one, MTP layers behind others."""
    text, found = text_of(hf), {}
    for name, tensor in state.items():
        name = name.replace("model.language_model.", "model.")
        if name.startswith("mtp.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"model.layers.{text.num_hidden_layers + int(layer)}.{rest}"
        found[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, part in enumerate(tensor):
            parts = part.chunk(2) if kind == "gate_up_proj" else (part,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for one, value in zip(kinds, parts, strict=True):
                found[f"{prefix}.{expert}.{one}.weight"] = value
    return found


def _gated_qkv(state, base, hf):
    head, groups = hf.head_dim, hf.num_key_value_heads
    q = state[f"{base}q_proj.weight"].view(groups, -1, 2, head, hf.hidden_size)
    k, v = (state[f"{base}{x}_proj.weight"].view(groups, 1, head, hf.hidden_size) for x in "kv")
    return torch.cat([q[:, :, 0], q[:, :, 1], k, v], 1).reshape(-1, hf.hidden_size)


def share(name, state, hf, place, padded, swapped=False):
    """The tensor that a rank holds under a global Megatron name; `state` is a plain one."""
    rank, ranks = place[:2]
    outer = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    outer["final_layernorm"] = "norm"
    if name.startswith("mtp.layers."):
        _, _, layer, inner, rest = name.split(".", 4)
        if inner in outer:
            return state[f"mtp.{outer[inner]}.weight"]
        if inner == "eh_proj":
            fc = state["mtp.fc.weight"]
            fc = torch.cat(fc.chunk(2, 1)[::-1], 1) if swapped else fc
            return fc.chunk(ranks)[rank]
        name = f"decoder.layers.{hf.num_hidden_layers + int(layer)}.{rest}"
    if not name.startswith("decoder.layers."):
        return reference.share(name, state, hf, place, padded)
    _, _, layer, rest = name.split(".", 3)
    base = f"model.layers.{layer}."
    net = f"{base}linear_attn."
    rest = rest.removeprefix("self_attention.")
    key, value, each, heads = _sizes(hf)
    if rest == "linear_qkv.weight":
        return _gated_qkv(state, f"{base}self_attn.", hf).chunk(ranks)[rank]
    if rest == "in_proj.weight":
        return torch.cat([part.chunk(ranks)[rank] for part in _pieces(state, net, hf)])
    if rest == "conv1d.weight":
        parts = state[f"{net}conv1d.weight"].split([key * heads] * 2 + [value * each * heads])
        return torch.cat([part.chunk(ranks)[rank] for part in parts])
    if rest in ("A_log", "dt_bias"):
        return state[net + rest].chunk(ranks)[rank]
    if rest == "out_norm.weight":
        return state[f"{net}norm.weight"] - 1.0
    if rest == "out_proj.weight":
        return state[f"{net}out_proj.weight"].chunk(ranks, 1)[rank]
    if rest in ("in_proj.layer_norm_weight", "input_layernorm.weight"):
        return state[f"{base}input_layernorm.weight"]
    if rest.startswith(("linear_attn.", "self_attn.")):
        return state[base + rest]
    return reference.share(name, state, hf, place, padded)


class _Replicated(nn.Module):
    """Parameters of given names and shapes, as a transformers module has them."""

    def __init__(self, shapes, dtype):
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            home = self
            for part in path:
                if part not in home._modules:
                    home.add_module(part, nn.Module())
                home = home._modules[part]
            home.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype)))


def attach(chunks, hf, flat, dtype):
    """slime's form: what stands for its delta nets has their names and whole shapes."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if linear(hf)[layer.layer_number - 1]:
                nets = {f"linear_attn.{n}": shape for n, shape in _net_shapes(hf, flat).items()}
                nets["input_layernorm.weight"] = (hf.hidden_size,)
                layer.self_attention = _Replicated(nets, dtype)
                layer.input_layernorm = nn.Identity()
