"""Selects the tensors of a model that are quantised, and derives the tensors that replace them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from wsync import _core
from wsync.quantise.config import Derived, Method, Modules, TensorFacts, facts_of, module_of

# Modules that no engine quantises: routers, heads, embeddings, norms, convolutions, projections
# that engines make as plain linear layers, and whole towers for images and sound.
_PLAIN: Final = Modules(
    (
        *("audio_model", "audio_tower", "speech_encoder"),
        *("vision_encoder", "vision_model", "vision_tower", "visual"),
        *("classifier", "lm_head", "output_layer", "reward_head", "score", "v_head", "value_head"),
        *("gate", "router", "shared_expert_gate", "weights_proj"),
        *("eh_proj", "input_proj", "mtp.fc"),  # of MTP layers
        *("mm_projector", "multi_modal_projector", "*embed*"),
        r"re:(.*\.)?([^.]*(norm|conv)[^.]*|pos_emb|relative_attention_bias|shared|wpe|wte)$",
        r"re:(?!.*\.\d+\.)(.*\.)?output$",  # a head, if it is outside the layers
    )
)
# Engines join the weights of each set in one tensor with one second scale.
_SHARING: Final = (
    *(("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj")),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    *(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
    ("index_q_proj", "index_k_proj"),
)


class Row(NamedTuple):
    """A tensor that is quantised, and the tensors that replace it.

    share: tensors with the same key share a second scale; "" stands for a scale of its own.
    """

    weight: TensorFacts
    derived: Derived
    share: str


class Selection(NamedTuple):
    """The tensors of a model that a method quantises.

    Attributes:
        rows: one for each of these tensors, in the model's order.
        tensors: all tensors of the quantised model, in the model's order; derived tensors replace
            the tensors that are quantised.
    """

    method: Method
    rows: tuple[Row, ...]
    tensors: tuple[TensorFacts, ...]


def select(
    method: Method,
    model: _core.Layout | Iterable[TensorFacts],
    held: Collection[str] | None = None,
) -> Selection:
    """Selects the tensors of a model that are quantised, and derives the tensors that replace them.

    model: a merged layout, or the facts of every tensor, with Hugging Face names.
    held: the names of all tensors of a checkpoint: a tensor is quantised if its scales are among
    them.  None stands for no checkpoint: the method's lists decide.

    Raises:
        UnsupportedError: the method cannot quantise a tensor; the text names it.
        LayoutError: no tensor is quantised, or only some of the tensors that share a scale are; the
            text names them.
    """
    facts = facts_of(model)
    chosen = _chosen(method, facts, held)
    for fact in chosen:
        method.check(fact)
    taken = {fact.name for fact in chosen}
    shares = _shares(method, taken, {fact.name for fact in facts})
    rows: list[Row] = []
    tensors: list[TensorFacts] = []
    for fact in facts:
        if fact.name in taken:
            derived = method.derived(fact, fact.group)
            rows.append(Row(fact, derived, shares.get(fact.name, "")))
            tensors += [each for each in derived if each is not None]
        else:
            tensors.append(fact)
    return Selection(method, tuple(rows), tuple(tensors))


def _chosen(
    method: Method, facts: Sequence[TensorFacts], held: Collection[str] | None
) -> Sequence[TensorFacts]:
    if held is None:
        _check_fused(method, facts)
        chosen = [
            fact
            for fact in facts
            if _is_linear(fact) and method.targeted(fact.name) and not method.keeps(fact.name)
        ]
        why = "by the quantization_config, none of the model's tensors is quantised"
    else:
        chosen = [fact for fact in facts if method.scales_name(fact.name) in held]
        why = (
            f"the checkpoint has no {method.scales_name('')} of any of the model's tensors (with "
            "Options(checkpoint='') the lists of the quantization_config decide what is quantised)"
        )
    if not chosen:
        raise _core.LayoutError(f"{method.kind}: {why}")
    return chosen


def _check_fused(method: Method, facts: Iterable[TensorFacts]) -> None:
    """Raises UnsupportedError if one parameter holds several experts, because without a checkpoint
    wsync knows neither its dimensions nor whether engines take it quantised."""
    for fact in facts:
        fused = len(fact.shape) == 3 and not fact.name.endswith(".weight")
        if fused and "experts" in fact.name.split(".") and not method.keeps(fact.name):
            raise _core.UnsupportedError(
                f"{fact.name} {tuple(fact.shape)}: experts in one parameter are quantised only as "
                "in a checkpoint: name a quantised checkpoint with Options(checkpoint=)"
            )


def _is_linear(fact: TensorFacts) -> bool:
    """Whether name and shape are those of a linear layer's weight, or of a stack of experts, that
    engines quantise unless a list excludes it."""
    stacked = len(fact.shape) == 3 and ("expert" in fact.name or "moe" in fact.name)
    return (
        fact.name.endswith(".weight")
        and (len(fact.shape) == 2 or stacked)
        and 0 not in fact.shape
        and not _PLAIN.find(fact.name)
    )


def _shares(method: Method, taken: Collection[str], names: Collection[str]) -> dict[str, str]:
    """The key of each tensor that shares its second scale with others."""
    found: dict[str, str] = {}
    for name in taken if method.kind == "nvfp4" else ():
        parent, _, last = module_of(name).rpartition(".")
        together: tuple[str, ...] = next((each for each in _SHARING if last in each), ())
        others = [other for part in together if (other := f"{parent}.{part}.weight") in names]
        if plain := [other for other in others if other not in taken]:
            raise _core.LayoutError(
                f"{name}: it shares its second scale with {plain[0]}, which is not quantised"
            )
        if len(others) > 1:
            found[name] = f"{parent}.{together[0]}"
    return found
