"""Step-3.5-Flash (step3p5).

Names follow Megatron-Bridge 0.6.2 (`step35_bridge.py`) and the checkpoint of stepfun-ai.  Layers
with a sliding window have more query heads than others, in as many groups.  A checkpoint has one
gate for each head, which Megatron-Core (attention_output_gate) has for each channel: a head's are
equal as long as they are not trained apart.
"""

from __future__ import annotations

from wsync.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    HF_LAYER,
    LAYER,
    expert_names,
    gated,
    layer_rules,
    mtp,
)
from wsync.families.rules import Rule, Target

__all__ = ["STEP_3_5", "STEP_FIELDS"]

STEP_FIELDS = {
    "g": ("num_attention_groups", "num_query_groups"),
    "shared_ffn": ("share_expert_dim", "share_expert_dims", "moe_shared_expert_intermediate_size"),
}
_OWN: tuple[Rule, ...] = (
    Rule(
        f"{LAYER}self_attention.linear_qkv.weight",
        "*(g ((query:1 | gate:1) n:? | k:1 | v:1) d) h",
        Target(f"{HF_LAYER}self_attn.q_proj.weight", "(g query n d) h"),
        Target(f"{HF_LAYER}self_attn.g_proj.weight", "(g gate n) h", equal="d"),
        Target(f"{HF_LAYER}self_attn.k_proj.weight", "(g k d) h"),
        Target(f"{HF_LAYER}self_attn.v_proj.weight", "(g v d) h"),
    ),
    *layer_rules(("self_attention.linear_proj.weight", "h *(g n:? d)", "self_attn.o_proj.weight")),
)
_LAYER: tuple[Rule, ...] = (
    *_OWN,
    *(rule for rule in ATTENTION if rule.name not in {own.name for own in _OWN}),
    *DENSE_MLP,
)
_EXPERTS: tuple[Rule, ...] = (
    *layer_rules(
        ("mlp.router.weight", "experts h", "moe.gate.weight"),
        ("mlp.router.expert_bias", "experts", "moe.router_bias"),
        (
            "mlp.shared_experts.linear_fc2.weight",
            "h *shared_ffn",
            "share_expert.down_proj.weight",
        ),
    ),
    gated(f"{LAYER}mlp.shared_experts.linear_fc1.weight", "shared_ffn", f"{HF_LAYER}share_expert."),
    *(
        Rule(
            name,
            "(*gate:moe_ffn | *up:moe_ffn) h",
            Target(f"{HF_LAYER}moe.gate_proj.weight", "expert gate h"),
            Target(f"{HF_LAYER}moe.up_proj.weight", "expert up h"),
        )
        for name in expert_names("linear_fc1.weight")
    ),
    *(
        Rule(name, "h *moe_ffn", Target(f"{HF_LAYER}moe.down_proj.weight", "expert h moe_ffn"))
        for name in expert_names("linear_fc2.weight")
    ),
)
# Layers of MTP are dense.  The head that a checkpoint has for each is a copy of the model's.
STEP_3_5: tuple[Rule, ...] = (
    *EMBEDDING,
    *_LAYER,
    *_EXPERTS,
    *mtp(_LAYER, norm=f"{HF_LAYER}transformer.shared_head.norm"),
)
