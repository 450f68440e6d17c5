"""Model families as tables: Megatron-Core parameter names to Hugging Face tensors.

Names and row orders follow Megatron-Core 0.16 (`megatron/core/models/gpt`) and the checkpoints
of transformers.  Sizes are those of the model:

    h hidden, vocab, experts, layers
    g query groups, n query heads per group, d channels of a head, heads = g * n
    ffn, moe_ffn, shared_ffn: intermediate sizes of dense layers, one expert, the shared experts
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wsync import _core
from wsync.families.rules import Expansion, Rule, Target, key_of

__all__ = ["FAMILIES", "RUNTIME", "Family", "Model", "family_of", "read_model", "runtime_family"]

_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def renamed(name: str, view: str, target: str) -> Rule:
    """A parameter that holds one tensor, laid out as the parameter is."""
    return Rule(name, view, Target(target, re.sub(r"[*@]|:\w+", "", view)))


def _layer(*rows: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Parameters of a layer that lie as the tensors of other names do: (name, view, other name)."""
    return tuple(renamed(_LAYER + name, view, _HF + target) for name, view, target in rows)


def gated(name: str, size: str, target: str, *, kind: str = "weight") -> Rule:
    """A gated first linear layer: every rank holds its gate rows, then its up rows."""
    tail = " h" if kind == "weight" else ""
    return Rule(
        name,
        f"(*gate:{size} | *up:{size}){tail}",
        Target(f"{target}gate_proj.{kind}", f"gate{tail}"),
        Target(f"{target}up_proj.{kind}", f"up{tail}"),
    )


def _qkv(kind: str) -> Rule:
    """Rows per query group: its query heads, its key head, its value head."""
    tail = " h" if kind == "weight" else ""
    attention = f"{_HF}self_attn."
    return Rule(
        f"{_LAYER}self_attention.linear_qkv.{kind}",
        f"*(g (n | k:1 | v:1) d){tail}",
        Target(f"{attention}q_proj.{kind}", f"(g n d){tail}"),
        Target(f"{attention}k_proj.{kind}", f"(g k d){tail}"),
        Target(f"{attention}v_proj.{kind}", f"(g v d){tail}"),
    )


def vocabulary(name: str, target: str) -> Rule:
    """An embedding or head, whose rows are padded."""
    return Rule(name, "*(vocab | pad:?) h", Target(target, "vocab h"))


EMBEDDING: tuple[Rule, ...] = (
    vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    vocabulary("output_layer.weight", "lm_head.weight"),
    renamed("decoder.final_layernorm.weight", "h", "model.norm.weight"),
)

