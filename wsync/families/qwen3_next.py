"""Qwen3-Next (qwen3_next), Qwen3.5 (qwen3_5), its mixture of experts (qwen3_5_moe), and Qwen3.6's
(qwen3_6_moe), which differs from that only in its layers of multi-token prediction.

Most layers have a gated delta net for attention, the others attention whose output is gated.
Names and row orders follow transformers (`modeling_qwen3_next.py`, `modeling_qwen3_5.py`),
Megatron-Core's `ssm/gated_delta_net.py` and Megatron-Bridge's `GDNLinearMapping`, and slime's
`megatron_to_hf/qwen3_next.py` and `qwen3_5.py`.  Sizes beside those of blocks.py:

    gk, gdk; gv, gdv    key heads and their channels; value heads and theirs
    gn                  value heads per key head
    conv                taps of the convolution

slime puts transformers' own modules into Megatron's layers: their parameters are the checkpoint's
tensors, whole on every tensor-parallel rank.  Megatron-Core's own module joins what a checkpoint
keeps apart; each rank holds its part of every piece.  Its out_norm counts from zero, the
checkpoint's from one, as long as the trainer's other norms count from zero
(layernorm_zero_centered_gamma), which both sides then share.
"""

from __future__ import annotations

from collections.abc import Iterable

from wsync.families.blocks import (
    ATTENTION_REST,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    HF_LAYER,
    LAYER,
    SHARED_EXPERT,
    attention_rules,
    beside_vision,
    eh_proj,
    layer_rules,
    mtp,
    stacked_experts,
    with_bias,
)
from wsync.families.rules import Rule, Target

_NET = "self_attention."
_HF_NET = f"{HF_LAYER}linear_attn."
_QKV = "*key:gk q:gdk | *key:gk k:gdk | *key:gk vn:gn v:gdv"
_HF_QKV = "(key q | key k | key vn v)"


def _in_proj(*targets: tuple[str, str]) -> Rule:
    """Megatron-Core's six pieces; targets: (name, rows)."""
    return Rule(
        f"{LAYER}{_NET}in_proj.weight",
        f"({_QKV} | *key:gk zn:gn z:gdv | *key:gk b:gn | *key:gk a:gn) h",
        *(Target(f"{_HF_NET}{name}.weight", f"{rows} h") for name, rows in targets),
    )


_GATED_ATTENTION: tuple[Rule, ...] = (
    # Rows per query group: its query heads, their gates, its key head, its value head.  The
    # checkpoint has each query head's gate behind it.
    *with_bias(
        f"{LAYER}self_attention.linear_qkv",
        "*(g (query:1 n | gate:1 n | k:1 | v:1) d)",
        (f"{HF_LAYER}self_attn.q_proj", "(g n (query | gate) d)"),
        (f"{HF_LAYER}self_attn.k_proj", "(g k d)"),
        (f"{HF_LAYER}self_attn.v_proj", "(g v d)"),
    ),
    *ATTENTION_REST,
    # slime's older form: transformers' attention in Megatron's layer.
    *attention_rules(
        ("self_attn.q_proj.weight", "(g n two:2 d) h", "q_proj.weight"),
        ("self_attn.k_proj.weight", "(g d) h", "k_proj.weight"),
        ("self_attn.v_proj.weight", "(g d) h", "v_proj.weight"),
        ("self_attn.o_proj.weight", "h (g n d)", "o_proj.weight"),
        ("self_attn.q_norm.weight", "d", "q_norm.weight"),
        ("self_attn.k_norm.weight", "d", "k_norm.weight"),
    ),
)

