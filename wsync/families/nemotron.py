"""Nemotron-H, Nemotron Nano 2 and 3, and Super 3 (nemotron_h).

Names and row orders follow transformers 5 (`modeling_nemotron_h.py`), Megatron-Core's
`ssm/mamba_mixer.py` and Megatron-Bridge's `nemotron_h_bridge.py`.  A layer has one norm, and one
of Mamba 2, attention, a feed-forward part, or experts, none of them gated.  Sizes beside those of
blocks.py:

    mh, md    heads of Mamba, and channels of each
    mg, ms    groups that share a state's input and output, and channels of a state
    conv      taps of the convolution
"""

from __future__ import annotations

from wsync.families.blocks import (
    HF_LAYER,
    LAYER,
    QKV,
    expert_names,
    layer_rules,
    moved,
    mtp,
    renamed,
    vocabulary,
)
from wsync.families.rules import Rule, Target

NEMOTRON_FIELDS = {
    "d": ("head_dim", "attention_head_dim", "kv_channels"),
    "mh": ("mamba_num_heads",),
    "md": ("mamba_head_dim",),
    "mg": ("n_groups", "mamba_num_groups"),
    "ms": ("ssm_state_size", "mamba_state_dim"),
    "conv": ("conv_kernel",),
}
_NORM_NAMES = (
    "mixer.in_proj.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "norm.weight",
    "pre_mlp_layernorm.weight",
    "input_layernorm.weight",
)
# What a Mamba layer convolves.  Of it, and of z and dt, each rank holds the part of its heads or
# groups.
_X_B_C = "*mh md | b:1 *mg ms | c:1 *mg ms"
_HF_X_B_C = "mh md | b mg ms | c mg ms"

_MAMBA: tuple[Rule, ...] = (
    Rule(
        f"{LAYER}mixer.in_proj.weight",
        f"(z:1 *mh md | {_X_B_C} | *mh) h",
        Target(f"{HF_LAYER}mixer.in_proj.weight", f"(z mh md | {_HF_X_B_C} | mh) h"),
    ),
    *(
        Rule(
            f"{LAYER}mixer.conv1d{join}{kind}",
            f"({_X_B_C}){taps}",
            Target(f"{HF_LAYER}mixer.conv1d.{kind}", f"({_HF_X_B_C}){taps.replace(':1', '')}"),
        )
        for kind, taps in (("weight", " one:1 conv"), ("bias", ""))
        for join in "._"  # parts of a module up to Megatron-Core 0.16, parameters later
    ),
    *layer_rules(
        ("mixer.A_log", "*mh", "mixer.A_log"),
        ("mixer.D", "*mh", "mixer.D"),
        ("mixer.dt_bias", "*mh", "mixer.dt_bias"),
        ("mixer.norm.weight", "*(mh md)", "mixer.norm.weight"),
        ("mixer.out_proj.weight", "h *(mh md)", "mixer.out_proj.weight"),
    ),
)


def _feed_forward(part: str, size: str) -> tuple[Rule, ...]:
    """Two linear layers without a gate."""
    return layer_rules(
        (f"mlp.{part}linear_fc1.weight", f"*{size} h", f"mixer.{part}up_proj.weight"),
        (f"mlp.{part}linear_fc2.weight", f"h *{size}", f"mixer.{part}down_proj.weight"),
    )


_EXPERTS: tuple[Rule, ...] = (
    *_feed_forward("shared_experts.", "shared_ffn"),
    *layer_rules(
        ("mlp.router.weight", "experts h", "mixer.gate.weight"),
        ("mlp.router.expert_bias", "experts", "mixer.gate.e_score_correction_bias"),
        ("mlp.fc1_latent_proj.weight", "latent:? h", "mixer.fc1_latent_proj.weight"),
        ("mlp.fc2_latent_proj.weight", "h latent:?", "mixer.fc2_latent_proj.weight"),
    ),
    # Experts read and write the model's channels, or fewer of a latent space (moe_latent_size).
    *(
        renamed(name, view, f"{HF_LAYER}mixer.experts.{{expert}}.{target}.weight")
        for linear, view, target in (
            ("linear_fc1.weight", "*moe_ffn channels:?", "up_proj"),
            ("linear_fc2.weight", "channels:? *moe_ffn", "down_proj"),
        )
        for name in expert_names(linear)
    ),
)
_LAYER: tuple[Rule, ...] = (
    *_MAMBA,
    *_feed_forward("", "ffn"),
    *_EXPERTS,
    *moved(QKV[:1], ("", ""), ("self_attn.", "mixer.")),
    *layer_rules(
        ("self_attention.linear_proj.weight", "h *(g n d)", "mixer.o_proj.weight"),
        *((name, "h", "norm.weight") for name in _NORM_NAMES),
    ),
)
_MTP = "mtp.layers."
NEMOTRON_H: tuple[Rule, ...] = (
    vocabulary("embedding.word_embeddings.weight", "backbone.embeddings.weight"),
    vocabulary("output_layer.weight", "lm_head.weight"),
    renamed("decoder.final_norm.weight", "h", "backbone.norm_f.weight"),
    renamed("decoder.final_layernorm.weight", "h", "backbone.norm_f.weight"),
    *moved(_LAYER, ("", ""), ("model.", "backbone.")),
    # The checkpoint counts the layers of all MTP blocks; what a block has besides is with its first
    # and last one.
    *mtp(
        _LAYER,
        f"{_MTP}{{inner}}.",
        within="layers.{inner}.",
        enorm=f"{_MTP}{{first}}.enorm",
        hnorm=f"{_MTP}{{first}}.hnorm",
        projection=f"{_MTP}{{first}}.eh_proj",
        norm=f"{_MTP}{{last}}.final_layernorm",
    ),
)
