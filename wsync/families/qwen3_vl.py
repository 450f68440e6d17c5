"""Qwen3-VL (qwen3_vl), its mixture of experts (qwen3_vl_moe), and the vision tower of Qwen3.5.

Names follow transformers 4.57 (`modeling_qwen3_vl_moe.py`), slime's `megatron_to_hf/qwen3_vl.py`
and Megatron-Bridge's `qwen3_vl_bridge.py`.  The layers are those of Qwen3; a checkpoint's experts
are fused and transposed.  The vision tower has these sizes in addition to those of blocks.py:

    vision_h, vision_heads, vision_ffn
    merge       patches along each side that are merged into one
    vision_out  channels that the merger returns: the text model's h
"""

from __future__ import annotations

from wsync.families import blocks
from wsync.families.rules import Rule

# The vision tower is either transformers' module, whole on every rank of the first stage, or
# Megatron-Bridge's module, whose renamed or cut parameters have rules below.
VISION = {
    r"vision_model\.(?!decoder\.)": "model.visual.",
    r"(model\.)?visual\.": "model.visual.",
}
VISION_FIELDS = {
    "vision_h": ("vision_config.hidden_size",),
    "vision_heads": ("vision_config.num_heads",),
    "vision_ffn": ("vision_config.intermediate_size",),
    "vision_out": ("vision_config.out_hidden_size",),
    "merge": ("vision_config.spatial_merge_size",),
}


def _norms(names: str, view: str, target: str) -> list[blocks.Row]:
    return [(f"{names}{kind}", view, f"{target}.{kind}") for kind in ("weight", "bias")]


def _merger(cut: str) -> list[blocks.Row]:
    """A projection of merged patches.  cut: the mark of the dimensions that may be cut."""
    inner = f"{cut}(d:merge e:merge f:vision_h)"
    return [
        *blocks.linear("linear_fc1", inner, "(a:merge b:merge c:vision_h)", "linear_fc1"),
        *blocks.linear("linear_fc2", "vision_out", inner, "linear_fc2"),
        *_norms("patch_norm.", "rows:?", "norm"),
    ]


_DEEPSTACK = "deepstack_merger_list.{vision}."
TOWER: tuple[Rule, ...] = (
    *blocks.rules(
        "vision_model.decoder.layers.{vision}.",
        "model.visual.blocks.{vision}.",
        # Rows per head: its query, its key, its value; the checkpoint has all queries first.
        *blocks.linear(
            "self_attention.linear_qkv",
            "*(vision_heads (q:1 | k:1 | v:1) d:?)",
            "vision_h",
            "attn.qkv (q vision_heads d | k vision_heads d | v vision_heads d)",
        ),
        *blocks.linear(
            "self_attention.linear_proj", "vision_h", "*(vision_heads d:?)", "attn.proj"
        ),
        *blocks.linear("mlp.linear_fc1", "*vision_ffn", "vision_h", "mlp.linear_fc1"),
        *blocks.linear("mlp.linear_fc2", "vision_h", "*vision_ffn", "mlp.linear_fc2"),
        *_norms(blocks.ATTENTION_NORM, "vision_h", "norm1"),
        *_norms(blocks.MLP_NORM, "vision_h", "norm2"),
    ),
    *blocks.rules(
        f"vision_model.decoder.{_DEEPSTACK}", f"model.visual.{_DEEPSTACK}", *_merger("*")
    ),
    # transformers' merger has the same names, but every rank holds it whole
    *blocks.rules("vision_model.merger.", "model.visual.merger.", *_merger("~")),
)
_TEXT = (*blocks.EMBEDDING, *blocks.ATTENTION, *blocks.DENSE_MLP)
_EXPERTS = blocks.stacked_experts("h (gate | up)", "moe_ffn h")
QWEN3_VL = (*blocks.beside_vision(_TEXT), *TOWER)
QWEN3_VL_MOE = (*QWEN3_VL, *blocks.beside_vision(_EXPERTS))
