"""Qwen3-VL (qwen3_vl) and its mixture of experts (qwen3_vl_moe).

Names follow transformers 4.57 (`modeling_qwen3_vl_moe.py`), slime's `megatron_to_hf/qwen3_vl.py`
and Megatron-Bridge's `qwen3_vl_bridge.py`.  The layers are those of Qwen3; a checkpoint's experts
are fused and transposed.
"""

from __future__ import annotations

from wsync.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    beside_vision,
    stacked_experts,
)

__all__ = ["QWEN3_VL", "QWEN3_VL_MOE", "VISION"]


# The vision tower is transformers' own module, whole on every rank of the first stage.  That of
# Megatron-Bridge consists of Megatron's layers (vision_model.decoder), which have no rules.
VISION = {
    r"vision_model\.(?!decoder\.)": "model.visual.",
    r"(model\.)?visual\.": "model.visual.",
}
QWEN3_VL = beside_vision((*EMBEDDING, *ATTENTION, *DENSE_MLP))
QWEN3_VL_MOE = (*QWEN3_VL, *beside_vision(stacked_experts("h (gate | up)", "moe_ffn h")))
