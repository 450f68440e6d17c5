"""Qwen3-VL (qwen3_vl) and its mixture of experts (qwen3_vl_moe).

Names follow transformers 4.57 (`modeling_qwen3_vl_moe.py`), slime's `megatron_to_hf/qwen3_vl.py`
and Megatron-Bridge's `qwen3_vl_bridge.py`.  The layers are those of Qwen3; a checkpoint's experts
are fused and transposed.
"""

from __future__ import annotations

from collections.abc import Iterable

from wsync.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    layer_rules,
    moved,
    stacked_experts,
)
from wsync.families.rules import Rule

__all__ = ["QWEN3_VL", "QWEN3_VL_MOE", "VISION"]


def _text(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules of the language model, with and without the name that a wrapper gives it."""
    rules = tuple(rules)
    target = ("model.", "model.language_model.")
    return (*moved(rules, ("", "language_model."), target), *moved(rules, ("", ""), target))


# The vision tower is transformers' own module, whole on every rank of the first stage.  That of
# Megatron-Bridge consists of Megatron's layers (vision_model.decoder), which have no rules.
VISION = {
    r"vision_model\.(?!decoder\.)": "model.visual.",
    r"(model\.)?visual\.": "model.visual.",
}
QWEN3_VL = _text((*EMBEDDING, *ATTENTION, *DENSE_MLP))
QWEN3_VL_MOE = (
    *QWEN3_VL,
    *_text(
        (
            *layer_rules(("mlp.router.weight", "experts h", "mlp.gate.weight")),
            *stacked_experts("h (gate | up)", "moe_ffn h"),
        )
    ),
)
