"""A family as a user adds it: Mixtral, for which wsync has no table.

What blocks.py has would do for its experts, too; they are written out here, with a size of the
user's own, as they are for a model that is like no other.
"""

from __future__ import annotations

from wsync.families import Rule, Target, blocks, register
from wsync.families.registry import FAMILIES, Family

NAME = "mixtral"
_MOE = "model.layers.{layer}.block_sparse_moe."
_EXPERT = f"{_MOE}experts.{{expert}}."
FIELDS = {"inner": ("intermediate_size", "moe_ffn_hidden_size")}
RULES = (
    *blocks.EMBEDDING,
    *blocks.ATTENTION,
    Rule(
        "decoder.layers.{layer}.mlp.router.weight",
        "experts h",
        Target(f"{_MOE}gate.weight", "experts h"),
    ),
    *(
        rule
        for first, second in (
            (
                "local_experts.{expert}.linear_fc1.weight",
                "local_experts.{expert}.linear_fc2.weight",
            ),
            ("linear_fc1.weight{expert}", "linear_fc2.weight{expert}"),
        )
        for rule in (
            Rule(
                f"decoder.layers.{{layer}}.mlp.experts.{first}",
                "(*gate:inner | *up:inner) h",
                Target(f"{_EXPERT}w1.weight", "gate h"),
                Target(f"{_EXPERT}w3.weight", "up h"),
            ),
            Rule(
                f"decoder.layers.{{layer}}.mlp.experts.{second}",
                "h *inner",
                Target(f"{_EXPERT}w2.weight", "h inner"),
            ),
        )
    ),
)


def add() -> Family:
    """The family, which this process knows from now on."""
    return FAMILIES.get(NAME) or register(NAME, RULES, fields=FIELDS)
