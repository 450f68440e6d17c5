"""MiniMax-M2, M2.1 and M2.5 (minimax_m2).

Names follow the checkpoints that transformers 5 saves (`modeling_minimax_m2.py`), and on Megatron's
side slime's plugin `minimax_m2.py` and Megatron-Bridge's `minimax_m2_provider.py`.
"""

from __future__ import annotations

from wsync.families.blocks import ATTENTION, EMBEDDING, attention_rules, routed_experts
from wsync.families.rules import Rule

# Queries and keys are normalised over all heads.  slime calls the norms q_norm and k_norm, and
# every rank has them whole; Megatron-Bridge gives each rank those of its heads, and the same ones
# to several ranks where there are fewer key heads than ranks.
_NORMS: tuple[Rule, ...] = attention_rules(
    ("q_norm.weight", "~(g n d)", "q_norm.weight"),
    ("k_norm.weight", "~(g d)", "k_norm.weight"),
    ("q_layernorm.weight", "~(g n d)", "q_norm.weight"),
    ("k_layernorm.weight", "~(g d)", "k_norm.weight"),
)

MINIMAX_M2: tuple[Rule, ...] = (
    *EMBEDDING,
    *_NORMS,
    *(rule for rule in ATTENTION if rule.name not in {norm.name for norm in _NORMS}),
    *routed_experts("block_sparse_moe.", ("w1", "w3", "w2"), bias="e_score_correction_bias"),
)
