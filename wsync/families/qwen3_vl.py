"""Qwen3-VL (qwen3_vl) and its mixture of experts (qwen3_vl_moe); the vision tower of Qwen3.5, too.

Names follow transformers 4.57 (`modeling_qwen3_vl_moe.py`), slime's `megatron_to_hf/qwen3_vl.py`
and Megatron-Bridge's `qwen3_vl_bridge.py`.  The layers are those of Qwen3; a checkpoint's experts
are fused and transposed.  Sizes of the vision tower beside those of blocks.py:

    vision_h, vision_heads, vision_ffn
    merge       patches along each side that are merged into one
    vision_out  what the merger gives, which is the text model's h
"""

from __future__ import annotations

from wsync.families import blocks
from wsync.families.rules import Rule

# The vision tower is transformers' own module, whole on every rank of the first stage, or
# Megatron-Bridge's, of which the rules below know what has another name or is cut.
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
_LAYER = "vision_model.decoder.layers.{vision}."
_BLOCK = "model.visual.blocks.{vision}."


def _norms(names: str, view: str, target: str) -> tuple[Rule, ...]:
    kinds = ("weight", "bias")
    return tuple(blocks.renamed(f"{names}{kind}", view, f"{target}.{kind}") for kind in kinds)


def _merger(name: str, target: str, cut: str) -> tuple[Rule, ...]:
    """A projection of merged patches; cut: how its dimensions are marked that ranks hold parts
    of."""
    inner = f"{cut}(d:merge e:merge f:vision_h)"
    merged = "(a:merge b:merge c:vision_h)"
    return (
        *blocks.linear(f"{name}.linear_fc1", inner, merged, f"{target}.linear_fc1"),
        *blocks.linear(f"{name}.linear_fc2", "vision_out", inner, f"{target}.linear_fc2"),
        *_norms(f"{name}.patch_norm.", "rows:?", f"{target}.norm"),
    )


_PROJ = f"{_LAYER}self_attention.linear_proj"
TOWER: tuple[Rule, ...] = (
    # Rows per head: its query, its key, its value; the checkpoint has all queries first.
    *blocks.linear(
        f"{_LAYER}self_attention.linear_qkv",
        "*(vision_heads (q:1 | k:1 | v:1) d:?)",
        "vision_h",
        f"{_BLOCK}attn.qkv (q vision_heads d | k vision_heads d | v vision_heads d)",
    ),
    *blocks.linear(_PROJ, "vision_h", "*(vision_heads d:?)", f"{_BLOCK}attn.proj"),
    *blocks.linear(f"{_LAYER}mlp.linear_fc1", "*vision_ffn", "vision_h", f"{_BLOCK}mlp.linear_fc1"),
    *blocks.linear(f"{_LAYER}mlp.linear_fc2", "vision_h", "*vision_ffn", f"{_BLOCK}mlp.linear_fc2"),
    *_norms(
        f"{_LAYER}(input_layernorm.|self_attention.linear_qkv.layer_norm_)",
        "vision_h",
        f"{_BLOCK}norm1",
    ),
    *_norms(
        f"{_LAYER}(pre_mlp_layernorm.|mlp.linear_fc1.layer_norm_)", "vision_h", f"{_BLOCK}norm2"
    ),
    *_merger(
        "vision_model.decoder.deepstack_merger_list.{vision}",
        "model.visual.deepstack_merger_list.{vision}",
        "*",
    ),
    # transformers' own has these names, too, and is whole
    *_merger("vision_model.merger", "model.visual.merger", "~"),
)
QWEN3_VL = (
    *blocks.beside_vision((*blocks.EMBEDDING, *blocks.ATTENTION, *blocks.DENSE_MLP)),
    *TOWER,
)
QWEN3_VL_MOE = (
    *QWEN3_VL,
    *blocks.beside_vision(blocks.stacked_experts("h (gate | up)", "moe_ffn h")),
)