ATTENTION: tuple[Rule, ...] = (
    _qkv("weight"),
    _qkv("bias"),
    *_layer(
        ("self_attention.linear_proj.weight", "h *(g n d)", "self_attn.o_proj.weight"),
        ("self_attention.linear_proj.bias", "h", "self_attn.o_proj.bias"),
        ("self_attention.q_layernorm.weight", "d", "self_attn.q_norm.weight"),
        ("self_attention.k_layernorm.weight", "d", "self_attn.k_norm.weight"),
        # One norm, two names: fused into the linear layer by TransformerEngine, else of its own.
        ("self_attention.linear_qkv.layer_norm_weight", "h", "input_layernorm.weight"),
        ("input_layernorm.weight", "h", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "h", "post_attention_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "h", "post_attention_layernorm.weight"),
    ),
)

DENSE_MLP: tuple[Rule, ...] = (
    gated(f"{_LAYER}mlp.linear_fc1.weight", "ffn", f"{_HF}mlp."),
    gated(f"{_LAYER}mlp.linear_fc1.bias", "ffn", f"{_HF}mlp.", kind="bias"),
    *_layer(
        ("mlp.linear_fc2.weight", "h *ffn", "mlp.down_proj.weight"),
        ("mlp.linear_fc2.bias", "h", "mlp.down_proj.bias"),
    ),
)

_EXPERT = f"{_HF}mlp.experts.{{expert}}."
EXPERTS: tuple[Rule, ...] = (
    *_layer(
        ("mlp.router.weight", "experts h", "mlp.gate.weight"),
        ("mlp.router.expert_bias", "experts", "mlp.gate.e_score_correction_bias"),
    ),
    *(
        rule
        for before, after in (("", "{expert}"), ("local_experts.{expert}.", ""))
        for name in (f"{_LAYER}mlp.experts.{before}linear_fc",)
        for rule in (
            gated(f"{name}1.weight{after}", "moe_ffn", _EXPERT),
            renamed(f"{name}2.weight{after}", "h *moe_ffn", f"{_EXPERT}down_proj.weight"),
        )
    ),
    # Legacy grouped experts: one tensor per rank, transposed for each expert.
    Rule(
        f"{_LAYER}mlp.experts.weight1",
        "@experts h (*gate:moe_ffn | *up:moe_ffn)",
        Target(f"{_HF}mlp.experts.{{experts}}.gate_proj.weight", "gate h"),
        Target(f"{_HF}mlp.experts.{{experts}}.up_proj.weight", "up h"),
        stored=((1,), (0, 2)),
    ),
    Rule(
        f"{_LAYER}mlp.experts.weight2",
        "@experts *moe_ffn h",
        Target(f"{_HF}mlp.experts.{{experts}}.down_proj.weight", "h moe_ffn"),
        stored=((0, 1), (2,)),
    ),
)


def _shared_experts(target: str) -> tuple[Rule, ...]:
    name = "mlp.shared_experts.linear_fc"
    return (
        gated(f"{_LAYER}{name}1.weight", "shared_ffn", f"{_HF}{target}"),
        *_layer((f"{name}2.weight", "h *shared_ffn", f"{target}down_proj.weight")),
    )


SHARED_EXPERT: tuple[Rule, ...] = (
    *_shared_experts("mlp.shared_expert."),
    *_layer(("mlp.shared_experts.gate_weight", "one:1 h", "mlp.shared_expert_gate.weight")),
)
# Qwen3's own models have none; the names are those that slime gives them.
UNGATED_SHARED_EXPERTS = _shared_experts("mlp.shared_experts.")


def _fused_experts(
    target: str = f"{_HF}mlp.experts.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    size: str = "moe_ffn",
) -> tuple[Rule, ...]:
    """A layer's experts as transformers 5 keeps them at run time; it saves them one by one."""
    gate, up, down = (f"{target}{{experts}}.{name}.weight" for name in names)
    return (
        Rule(
            f"{_HF}mlp.experts.gate_up_proj",
            f"experts (gate:{size} | up:{size}) h",
            Target(gate, "gate h"),
            Target(up, "up h"),
        ),
        Rule(f"{_HF}mlp.experts.down_proj", f"experts h {size}", Target(down, f"h {size}")),
    )


class Family:
    """A named table of rules."""

    def __init__(self, name: str, *tables: tuple[Rule, ...]) -> None:
        self.name = name
        self.rules = tuple(rule for table in tables for rule in table)
        self._by_key: dict[str, list[Rule]] = {}
        for rule in self.rules:
            self._by_key.setdefault(rule.key, []).append(rule)

    def find(self, name: str) -> tuple[Rule, dict[str, int]]:
        """The rule of a global parameter name and the numbers in that name.

        Raises LayoutError that names the parameter and the family if no rule matches.
        """
        found = self.match(name)
        if found is None:
            raise _core.LayoutError(f"{name}: no rule of the family {self.name!r} matches it")
        return found

    def match(self, name: str) -> tuple[Rule, dict[str, int]] | None:
        """As `find`, but None if no rule matches."""
        for rule in self._by_key.get(key_of(name), ()):
            numbers = rule.match(name)
            if numbers is not None:
                return rule, numbers
        return None

    def expand(
        self, rule: Rule, name: str, sizes: Mapping[str, int], inferred: int = 0
    ) -> Expansion:
        """`rule.expand` for a parameter; LayoutError names a size that is not known."""
        try:
            return rule.expand(sizes, inferred)
        except KeyError as error:
            fields = " or ".join(FIELDS.get(error.args[0], error.args))
            raise _core.LayoutError(
                f"{name}: the configuration does not give {fields}, which the family "
                f"{self.name!r} needs for it"
            ) from None


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(Family(name, EMBEDDING, ATTENTION, DENSE_MLP) for name in ("llama", "qwen2", "qwen3")),
        Family("qwen2_moe", EMBEDDING, ATTENTION, DENSE_MLP, EXPERTS, SHARED_EXPERT),
        Family("qwen3_moe", EMBEDDING, ATTENTION, DENSE_MLP, EXPERTS, UNGATED_SHARED_EXPERTS),
    )
}


