"""MiMo-7B (mimo): Qwen2's layers, and layers of multi-token prediction of its own.

Names follow Megatron-Bridge's `mimo_bridge.py` and slime's `megatron_to_hf/mimo.py`.
"""

from __future__ import annotations

from wsync.families.blocks import ATTENTION, DENSE_MLP, EMBEDDING, mtp
from wsync.families.rules import Rule

_MTP = "model.mtp_layers.{mtp}."
MIMO: tuple[Rule, ...] = (
    *EMBEDDING,
    *ATTENTION,
    *DENSE_MLP,
    *mtp(
        (*ATTENTION, *DENSE_MLP),
        _MTP,
        enorm=f"{_MTP}token_layernorm",
        hnorm=f"{_MTP}hidden_layernorm",
        projection=f"{_MTP}input_proj",
        norm=f"{_MTP}final_layernorm",
        swapped=True,  # the checkpoint's columns are the hidden state's, then the embedding's
    ),
)
