"""Rules that several model families share: Megatron-Core parameter names to Hugging Face tensors.

Names and row orders follow Megatron-Core 0.16 (`megatron/core/models/gpt`) and the checkpoints
of transformers.  The views use these sizes of a model:

    h hidden, vocab, experts, layers
    g query groups, n query heads per group, d channels of a head, heads = g * n
    ffn, moe_ffn, shared_ffn: intermediate sizes of dense layers, one expert, the shared experts

A target is written as "name", or as "name view" if its view differs from the parameter's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from wsync.families.rules import Rule, Target

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
MTP_LAYER = "mtp.layers.{mtp}."
# an expert's number in the name of its parameter
EXPERT = re.compile(r"\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
Row = tuple[str, ...]  # a parameter's name and view, and its targets


def renamed(name: str, view: str, *targets: str) -> Rule:
    """The rule of a parameter, with its targets as texts."""
    pairs = (target.partition(" ") for target in targets)
    made = (Target(to, re.sub(r"[*~@]|:[\w+?]+", "", other or view)) for to, _, other in pairs)
    return Rule(name, view, *made)


def rules(name: str, target: str, *rows: Row) -> tuple[Rule, ...]:
    """The rules of some rows.  name, target: prefixes of the parameters' and the targets' names."""
    return tuple(
        renamed(f"{name}{own}", view, *(f"{target}{each}" for each in targets))
        for own, view, *targets in rows
    )


def layer_rules(*rows: Row, part: str = "", target: str = "") -> tuple[Rule, ...]:
    """Like `rules`, for a decoder layer."""
    return rules(f"{LAYER}{part}", f"{HF_LAYER}{target}", *rows)


def attention_rules(*rows: Row) -> tuple[Rule, ...]:
    """Like `rules`, for a layer's attention."""
    return layer_rules(*rows, part="self_attention.", target="self_attn.")


def linear(name: str, rows: str, columns: str, *targets: str) -> list[Row]:
    """A linear layer's weight and bias.  A target's view names only its rows."""
    pairs = [target.partition(" ") for target in targets]
    return [
        (
            f"{name}.{kind}",
            rows + tail,
            *(f"{to}.{kind} {own or rows}{tail}" for to, _, own in pairs),
        )
        for kind, tail in (("weight", f" {columns}"), ("bias", ""))
    ]


def vocabulary(name: str, target: str) -> Rule:
    """An embedding or head, whose rows are padded."""
    return renamed(name, "*(vocab | pad:?) h", f"{target} vocab h")


def embedding(words: str = "model.embed_tokens", norm: str = "model.norm") -> tuple[Rule, ...]:
    """The parameters of a language model outside its layers."""
    return (
        vocabulary("embedding.word_embeddings.weight", f"{words}.weight"),
        vocabulary("output_layer.weight", "lm_head.weight"),
        renamed("decoder.(final_layernorm|final_norm).weight", "h", f"{norm}.weight"),
    )


EMBEDDING = embedding()

# A norm has one of two names: a module's own, or that of TransformerEngine's linear layer.
ATTENTION_NORM = "(input_layernorm.|self_attention.linear_qkv.layer_norm_)"
MLP_NORM = "(pre_mlp_layernorm.|mlp.linear_fc1.layer_norm_)"
NORMS: tuple[Rule, ...] = layer_rules(
    (f"{ATTENTION_NORM}weight", "h", "input_layernorm.weight"),
    (f"{MLP_NORM}weight", "h", "post_attention_layernorm.weight"),
)

QKV_ROWS = (
    "*(g (n | k:1 | v:1) d)"  # per query group: its query heads, its key head, its value head
)
_QKV_TARGETS = ("q_proj (g n d)", "k_proj (g k d)", "v_proj (g v d)")
QKV = attention_rules(*linear("linear_qkv", QKV_ROWS, "h", *_QKV_TARGETS))
# The other parameters of attention.
ATTENTION_REST: tuple[Rule, ...] = (
    *attention_rules(
        *linear("linear_proj", "h", "*(g n d)", "o_proj"),
        ("q_layernorm.weight", "d", "q_norm.weight"),
        ("k_layernorm.weight", "d", "k_norm.weight"),
    ),
    *NORMS,
)
ATTENTION = (*QKV, *ATTENTION_REST)
DENSE_MLP = layer_rules(
    *linear("linear_fc1", "(*gate:ffn | *up:ffn)", "h", "gate_proj gate", "up_proj up"),
    *linear("linear_fc2", "h", "*ffn", "down_proj"),
    part="mlp.",
    target="mlp.",
)


def expert_names(linear: str) -> str:
    """The name of a parameter of every expert ("linear_fc1.weight"), both if TransformerEngine
    groups the experts and if each expert is a module."""
    return f"mlp.experts.({linear}{{expert}}|local_experts.{{expert}}.{linear})"


def _experts(first: Sequence[str], second: str) -> tuple[Rule, ...]:
    """The two linear layers of experts; `$` in targets stands for the axis of a layer's experts."""
    halves = "(*gate:moe_ffn | *up:moe_ffn)"
    one, every = (
        [to.replace("$", axis) for to in (*first, second)] for axis in ("expert", "experts")
    )
    return layer_rules(
        (expert_names("linear_fc1.weight"), f"{halves} h", *one[:-1]),
        (expert_names("linear_fc2.weight"), "h *moe_ffn", one[-1]),
        # One parameter for all of a rank's experts, as slime's converters know it.
        ("mlp.experts.linear_fc1", f"@experts {halves} h", *every[:-1]),
        ("mlp.experts.linear_fc2", "@experts h *moe_ffn", every[-1]),
    )