# Names of transformers modules at run time to those of checkpoints, where the two differ; by
# model_type, after transformers 5.23 (`conversion_mapping.py`).  What no rule matches keeps its
# name.  4.57 has checkpoints' names for all but the families that save fused experts.
RUNTIME: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(
            Family(name, _fused_experts())
            for name in (
                *("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
                *("dots1", "glm4_moe", "glm4_moe_lite", "qwen3_next"),
            )
        ),
        Family("olmoe", _fused_experts(size="ffn")),
        Family(
            "mixtral",
            _fused_experts(f"{_HF}block_sparse_moe.experts.", ("w1", "w3", "w2"), size="ffn"),
            (renamed(f"{_HF}mlp.gate.weight", "experts h", f"{_HF}block_sparse_moe.gate.weight"),),
        ),
        Family("gpt_oss"),  # saved fused
    )
}


@dataclass(frozen=True)
class Model:
    """What a configuration says about a model."""

    family: Family
    sizes: Mapping[str, int]
    tied: bool


def family_of(name: str) -> Family:
    """The family of a model_type ("qwen3_moe") or of a config's class name ("Qwen3MoeConfig")."""
    plain = re.sub(r"[^a-z0-9]|config$|forcausallm$", "", name.lower())
    for family in FAMILIES.values():
        if family.name.replace("_", "") == plain:
            return family
    raise _core.UnsupportedError(
        f"model family {name!r} is not known; known are {', '.join(sorted(FAMILIES))}"
    )


# size: the names it has in Hugging Face configs, then in Megatron's arguments
FIELDS: Mapping[str, tuple[str, ...]] = {
    "h": ("hidden_size",),
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers", "num_layers"),
    "heads": ("num_attention_heads",),
    "g": ("num_key_value_heads", "num_query_groups"),
    "d": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "ffn_hidden_size"),
    "moe_ffn": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared_ffn": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts"),
}


def read_model(config: Any, model_name: str | None = None) -> Model:
    """Family and sizes from a Hugging Face config or from Megatron's (slime's) arguments.

    `model_name` goes before the config's own `model_type`.  Sizes that the config does not have
    are left out; a rule that needs one then fails by name.
    """
    name = model_name or getattr(config, "model_type", None) or getattr(config, "model_name", None)
    if not isinstance(name, str) or not name:
        raise _core.InvalidArgumentError(
            f"{type(config).__name__} has no model_type: pass model_name="
        )
    sizes = _read_sizes(config)
    heads = sizes.get("heads", 0)
    if heads <= 0 or sizes.get("h", 0) <= 0:
        raise _core.InvalidArgumentError(
            f"{type(config).__name__}: hidden_size {sizes.get('h')} and num_attention_heads "
            f"{sizes.get('heads')} must be positive"
        )
    if getattr(config, "group_query_attention", None) is False:
        sizes["g"] = heads  # Megatron's arguments have num_query_groups=1 then, which it ignores
    sizes.setdefault("g", heads)
    sizes.setdefault("d", sizes["h"] // heads)
    if sizes["g"] <= 0 or heads % sizes["g"]:
        raise _core.LayoutError(
            f"{type(config).__name__}: {heads} attention heads do not divide into "
            f"{sizes['g']} query groups"
        )
    sizes["n"] = heads // sizes["g"]
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is None:
        tied = not getattr(config, "untie_embeddings_and_output_weights", True)
    return Model(family_of(name), sizes, bool(tied))


def runtime_family(config: Any) -> tuple[Family | None, dict[str, int], str]:
    """(family, sizes, model_type) for the run-time names of a Hugging Face model.

    The family is None where RUNTIME has none of that model_type, or without a configuration.
    """
    kind = getattr(config, "model_type", None) or ""
    return RUNTIME.get(kind), _read_sizes(config), kind


def _read_sizes(config: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for size, fields in FIELDS.items():
        value = next((v for f in fields if (v := getattr(config, f, None)) is not None), None)
        if value is not None:
            sizes[size] = int(value)
    return sizes