_DELTA_NET: tuple[Rule, ...] = (
    Rule(
        f"{LAYER}{_NET}conv1d.weight",
        f"({_QKV}) one:1 conv",
        Target(f"{_HF_NET}conv1d.weight", f"{_HF_QKV} one conv"),
    ),
    Rule(
        f"{LAYER}{_NET}out_norm.weight",
        "gdv",
        Target(f"{_HF_NET}norm.weight", "gdv", offset=1.0),
    ),
    *layer_rules(
        (f"{_NET}A_log", "*gv", "linear_attn.A_log"),
        (f"{_NET}dt_bias", "*gv", "linear_attn.dt_bias"),
        (f"{_NET}out_proj.weight", "h *(gv gdv)", "linear_attn.out_proj.weight"),
        (f"{_NET}in_proj.layer_norm_weight", "h", "input_layernorm.weight"),
        # In slime's form:
        (f"{_NET}input_layernorm.weight", "h", "input_layernorm.weight"),
        *(
            (f"{_NET}linear_attn.{name}", view, f"linear_attn.{name}")
            for name, view in (
                ("conv1d.weight", "(key:gk q:gdk | key:gk k:gdk | gv gdv) one:1 conv"),
                ("norm.weight", "gdv"),
                ("A_log", "gv"),
                ("dt_bias", "gv"),
                ("out_proj.weight", "h (gv gdv)"),
                ("in_proj_qkvz.weight", "(gk (q:gdk | k:gdk | vn:gn v:gdv | zn:gn z:gdv)) h"),
                ("in_proj_ba.weight", "(gk (b:gn | a:gn)) h"),
                ("in_proj_qkv.weight", "(key:gk q:gdk | key:gk k:gdk | gv gdv) h"),
                ("in_proj_z.weight", "(gv gdv) h"),
                ("in_proj_b.weight", "gv h"),
                ("in_proj_a.weight", "gv h"),
            )
        ),
    ),
)
_SHARED = (*_GATED_ATTENTION, *DENSE_MLP, *SHARED_EXPERT)


def _mtp(layer: Iterable[Rule]) -> tuple[Rule, ...]:
    """MTP layers have attention and experts of their own names, whatever the others have."""
    return mtp(
        layer,
        "mtp.layers.{mtp}.",
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
    )


QWEN3_NEXT: tuple[Rule, ...] = (
    *EMBEDDING,
    *_SHARED,
    *EXPERTS,
    *_DELTA_NET,
    _in_proj(("in_proj_qkvz", "(key (q | k | vn v | zn z))"), ("in_proj_ba", "(key (b | a))")),
    *_mtp((*_SHARED, *EXPERTS)),
)
# slime exchanges the halves of eh_proj when it loads Qwen3-Next, though not Qwen3.5.
SLIME_MTP: tuple[Rule, ...] = (eh_proj("mtp.fc", swapped=True),)

_LAYERS_3_5: tuple[Rule, ...] = (
    *EMBEDDING,
    *_SHARED,
    *_DELTA_NET,
    _in_proj(
        ("in_proj_qkv", _HF_QKV),
        ("in_proj_z", "(key zn z)"),
        ("in_proj_b", "(key b)"),
        ("in_proj_a", "(key a)"),
    ),
)
# Of a text model alone, whose experts transformers saves one by one.
QWEN3_5_TEXT: tuple[Rule, ...] = (*_LAYERS_3_5, *EXPERTS, *_mtp((*_SHARED, *EXPERTS)))


def _all_experts(down: Target, *first: Target) -> tuple[Rule, ...]:
    """Experts that are one parameter for each of a layer's projections, as slime's converter knows
    them."""
    name = f"{LAYER}mlp.experts.linear_fc"
    return (
        Rule(f"{name}1", "@experts (*gate:moe_ffn | *up:moe_ffn) h", *first),
        Rule(f"{name}2", "@experts h *moe_ffn", down),
    )


_HF_EXPERTS = f"{HF_LAYER}mlp.experts."
_HF_EXPERT = f"{_HF_EXPERTS}{{experts}}."
# With a vision tower: a checkpoint's experts are fused; those of MTP layers are not in Qwen3.5.
_EXPERTS_FUSED = (
    *stacked_experts("(gate | up) h", "h moe_ffn"),
    *_all_experts(
        Target(f"{_HF_EXPERTS}down_proj", "experts h moe_ffn"),
        Target(f"{_HF_EXPERTS}gate_up_proj", "experts (gate | up) h"),
    ),
)
_EXPERTS_SINGLE = (
    *EXPERTS,
    *_all_experts(
        Target(f"{_HF_EXPERT}down_proj.weight", "h moe_ffn"),
        Target(f"{_HF_EXPERT}gate_proj.weight", "gate h"),
        Target(f"{_HF_EXPERT}up_proj.weight", "up h"),
    ),
)
QWEN3_5, QWEN3_6 = (
    beside_vision((*_LAYERS_3_5, *_EXPERTS_FUSED, *_mtp((*_SHARED, *experts))))
    for experts in (_EXPERTS_SINGLE, _EXPERTS_FUSED)
)
