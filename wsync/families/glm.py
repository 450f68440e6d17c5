"""GLM-4 (glm4) and GLM-4.5 to 4.7 (glm4_moe).  GLM-5 and GLM-4.7-Flash have latent attention: see
deepseek.py.

Names follow transformers 4.57 (`modeling_glm4.py`, `modeling_glm4_moe.py`) and, on Megatron's side,
slime's `hf_to_megatron/glm.py` and Megatron-Bridge's `glm45_bridge.py`.
"""

from __future__ import annotations

from wsync.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    HF_LAYER,
    LAYER,
    UNGATED_SHARED_EXPERTS,
    layer_rules,
    mtp,
)
from wsync.families.rules import Rule, Target

# A layer has four norms: one before and one after each half.  Megatron-Core has the outer two only
# with slime's patch of TransformerLayer, which gives them the checkpoint's names.
GLM4: tuple[Rule, ...] = (
    *EMBEDDING,
    *ATTENTION,
    Rule(
        f"{LAYER}mlp.linear_fc1.weight",
        "(*gate:ffn | *up:ffn) h",
        Target(f"{HF_LAYER}mlp.gate_up_proj.weight", "(gate | up) h"),
    ),
    *layer_rules(
        ("mlp.linear_fc2.weight", "h *ffn", "mlp.down_proj.weight"),
        ("post_self_attn_layernorm.weight", "h", "post_self_attn_layernorm.weight"),
        ("post_mlp_layernorm.weight", "h", "post_mlp_layernorm.weight"),
    ),
)

# The first layers are dense (first_k_dense_replace).  Queries and keys have norms in the largest
# model only (use_qk_norm).
_LAYER: tuple[Rule, ...] = (*ATTENTION, *DENSE_MLP, *EXPERTS, *UNGATED_SHARED_EXPERTS)
GLM4_MOE: tuple[Rule, ...] = (*EMBEDDING, *_LAYER, *mtp(_LAYER))