def routed_experts(
    moe: str = "mlp.",
    names: tuple[str, str, str] = GATE_UP_DOWN,
    *,
    bias: str = "gate.e_score_correction_bias",
) -> tuple[Rule, ...]:
    """A router, and experts that have tensors of their own in the checkpoint.

    Args:
        moe: the prefix of the target names within a layer.
        names: the names of an expert's gate, up and down projections.
        bias: the name of the router's bias that balances the experts' load.
    """
    gate, up, down = (f"{moe}experts.{{$}}.{name}.weight" for name in names)
    return (
        *layer_rules(
            ("mlp.router.weight", "experts h", f"{moe}gate.weight"),
            ("mlp.router.expert_bias", "experts", f"{moe}{bias}"),
        ),
        *_experts((f"{gate} gate h", f"{up} up h"), f"{down} h moe_ffn"),
    )


EXPERTS = routed_experts()


def stacked_experts(gate_up: str, down: str) -> tuple[Rule, ...]:
    """A router, and experts that the checkpoint stacks in two tensors: gate_up_proj and down_proj.
    The views `gate_up` ("h (gate | up)") and `down` ("moe_ffn h") name the axes after the
    experts' axis."""
    return (
        *layer_rules(("mlp.router.weight", "experts h", "mlp.gate.weight")),
        *_experts((f"mlp.experts.gate_up_proj $ {gate_up}",), f"mlp.experts.down_proj $ {down}"),
    )


def shared_experts(target: str) -> tuple[Rule, ...]:
    gate, up, down = (f"{target}{name}.weight" for name in GATE_UP_DOWN)
    halves = "(*gate:shared_ffn | *up:shared_ffn) h"
    return layer_rules(
        ("linear_fc1.weight", halves, f"{gate} gate h", f"{up} up h"),
        ("linear_fc2.weight", "h *shared_ffn", down),
        part="mlp.shared_experts.",
    )


SHARED_EXPERT: tuple[Rule, ...] = (
    *shared_experts("mlp.shared_expert."),
    *layer_rules(("mlp.shared_experts.gate_weight", "one:1 h", "mlp.shared_expert_gate.weight")),
)
# Qwen3's own models have no shared experts; for qwen3_moe these are slime's names.
UNGATED_SHARED_EXPERTS = shared_experts("mlp.shared_experts.")


def moved(
    rules: Iterable[Rule], name: tuple[str, str], target: tuple[str, str]
) -> tuple[Rule, ...]:
    """Rules with new beginnings: (old, new) for their names, and for their targets' names.  Rules
    whose names do not begin with the old one are left out."""
    return tuple(
        Rule(
            name[1] + rule.name.removeprefix(name[0]),
            rule.parsed.text,
            *(replace(to, name=to.name.replace(*target, 1)) for to in rule.targets),
        )
        for rule in rules
        if rule.name.startswith(name[0])
    )


def beside_vision(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules of a language model with a vision tower.  A parameter's name may begin with
    "language_model.", the name that a wrapper gives to the language model."""
    return moved(rules, ("", "(language_model.|)"), ("model.", "model.language_model."))


def eh_proj(target: str, *, swapped: bool = False) -> Rule:
    """The projection of an MTP layer.  Its columns take the embedding, then the hidden state
    (`_concat_embeddings` of Megatron-Core).  swapped: the target has the reverse order."""
    columns = "(hidden | embedding)" if swapped else "(embedding | hidden)"
    view = "*h (embedding:h | hidden:h)"
    return renamed(f"{MTP_LAYER}eh_proj.weight", view, f"{target}.weight h {columns}")


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
    """The layers of multi-token prediction (MTP).  By default names are DeepSeek's.

    Args:
        layer: the rules of an ordinary layer; rules of parameters outside layers are ignored.
        inner: the prefix of the inner layer's target names.  {mtp} is the MTP layer's number;
            {layer} is {mtp} plus the number of the model's layers.
        enorm, hnorm, projection, norm: target names of the norms of embedding and hidden state, of
            eh_proj and of the last norm, without ".weight".
        swapped: see `eh_proj`.
        within: the prefix of the inner layer's parameter names if an MTP layer is a block of
            several layers: "layers.{inner}.".
    """
    norms = {"enorm": enorm, "hnorm": hnorm, "final_layernorm": norm}
    # The inner layer is called transformer_layer up to Megatron-Core 0.16, mtp_model_layer later.
    name = f"{MTP_LAYER}(transformer_layer|mtp_model_layer).{within}"
    return (
        *(renamed(f"{MTP_LAYER}{own}.weight", "h", f"{to}.weight") for own, to in norms.items()),
        eh_proj(projection, swapped=swapped),
        *moved(layer, (LAYER, name), (HF_LAYER, inner)),
    )


def fused_experts(
    target: str = f"{HF_LAYER}mlp.experts.",
    names: tuple[str, str, str] = GATE_UP_DOWN,
    size: str = "moe_ffn",
) -> tuple[Rule, ...]:
    """A layer's experts, which transformers 5 fuses at run time and saves one by one."""
    gate, up, down = (f"{target}{{experts}}.{name}.weight" for name in names)
    name, halves = f"{HF_LAYER}mlp.experts.", f"(gate:{size} | up:{size})"
    return (
        renamed(f"{name}gate_up_proj", f"experts {halves} h", f"{gate} gate h", f"{up} up h"),
        renamed(f"{name}down_proj", f"experts h {size}", f"{down} h {size}"),
    )
