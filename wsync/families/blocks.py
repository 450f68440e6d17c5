"""Rules that several model families share: Megatron-Core parameter names to Hugging Face tensors.

Names and row orders follow Megatron-Core 0.16 (`megatron/core/models/gpt`) and the checkpoints
of transformers.  Sizes are those of the model:

    h hidden, vocab, experts, layers
    g query groups, n query heads per group, d channels of a head, heads = g * n
    ffn, moe_ffn, shared_ffn: intermediate sizes of dense layers, one expert, the shared experts
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from wsync.families.rules import Rule, Target

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
MTP_LAYER = "mtp.layers.{mtp}."


def renamed(name: str, view: str, target: str) -> Rule:
    """A parameter that holds one tensor, laid out as the parameter is."""
    return Rule(name, view, Target(target, re.sub(r"[*~@]|:[\w+?]+", "", view)))


def layer_rules(*rows: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Parameters of a layer that lie as the tensors of other names do: (name, view, other name)."""
    return tuple(renamed(LAYER + name, view, HF_LAYER + target) for name, view, target in rows)


def attention_rules(*rows: tuple[str, str, str]) -> tuple[Rule, ...]:
    """As `layer_rules`, of a layer's attention."""
    return layer_rules(*((f"self_attention.{n}", v, f"self_attn.{to}") for n, v, to in rows))


def with_bias(
    name: str, rows: str, *targets: tuple[str, str], columns: str = "h"
) -> tuple[Rule, ...]:
    """A linear layer's weight and bias, by the views of their rows; targets: (name, rows)."""
    return tuple(
        Rule(
            f"{name}.{kind}",
            f"{rows}{tail}",
            *(Target(f"{target}.{kind}", f"{view}{tail}") for target, view in targets),
        )
        for kind, tail in (("weight", f" {columns}"), ("bias", ""))
    )


def linear(name: str, rows: str, columns: str, target: str) -> tuple[Rule, ...]:
    """A weight and a bias that lie as the target's do."""
    return (
        renamed(f"{name}.weight", f"{rows} {columns}", f"{target}.weight"),
        renamed(f"{name}.bias", rows, f"{target}.bias"),
    )


def gated(
    name: str, size: str, target: str, names: Sequence[str] = ("gate_proj", "up_proj")
) -> Rule:
    """The weight of a gated first linear layer: every rank holds its gate rows, then its up rows.

    Args:
        size: of each of the two.
        target: what stands before the names of gate and up projections.
    """
    return Rule(
        name,
        f"(*gate:{size} | *up:{size}) h",
        Target(f"{target}{names[0]}.weight", "gate h"),
        Target(f"{target}{names[1]}.weight", "up h"),
    )


def vocabulary(name: str, target: str) -> Rule:
    """An embedding or head, whose rows are padded."""
    return Rule(name, "*(vocab | pad:?) h", Target(target, "vocab h"))


EMBEDDING: tuple[Rule, ...] = (
    vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    vocabulary("output_layer.weight", "lm_head.weight"),
    renamed("decoder.final_layernorm.weight", "h", "model.norm.weight"),
)

