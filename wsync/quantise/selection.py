"""Which tensors of a model are quantised, and what they become."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from wsync import _core
from wsync.quantise.config import Derived, Method, Modules, TensorFacts, facts_of, module_of

# What no engine quantises: routers, heads, embeddings, norms, convolutions, projections that
# engines make as plain linear layers, and whole towers for images and sound.
_PLAIN: Final = Modules(
    (
        *("audio_model", "audio_tower", "speech_encoder"),
        *("vision_encoder", "vision_model", "vision_tower", "visual"),
        *("classifier", "lm_head", "output_layer", "reward_head", "score", "v_head", "value_head"),
        *("gate", "router", "shared_expert_gate", "weights_proj"),
        *("eh_proj", "input_proj", "mtp.fc"),  # of MTP layers
        *("mm_projector", "multi_modal_projector", "*embed*"),
        r"re:(.*\.)?([^.]*(norm|conv)[^.]*|pos_emb|relative_attention_bias|shared|wpe|wte)$",
        r"re:(?!.*\.\d+\.)(.*\.)?output$",  # a head where it is in no layer
    )
)
# Engines keep these in one tensor with one second scale.
_SHARING: Final = (
    *(("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj")),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    *(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
    ("index_q_proj", "index_k_proj"),
)


class Row(NamedTuple):
    """A tensor that is quantised, and what it becomes.

    share: tensors of one key have one second scale; "": the tensor's own.
    """

    weight: TensorFacts
    derived: Derived
    share: str


class Selection(NamedTuple):
    """The tensors of a model that are quantised by a method.

    Attributes:
        rows: one for each, in the model's order.
        tensors: all tensors of the quantised model, the derived ones in place of those that are
            quantised, in the model's order.
    """

    method: Method
    rows: tuple[Row, ...]
    tensors: tuple[TensorFacts, ...]


def select(
    method: Method,
    model: _core.Layout | Iterable[TensorFacts],
    held: Collection[str] | None = None,
) -> Selection:
    """Selects the tensors of a model that are quantised, and derives what they become.

    model: a merged layout, or the facts of every tensor; names of Hugging Face.
    held: names of all tensors of the checkpoint, whose scales then decide; None where there is
    none, and the method's lists decide.

    Raises:
        UnsupportedError: a tensor that the method cannot take; the text names it.
        LayoutError: a checkpoint in which nothing is quantised; one of those that share a scale
            is not quantised.  The text names them.
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
        why = " by the quantization_config"
    else:
        chosen = [fact for fact in facts if method.scales_name(fact.name) in held]
        why = (
            f": the checkpoint has no {method.scales_name('')} of any of them (Options("
            "checkpoint='') goes by the lists of the quantization_config)"
        )
    if not chosen:
        raise _core.LayoutError(f"{method.kind}: the model has no tensor that is quantised{why}")
    return chosen


def _check_fused(method: Method, facts: Iterable[TensorFacts]) -> None:
    """Raises UnsupportedError for experts in one parameter: without a checkpoint nothing says
    which dimension is which, and whether engines take it quantised."""
    for fact in facts:
        fused = len(fact.shape) == 3 and not fact.name.endswith(".weight")
        if fused and "experts" in fact.name.split(".") and not method.keeps(fact.name):
            raise _core.UnsupportedError(
                f"{fact.name} {tuple(fact.shape)}: experts in one parameter are quantised only as "
                "a checkpoint has them: Options(checkpoint=) has to name a quantised one"
            )


def _is_linear(fact: TensorFacts) -> bool:
    """By name and shape: a weight of a linear layer, or of a stack of experts, that engines
    quantise where no list says otherwise."""
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
