"""gpt-oss (gpt_oss).

Names and orders follow transformers 4.57 (`modeling_gpt_oss.py`), and on Megatron's side
Megatron-Bridge's `gpt_oss_bridge.py`.  An expert's size is the configuration's intermediate_size.
"""

from __future__ import annotations

from wsync.families.blocks import (
    ATTENTION,
    EMBEDDING,
    HF_LAYER,
    expert_names,
    layer_rules,
)
from wsync.families.rules import Rule, Target

_EXPERTS = f"{HF_LAYER}mlp.experts."


def _gate_up(name: str, kind: str) -> Rule:
    """Rows of an expert's gate, then of its up projection: alternating columns of one tensor."""
    tail, middle, end = (" h", "h ", "") if kind == "weight" else ("", "", "_bias")
    target = Target(f"{_EXPERTS}gate_up_proj{end}", f"expert {middle}(ffn two)")
    return Rule(name, f"(two:2 *ffn){tail}", target)


def _down(name: str, kind: str) -> Rule:
    if kind == "weight":
        return Rule(name, "h *ffn", Target(f"{_EXPERTS}down_proj", "expert ffn h"))
    return Rule(name, "h", Target(f"{_EXPERTS}down_proj_bias", "expert h"))


GPT_OSS: tuple[Rule, ...] = (
    *EMBEDDING,
    *ATTENTION,
    *layer_rules(
        # One for each head; Megatron cuts them, but does not mark them as tensor-parallel.
        ("self_attention.core_attention.softmax_offset", "~(g n)", "self_attn.sinks"),
        ("mlp.router.weight", "experts h", "mlp.router.weight"),
        ("mlp.router.bias", "experts", "mlp.router.bias"),
    ),
    *(
        make(name, kind)
        for make, linear in ((_gate_up, "linear_fc1"), (_down, "linear_fc2"))
        for kind in ("weight", "bias")
        for name in expert_names(f"{linear}.{kind}")
    ),
)