NORMS: tuple[Rule, ...] = layer_rules(
    ("input_layernorm.weight", "h", "input_layernorm.weight"),
    # One norm, two names: fused into the linear layer by TransformerEngine, else of its own.
    ("mlp.linear_fc1.layer_norm_weight", "h", "post_attention_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "h", "post_attention_layernorm.weight"),
)

# Rows per query group: its query heads, its key head, its value head.
QKV = with_bias(
    f"{LAYER}self_attention.linear_qkv",
    "*(g (n | k:1 | v:1) d)",
    (f"{HF_LAYER}self_attn.q_proj", "(g n d)"),
    (f"{HF_LAYER}self_attn.k_proj", "(g k d)"),
    (f"{HF_LAYER}self_attn.v_proj", "(g v d)"),
)
# What attention has besides.
ATTENTION_REST: tuple[Rule, ...] = (
    *linear(f"{LAYER}self_attention.linear_proj", "h", "*(g n d)", f"{HF_LAYER}self_attn.o_proj"),
    *attention_rules(
        ("q_layernorm.weight", "d", "q_norm.weight"),
        ("k_layernorm.weight", "d", "k_norm.weight"),
    ),
    *layer_rules(("self_attention.linear_qkv.layer_norm_weight", "h", "input_layernorm.weight")),
    *NORMS,
)
ATTENTION = (*QKV, *ATTENTION_REST)

DENSE_MLP: tuple[Rule, ...] = (
    *with_bias(
        f"{LAYER}mlp.linear_fc1",
        "(*gate:ffn | *up:ffn)",
        (f"{HF_LAYER}mlp.gate_proj", "gate"),
        (f"{HF_LAYER}mlp.up_proj", "up"),
    ),
    *linear(f"{LAYER}mlp.linear_fc2", "h", "*ffn", f"{HF_LAYER}mlp.down_proj"),
)


def expert_names(linear: str) -> tuple[str, str]:
    """A parameter of every expert ("linear_fc1.weight"), where TransformerEngine groups experts and
    where they are modules of their own."""
    experts = f"{LAYER}mlp.experts."
    return f"{experts}{linear}{{expert}}", f"{experts}local_experts.{{expert}}.{linear}"


_HALVES = "(*gate:moe_ffn | *up:moe_ffn)"


def _experts(first: Sequence[tuple[str, str]], second: tuple[str, str]) -> tuple[Rule, ...]:
    """The two linear layers of experts, by (name, view) of their targets, in which `$` is the axis
    of a layer's experts."""

    def to(axis: str, *targets: tuple[str, str]) -> Iterator[Target]:
        return (Target(name.replace("$", axis), view.replace("$", axis)) for name, view in targets)

    legacy = f"{LAYER}mlp.experts.weight"
    return (
        *(
            Rule(name, f"{_HALVES} h", *to("expert", *first))
            for name in expert_names("linear_fc1.weight")
        ),
        *(
            Rule(name, "h *moe_ffn", *to("expert", second))
            for name in expert_names("linear_fc2.weight")
        ),
        # Legacy grouped experts: one tensor per rank, transposed for each expert.
        Rule(f"{legacy}1", f"@experts h {_HALVES}", *to("experts", *first), stored=((1,), (0, 2))),
        Rule(f"{legacy}2", "@experts *moe_ffn h", *to("experts", second), stored=((0, 1), (2,))),
    )


def routed_experts(
    moe: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    bias: str = "gate.e_score_correction_bias",
) -> tuple[Rule, ...]:
    """A router and experts whose tensors are one by one.

    Args:
        moe: what stands before the names of a layer's tensors.
        names: of an expert's gate, up and down projections.
        bias: the router's bias that balances the experts' load.
    """
    gate, up, down = (f"{HF_LAYER}{moe}experts.{{$}}.{name}.weight" for name in names)
    return (
        *layer_rules(
            ("mlp.router.weight", "experts h", f"{moe}gate.weight"),
            ("mlp.router.expert_bias", "experts", f"{moe}{bias}"),
        ),
        *_experts([(gate, "gate h"), (up, "up h")], (down, "h moe_ffn")),
    )


EXPERTS = routed_experts()


def stacked_experts(gate_up: str, down: str) -> tuple[Rule, ...]:
    """A router and experts whose tensors hold all of a layer's: gate_up_proj and down_proj, whose
    axes behind the first one are those of the views `gate_up` ("h (gate | up)") and `down`
    ("moe_ffn h")."""
    first, second = (f"{HF_LAYER}mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    return (
        *layer_rules(("mlp.router.weight", "experts h", "mlp.gate.weight")),
        *_experts([(first, f"$ {gate_up}")], (second, f"$ {down}")),
    )


def shared_experts(target: str) -> tuple[Rule, ...]:
    name = "mlp.shared_experts.linear_fc"
    return (
        gated(f"{LAYER}{name}1.weight", "shared_ffn", f"{HF_LAYER}{target}"),
        *layer_rules((f"{name}2.weight", "h *shared_ffn", f"{target}down_proj.weight")),
    )


SHARED_EXPERT: tuple[Rule, ...] = (
    *shared_experts("mlp.shared_expert."),
    *layer_rules(("mlp.shared_experts.gate_weight", "one:1 h", "mlp.shared_expert_gate.weight")),
)
# Qwen3's own models have none; there the names are those that slime gives them.
UNGATED_SHARED_EXPERTS = shared_experts("mlp.shared_experts.")


def moved(
    rules: Iterable[Rule], name: tuple[str, str], target: tuple[str, str]
) -> tuple[Rule, ...]:
    """Rules with another beginning (old, new) of their names, and of their targets' names; those
    whose names begin otherwise are left out."""
    return tuple(
        Rule(
            name[1] + rule.name.removeprefix(name[0]),
            rule.parsed.text,
            *(replace(to, name=to.name.replace(*target, 1)) for to in rule.targets),
            stored=rule.stored,
        )
        for rule in rules
        if rule.name.startswith(name[0])
    )


def beside_vision(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules of a language model beside a vision tower, with and without the name that a wrapper
    gives it."""
    rules = tuple(rules)
    target = ("model.", "model.language_model.")
    return (*moved(rules, ("", "language_model."), target), *moved(rules, ("", ""), target))


def eh_proj(target: str, *, swapped: bool = False) -> Rule:
    """The projection of an MTP layer.  Its columns are those of the embedding, then those of the
    hidden state (`_concat_embeddings` of Megatron-Core); swapped: the other way in the target."""
    columns = "(hidden | embedding)" if swapped else "(embedding | hidden)"
    view = "*h (embedding:h | hidden:h)"
    return Rule(f"{MTP_LAYER}eh_proj.weight", view, Target(f"{target}.weight", f"h {columns}"))


def mtp(
    layer: Iterable[Rule],
    inner: str = HF_LAYER,
    *,
    enorm: str = f"{HF_LAYER}enorm",
    hnorm: str = f"{HF_LAYER}hnorm",
    projection: str = f"{HF_LAYER}eh_proj",
    norm: str = f"{HF_LAYER}shared_head.norm",
    swapped: bool = False,
    within: str = "",
) -> tuple[Rule, ...]:
    """The layers of multi-token prediction; the names of DeepSeek's checkpoints, if not given.

    Args:
        layer: the rules of an ordinary layer; those of other parameters are left out.
        inner: what stands before the names of the inner layer's tensors.  {mtp} is the number of
            the MTP layer, {layer} the same, counted on from the model's last layer.
        enorm, hnorm, projection, norm: the norms of embedding and hidden state, eh_proj and the
            last norm, without ".weight".
        swapped: as of `eh_proj`.
        within: what stands before the names of the inner layer's parameters, where an MTP layer is
            a block of several: "layers.{inner}.".
    """
    layer = tuple(layer)
    # The inner layer is called transformer_layer up to Megatron-Core 0.16, mtp_model_layer later.
    return (
        renamed(f"{MTP_LAYER}enorm.weight", "h", f"{enorm}.weight"),
        renamed(f"{MTP_LAYER}hnorm.weight", "h", f"{hnorm}.weight"),
        eh_proj(projection, swapped=swapped),
        renamed(f"{MTP_LAYER}final_layernorm.weight", "h", f"{norm}.weight"),
        *moved(layer, (LAYER, f"{MTP_LAYER}transformer_layer.{within}"), (HF_LAYER, inner)),
        *moved(layer, (LAYER, f"{MTP_LAYER}mtp_model_layer.{within}"), (HF_LAYER, inner)),
    )


def fused_experts(
    target: str = f"{HF_LAYER}mlp.experts.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    size: str = "moe_ffn",
) -> tuple[Rule, ...]:
    """A layer's experts as transformers 5 keeps them at run time; it saves them one by one."""
    gate, up, down = (f"{target}{{experts}}.{name}.weight" for name in names)
    return (
        Rule(
            f"{HF_LAYER}mlp.experts.gate_up_proj",
            f"experts (gate:{size} | up:{size}) h",
            Target(gate, "gate h"),
            Target(up, "up h"),
        ),
        Rule(f"{HF_LAYER}mlp.experts.down_proj", f"experts h {size}", Target(down, f"h {size}")),
    )
