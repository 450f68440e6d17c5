"""Which tensors of a model are quantised, and what they become."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from wsync import _core
from wsync.quantise.config import Method, Modules, TensorFacts, facts_of, module_of

RULES: Final = ("lists", "slime")

# What no engine quantises: routers, heads, projections that engines make as plain linear layers,
# and whole towers for images and sound.
_PLAIN: Final = Modules(
    (
        *("audio_model", "audio_tower", "speech_encoder"),
        *("vision_encoder", "vision_model", "vision_tower", "visual"),
        *("classifier", "lm_head", "output_layer", "reward_head", "score", "v_head", "value_head"),
        *("conv1d", "gate", "router", "shared_expert_gate", "weights_proj"),
        *("eh_proj", "input_proj", "mtp.fc"),  # of MTP layers
        *("mm_projector", "multi_modal_projector"),
    )
)
# slime's list of Megatron parameters, by what its converters make of them: the last module.
_SLIME: Final = frozenset(
    (
        *("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("indexer.wq_b", "indexer.wk"),
        *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
        *("attention.query_key_value", "attention.dense"),  # Bailing's
    )
)
# Last parts of embeddings' names.
_EMBEDDINGS: Final = ("pos_emb", "relative_attention_bias", "shared", "wpe", "wte")
_LAYER: Final = re.compile(r"(?:^|\.)layers\.\d+\.")
# Engines keep these in one tensor with one second scale.
_SHARING: Final = (
    *(("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj")),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    *(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
    ("index_q_proj", "index_k_proj"),
)


def is_plain(name: str) -> bool:
    """Whether no engine quantises a module that is called so: heads, routers, towers."""
    return bool(_PLAIN.find(name))


class Row(NamedTuple):
    """A tensor that is quantised, as the quantiser takes it; names of tensors of one model.

    codes, scales, second, shape: names of what it becomes: second of a second scale (NVFP4) or of
    shape of the weight's shape (INT4), None where there is none.
    share: tensors of one key have one second scale; "": the tensor's own.
    group: the keep-together group of the tensor, 0: none.
    """

    name: str
    kind: str
    reciprocal: bool
    block_rows: int
    block_cols: int
    codes: str
    scales: str
    second: str | None
    shape: str | None
    share: str
    group: int


@dataclass(frozen=True)
class Selection:
    """The tensors of a model that are quantised by a method.

    Attributes:
        rows: one for each, in the model's order.
        tensors: all tensors of the quantised model, the derived ones in place of those that are
            quantised, in the model's order.
        left: tensors of linear layers that the checkpoint holds as they are, though no list of the
            method names them; for a warning.
    """

    method: Method
    rows: tuple[Row, ...]
    tensors: tuple[TensorFacts, ...]
    left: tuple[str, ...] = ()


def select(
    method: Method,
    model: _core.Layout | Iterable[TensorFacts],
    held: Collection[str] | None = None,
    *,
    rule: str = "lists",
) -> Selection:
    """Selects the tensors of a model that are quantised, and derives what they become.

    model: a merged layout, or the facts of every tensor; names of Hugging Face.
    held: names of all tensors of the checkpoint, whose scales then decide; None where there is
    none, and the method's lists decide.  rule: "lists", or "slime" for what slime quantises,
    whatever the checkpoint holds.

    Raises:
        UnsupportedError: a tensor that the method cannot take; the text names it.
        LayoutError: a checkpoint in which nothing is quantised, or in which a tensor is whose
            module the lists name; one of those that share a scale is not quantised; two tensors
            would have one name.  The text names them.
        InvalidArgumentError: a rule that is not known.
    """
    if rule not in RULES:
        raise _core.InvalidArgumentError(f"select={rule!r} is none of {RULES}")
    facts = facts_of(model)
    chosen = _chosen(method, facts, held, rule)
    for fact in chosen:
        method.check(fact)
    taken = {fact.name for fact in chosen}
    shares = _shares(method, taken, {fact.name for fact in facts})
    rows: list[Row] = []
    tensors: list[TensorFacts] = []
    for fact in facts:
        if fact.name in taken:
            row, derived = _derive(method, fact, shares.get(fact.name, ""))
            rows.append(row)
            tensors += derived
        else:
            tensors.append(fact)
    _check_names(tensors)
    left = () if held is None or rule != "lists" else _left(method, facts, held, taken)
    return Selection(method, tuple(rows), tuple(tensors), left)


def _derive(method: Method, fact: TensorFacts, share: str) -> tuple[Row, Sequence[TensorFacts]]:
    derived = method.derived(fact, fact.group)
    row = Row(
        name=fact.name,
        kind=method.kind,
        reciprocal=method.reciprocal,
        block_rows=method.block_rows,
        block_cols=method.block_cols,
        codes=derived.codes.name,
        scales=derived.scales.name,
        second=derived.second and derived.second.name,
        shape=derived.shape and derived.shape.name,
        share=share,
        group=fact.group,
    )
    return row, [each for each in derived if each is not None]


def _chosen(
    method: Method, facts: Sequence[TensorFacts], held: Collection[str] | None, rule: str
) -> Sequence[TensorFacts]:
    if rule == "slime":
        chosen = [fact for fact in facts if _slime(method, fact)]
    elif held is None:
        chosen = [fact for fact in facts if by_lists(method, fact)]
        _check_fused(method, facts)
        _check_entries(method, facts)
    else:
        chosen = [fact for fact in facts if method.scales_name(fact.name) in held]
        _check_lists(method, chosen)
    if not chosen:
        raise _core.LayoutError(_nothing(method, held if rule == "lists" else None))
    return chosen


def by_lists(method: Method, fact: TensorFacts) -> bool:
    """Whether a tensor is quantised by a method's targets and lists alone."""
    return _is_linear(fact) and method.targeted(fact.name) and not method.keeps(fact.name)


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


