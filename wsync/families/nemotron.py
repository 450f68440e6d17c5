"""Nemotron-H, Nemotron Nano 2 and 3, and Super 3 (nemotron_h).

Names and row orders follow transformers 5 (`modeling_nemotron_h.py`), Megatron-Core's
`ssm/mamba_mixer.py` and Megatron-Bridge's `nemotron_h_bridge.py`.  A layer has a norm and one of
four parts, none of them gated: Mamba 2, attention, a feed-forward part, or experts.  Sizes in
addition to those of blocks.py:

    mh, md    heads of Mamba, and channels of each
    mg, ms    groups that share a state's input and output, and channels of a state
    conv      taps of the convolution
"""

from __future__ import annotations

from wsync.families import blocks
from wsync.families.rules import Rule

FIELDS = {
    "d": ("head_dim", "attention_head_dim", "kv_channels"),
    "mh": ("mamba_num_heads",),
    "md": ("mamba_head_dim",),
    "mg": ("n_groups", "mamba_num_groups"),
    "ms": ("ssm_state_size", "mamba_state_dim"),
    "conv": ("conv_kernel",),
}
# The rows that a Mamba layer convolves.  Each rank holds the part of its heads or groups; the same
# holds for z and dt.
_X_B_C = "*mh md | b:1 *mg ms | c:1 *mg ms"
_HF_X_B_C = "mh md | b mg ms | c mg ms"

_LAYER: tuple[Rule, ...] = (
    *blocks.layer_rules(
        (
            "in_proj.weight",
            f"(z:1 *mh md | {_X_B_C} | *mh) h",
            f"in_proj.weight (z mh md | {_HF_X_B_C} | mh) h",
        ),
        # conv1d is a module up to Megatron-Core 0.16; later the layer has two parameters instead
        ("conv1d(.|_)weight", f"({_X_B_C}) one:1 conv", f"conv1d.weight ({_HF_X_B_C}) one conv"),
        ("conv1d(.|_)bias", f"({_X_B_C})", f"conv1d.bias ({_HF_X_B_C})"),
        ("A_log", "*mh", "A_log"),
        ("D", "*mh", "D"),
        ("dt_bias", "*mh", "dt_bias"),
        ("norm.weight", "*(mh md)", "norm.weight"),
        ("out_proj.weight", "h *(mh md)", "out_proj.weight"),
        part="mixer.",
        target="mixer.",
    ),
    *blocks.layer_rules(
        ("linear_fc1.weight", "*ffn h", "up_proj.weight"),
        ("linear_fc2.weight", "h *ffn", "down_proj.weight"),
        ("shared_experts.linear_fc1.weight", "*shared_ffn h", "shared_experts.up_proj.weight"),
        ("shared_experts.linear_fc2.weight", "h *shared_ffn", "shared_experts.down_proj.weight"),
        ("router.weight", "experts h", "gate.weight"),
        ("router.expert_bias", "experts", "gate.e_score_correction_bias"),
        ("fc1_latent_proj.weight", "latent:? h", "fc1_latent_proj.weight"),
        ("fc2_latent_proj.weight", "h latent:?", "fc2_latent_proj.weight"),
        part="mlp.",
        target="mixer.",
    ),
    # Experts read and write either the model's channels or a latent space's (moe_latent_size).
    *blocks.layer_rules(
        (blocks.expert_names("linear_fc1.weight"), "*moe_ffn channels:?", "up_proj.weight"),
        (blocks.expert_names("linear_fc2.weight"), "channels:? *moe_ffn", "down_proj.weight"),
        target="mixer.experts.{expert}.",
    ),
    *blocks.moved(blocks.QKV[:1], ("", ""), ("self_attn.", "mixer.")),
    *blocks.layer_rules(
        ("self_attention.linear_proj.weight", "h *(g n d)", "mixer.o_proj.weight"),
        ("(norm.|mixer.in_proj.layer_norm_)weight", "h", "norm.weight"),
        (f"{blocks.ATTENTION_NORM}weight", "h", "norm.weight"),
        (f"{blocks.MLP_NORM}weight", "h", "norm.weight"),
    ),
)
_MTP = "mtp.layers."
NEMOTRON_H: tuple[Rule, ...] = (
    *blocks.embedding("backbone.embeddings", "backbone.norm_f"),
    *blocks.moved(_LAYER, ("", ""), ("model.", "backbone.")),
    # The checkpoint counts the layers of all MTP blocks.  A block's other tensors have the number
    # of its first or last layer.
    *blocks.mtp(
        _LAYER,
        f"{_MTP}{{inner}}.",
        within="layers.{inner}.",
        enorm=f"{_MTP}{{first}}.enorm",
        hnorm=f"{_MTP}{{first}}.hnorm",
        projection=f"{_MTP}{{first}}.eh_proj",
        norm=f"{_MTP}{{last}}.final_layernorm",
    ),
)
