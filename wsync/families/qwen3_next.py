"""Qwen3-Next (qwen3_next), Qwen3.5 (qwen3_5), its mixture of experts (qwen3_5_moe), and Qwen3.6's
(qwen3_6_moe), which differs only in its layers of multi-token prediction (MTP).

Most layers have a gated delta net; the others have attention with a gated output.
Names and row orders follow transformers (`modeling_qwen3_next.py`, `modeling_qwen3_5.py`),
Megatron-Core's `ssm/gated_delta_net.py` and Megatron-Bridge's `GDNLinearMapping`, and slime's
`megatron_to_hf/qwen3_next.py` and `qwen3_5.py`.  Sizes in addition to those of blocks.py:

    gk, gdk; gv, gdv    key heads, channels of each; value heads, channels of each
    gn                  value heads per key head
    conv                taps of the convolution

slime puts transformers' own modules into Megatron's layers: their parameters are the checkpoint's
tensors, whole on every tensor-parallel rank.  Megatron-Core's own module joins tensors that a
checkpoint keeps apart; each rank holds its part of every joined tensor.  The trainer needs
layernorm_zero_centered_gamma: then norms count from zero, as in the checkpoint.  Only the
checkpoint's norm of the delta net (Megatron-Core's out_norm) counts from one.
"""

from __future__ import annotations

import functools

from wsync.families import blocks
from wsync.families.rules import Rule, Target

_QKV = "*key:gk q:gdk | *key:gk k:gdk | *key:gk vn:gn v:gdv"
_HF_QKV = "(key q | key k | key vn v)"
_WHOLE_QKV = "(key:gk q:gdk | key:gk k:gdk | gv gdv)"
_QKVZ = "(gk (q:gdk | k:gdk | vn:gn v:gdv | zn:gn z:gdv)) h"


def _net_rules(*rows: tuple[str, ...]) -> tuple[Rule, ...]:
    return blocks.layer_rules(*rows, part="self_attention.", target="linear_attn.")


# the six tensors that Megatron-Core joins
_IN_PROJ = ("in_proj.weight", f"({_QKV} | *key:gk zn:gn z:gdv | *key:gk b:gn | *key:gk a:gn) h")
_GATED_ATTENTION: tuple[Rule, ...] = (
    # Rows per query group: its query heads, their gates, its key head, its value head.  The
    # checkpoint puts each gate after its query head.
    *blocks.attention_rules(
        *blocks.linear(
            "linear_qkv",
            "*(g (query:1 n | gate:1 n | k:1 | v:1) d)",
            "h",
            "q_proj (g n (query | gate) d)",
            "k_proj (g k d)",
            "v_proj (g v d)",
        ),
        # slime's older form: transformers' attention in Megatron's layer.
        ("self_attn.q_proj.weight", "(g n two:2 d) h", "q_proj.weight"),
        ("self_attn.k_proj.weight", "(g d) h", "k_proj.weight"),
        ("self_attn.v_proj.weight", "(g d) h", "v_proj.weight"),
        ("self_attn.o_proj.weight", "h (g n d)", "o_proj.weight"),
        ("self_attn.q_norm.weight", "d", "q_norm.weight"),
        ("self_attn.k_norm.weight", "d", "k_norm.weight"),
    ),
    *blocks.ATTENTION_REST,
)

_DELTA_NET: tuple[Rule, ...] = (
    Rule(
        f"{blocks.LAYER}self_attention.out_norm.weight",
        "gdv",
        Target(f"{blocks.HF_LAYER}linear_attn.norm.weight", "gdv", offset=1.0),
    ),
    *_net_rules(
        ("conv1d.weight", f"({_QKV}) one:1 conv", f"conv1d.weight {_HF_QKV} one conv"),
        ("A_log", "*gv", "A_log"),
        ("dt_bias", "*gv", "dt_bias"),
        ("out_proj.weight", "h *(gv gdv)", "out_proj.weight"),
    ),
    *blocks.layer_rules(
        ("(input_layernorm.|in_proj.layer_norm_)weight", "h", "input_layernorm.weight"),
        # slime's form
        ("linear_attn.conv1d.weight", f"{_WHOLE_QKV} one:1 conv", "linear_attn.conv1d.weight"),
        ("linear_attn.norm.weight", "gdv", "linear_attn.norm.weight"),
        ("linear_attn.A_log", "gv", "linear_attn.A_log"),
        ("linear_attn.dt_bias", "gv", "linear_attn.dt_bias"),
        ("linear_attn.out_proj.weight", "h (gv gdv)", "linear_attn.out_proj.weight"),
        ("linear_attn.in_proj_qkvz.weight", _QKVZ, "linear_attn.in_proj_qkvz.weight"),
        ("linear_attn.in_proj_ba.weight", "(gk (b:gn | a:gn)) h", "linear_attn.in_proj_ba.weight"),
        ("linear_attn.in_proj_qkv.weight", f"{_WHOLE_QKV} h", "linear_attn.in_proj_qkv.weight"),
        ("linear_attn.in_proj_z.weight", "(gv gdv) h", "linear_attn.in_proj_z.weight"),
        ("linear_attn.in_proj_b.weight", "gv h", "linear_attn.in_proj_b.weight"),
        ("linear_attn.in_proj_a.weight", "gv h", "linear_attn.in_proj_a.weight"),
        part="self_attention.",
    ),
)
_SHARED = (*_GATED_ATTENTION, *blocks.DENSE_MLP, *blocks.SHARED_EXPERT)


# MTP layers have attention, never a delta net, and prefixes of their own.
_MTP = functools.partial(
    blocks.mtp,
    inner="mtp.layers.{mtp}.",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
)

QWEN3_NEXT: tuple[Rule, ...] = (
    *blocks.EMBEDDING,
    *_SHARED,
    *blocks.EXPERTS,
    *_DELTA_NET,
    *_net_rules(
        (
            *_IN_PROJ,
            "in_proj_qkvz.weight (key (q | k | vn v | zn z)) h",
            "in_proj_ba.weight (key (b | a)) h",
        )
    ),
    *_MTP((*_SHARED, *blocks.EXPERTS)),
)
# slime exchanges the halves of eh_proj when it loads Qwen3-Next, but not for Qwen3.5.
SLIME_MTP: tuple[Rule, ...] = (blocks.eh_proj("mtp.fc", swapped=True),)

_LAYERS_3_5: tuple[Rule, ...] = (
    *blocks.EMBEDDING,
    *_SHARED,
    *_DELTA_NET,
    *_net_rules(
        (
            *_IN_PROJ,
            f"in_proj_qkv.weight {_HF_QKV} h",
            "in_proj_z.weight (key zn z) h",
            "in_proj_b.weight (key b) h",
            "in_proj_a.weight (key a) h",
        )
    ),
)
# A text model without a vision tower; transformers saves its experts one by one.
QWEN3_5_TEXT: tuple[Rule, ...] = (*_LAYERS_3_5, *blocks.EXPERTS, *_MTP((*_SHARED, *blocks.EXPERTS)))


# With a vision tower, a checkpoint's experts are fused, except those of Qwen3.5's MTP layers.
_FUSED = blocks.stacked_experts("(gate | up) h", "h moe_ffn")
QWEN3_5, QWEN3_6 = (
    blocks.beside_vision((*_LAYERS_3_5, *_FUSED, *_MTP((*_SHARED, *experts))))
    for experts in (blocks.EXPERTS, _FUSED)
)