def _check_entries(method: Method, facts: Iterable[TensorFacts]) -> None:
    """Raises UnsupportedError for an entry that one engine takes for a linear layer and another
    one does not."""
    for fact in facts:
        if _is_linear(fact) and method.targeted(fact.name) and (entry := method.differs(fact.name)):
            raise _core.UnsupportedError(
                f"{fact.name}: quantization_config: {entry!r} means this module to one of SGLang "
                f"and vLLM alone; both know full names: {module_of(fact.name)!r}"
            )


def _is_linear(fact: TensorFacts) -> bool:
    """By name and shape: a weight of a linear layer, or of a stack of experts, that engines
    quantise where no list says otherwise."""
    parts = module_of(fact.name).split(".")
    return (
        fact.name.endswith(".weight")
        and (len(fact.shape) == 2 or (len(fact.shape) == 3 and _has_experts(parts)))
        and 0 not in fact.shape
        and not _PLAIN.find(fact.name)
        and not any("embed" in part for part in parts)
        and not any(word in parts[-1] for word in ("norm", "conv"))
        and parts[-1] not in _EMBEDDINGS
        and (parts[-1] != "output" or any(map(str.isdigit, parts)))  # a head
    )


def _has_experts(parts: Sequence[str]) -> bool:
    return any("expert" in part or "moe" in part for part in parts)


def _slime(method: Method, fact: TensorFacts) -> bool:
    if method.kind == "int4_slime":
        matrix = fact.name.endswith(".weight") and len(fact.shape) >= 2
        return matrix and not method.keeps(fact.name)
    last = module_of(fact.name).rsplit(".", 2)
    named = last[-1] in _SLIME or ".".join(last[-2:]) in _SLIME
    return named and _is_linear(fact) and _LAYER.search(fact.name) is not None


def _check_lists(method: Method, chosen: Iterable[TensorFacts]) -> None:
    for fact in chosen:
        if entry := method.keeps(fact.name):
            raise _core.LayoutError(
                f"{fact.name}: the checkpoint has {method.scales_name(fact.name)}, but by "
                f"{entry!r} of its quantization_config this module is not quantised"
            )


def _left(
    method: Method, facts: Iterable[TensorFacts], held: Collection[str], taken: Collection[str]
) -> tuple[str, ...]:
    return tuple(
        fact.name
        for fact in facts
        if fact.name in held and fact.name not in taken and by_lists(method, fact)
    )


def _nothing(method: Method, held: Collection[str] | None) -> str:
    text = f"{method.kind}: the model has no tensor that is quantised"
    if held is None:
        return f"{text} by the quantization_config"
    return (
        f"{text}: the checkpoint has no {method.scales_name('')} of any of them (Options("
        "checkpoint='') goes by the lists of the quantization_config)"
    )


def _shares(method: Method, taken: Collection[str], names: Collection[str]) -> dict[str, str]:
    """The key of each tensor that shares its second scale with others."""
    found: dict[str, str] = {}
    if method.kind != "nvfp4":
        return found
    for name in taken:
        parent, _, last = module_of(name).rpartition(".")
        together: tuple[str, ...] = next((each for each in _SHARING if last in each), ())
        others = [other for part in together if (other := f"{parent}.{part}.weight") in names]
        if len(others) < 2:
            continue
        for other in others:
            if other not in taken:
                raise _core.LayoutError(
                    f"{name}: it shares its second scale with {other}, which is not quantised"
                )
        found[name] = f"{parent}.{together[0]}"
    return found


def _check_names(tensors: Iterable[TensorFacts]) -> None:
    seen: set[str] = set()
    for each in tensors:
        if each.name in seen:
            raise _core.LayoutError(
                f"{each.name}: the model has it, and so has what quantising makes"
            )
        seen.add(each.name)
