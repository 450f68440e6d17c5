"""The known model families, and how a configuration selects one of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from wsync import _core
from wsync.families import blocks, grouped_query, latent_attention, nemotron, qwen3_next, qwen3_vl
from wsync.families.rules import PLACEHOLDER, Expansion, Rule, Together
from wsync.module_tensors.names import key_of

# The programs that load a checkpoint into a model.  Most of them, like Megatron-Bridge and mbridge,
# keep weights as Megatron-Core needs them.  slime exchanges the halves of some, and back on export.
LOADERS = ("megatron", "slime")

# Fields of a Megatron layer's configuration that change the meaning of its bytes, and the values
# that most families need: whether norms count from zero, which channels of a head rotate together,
# and whether an expert's gate and up rows alternate in blocks (Megatron-Core 0.19).
PLAIN: Mapping[str, Any] = {
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
}


@dataclass(frozen=True, eq=False)
class Family:
    """A named table of rules.

    `loaders`: rules that come first for models of a certain loader, by the loader's name.
    `copied`: regular expressions for the beginnings of names, and their replacements.  Unless
    a rule matches, such a parameter is a tensor of the checkpoint, whole on every rank.  `fields`:
    sizes in addition to FIELDS.  `together`: sets of sibling modules, by the last part of their
    names; an engine needs the tensors of a set in one call.  `settings`: fields of Megatron's
    TransformerConfig and the values for which the rules hold.  `oracle`: the program or checkpoint
    that the tests compare the family's tensors with, bit for bit.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    loaders: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    together: Together = ()
    settings: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    oracle: str = ""

    @cached_property
    def sizes(self) -> frozenset[str]:
        """The names of all sizes that the rules need."""
        return frozenset(size for rule in self.rules for size in rule.sizes)

    @cached_property
    def _by_key(self) -> Mapping[str, list[Rule]]:
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            for name in rule.names:
                found.setdefault(key_of(PLACEHOLDER.sub("0", name)), []).append(rule)
        return found

    @property
    def added(self) -> bool:
        """Whether a user has registered the family."""
        return not self.oracle

    def loaded_by(self, loader: str) -> Family:
        """The family for models that this loader has filled."""
        return replace(self, rules=(*self.loaders.get(loader, ()), *self.rules))

    def find(self, name: str) -> tuple[Rule, dict[str, int]]:
        """The rule of a global parameter name and the numbers in that name.

        Raises LayoutError with the names of parameter and family if no rule matches.
        """
        found = self.match(name)
        if found is None:
            raise _core.LayoutError(f"{name}: no rule of the family {self.name!r} matches it")
        return found

    def match(self, name: str) -> tuple[Rule, dict[str, int]] | None:
        """Like `find`, but returns None if no rule matches."""
        for rule in self._by_key.get(key_of(name), ()):
            numbers = rule.match(name)
            if numbers is not None:
                return rule, numbers
        return None

    def copy_of(self, name: str) -> str | None:
        """The checkpoint's name of a parameter.  This is None if the checkpoint does not hold the
        parameter unchanged."""
        for beginning, other in self.copied.items():
            if (match := re.match(beginning, name)) is not None:
                return other + name[match.end() :]
        return None

    def expand(
        self, rule: Rule, name: str, sizes: Mapping[str, int], inferred: int = 0
    ) -> Expansion:
        """`rule.expand` for a parameter.  Raises LayoutError with the name of a missing size."""
        try:
            return rule.expand(sizes, inferred)
        except KeyError as error:
            raise self.lacks(name, error.args[0]) from None

    def lacks(self, name: str, size: str) -> _core.LayoutError:
        """The error for a parameter whose rule needs a size that is missing."""
        size = DERIVED.get(size, (size,))[0]
        fields = " or ".join({**FIELDS, **self.fields}.get(size, (size,)))
        return _core.LayoutError(
            f"{name}: the configuration does not give {fields}, which the family "
            f"{self.name!r} needs for this parameter"
        )


_LOGITS = "logits of transformers 4.57"
# Exports of these programs after they have loaded a checkpoint.
_OLD, _NEW = "Megatron-Bridge 0.3.1", "Megatron-Bridge 0.6.2"
_BOTH = f"{_OLD} and 0.6.2"
_DENSE = (*blocks.EMBEDDING, *blocks.ATTENTION, *blocks.DENSE_MLP)
_LATENT: Any = {"together": latent_attention.LATENT_TOGETHER}
_KIMI: Any = {**_LATENT, "copied": latent_attention.KIMI_VISION}
_SEEING: Any = {"copied": qwen3_vl.VISION, "fields": qwen3_vl.VISION_FIELDS}
_ZERO: Any = {"settings": {**PLAIN, "layernorm_zero_centered_gamma": True}}
_INTERLEAVED: Any = {"settings": {**PLAIN, "rotary_interleaved": True}}
_NEXT: Any = {**_ZERO, "loaders": {"slime": qwen3_next.SLIME_MTP}}
_TABLES: Sequence[tuple[str, tuple[Rule, ...], Any, str]] = (
    ("bailing_moe_v2", grouped_query.BAILING_MOE_V2, {}, _NEW),
    ("deepseek_v3", latent_attention.DEEPSEEK, _LATENT, f"{_BOTH}, {_LOGITS}"),
    ("deepseek_v32", latent_attention.DEEPSEEK_SPARSE, _LATENT, "the rules of glm_moe_dsa"),
    ("glm4", grouped_query.GLM4, _INTERLEAVED, _LOGITS),
    ("glm4_moe", grouped_query.GLM4_MOE, {}, f"{_BOTH}, mbridge 0.15, {_LOGITS}"),
    ("glm4_moe_lite", latent_attention.DEEPSEEK, _LATENT, _NEW),
    (
        "glm_moe_dsa",
        latent_attention.DEEPSEEK_SPARSE,
        _LATENT,
        f"{_NEW}; slime's indexer with documents only",
    ),
    ("gpt_oss", grouped_query.GPT_OSS, {}, f"{_OLD}, {_LOGITS}"),
    ("kimi_k2", latent_attention.DEEPSEEK, _LATENT, "the rules of deepseek_v3"),
    ("kimi_k25", latent_attention.KIMI_K25, _KIMI, f"{_NEW}; MTP with documents only"),
    ("llama", _DENSE, {}, f"{_BOTH}, {_LOGITS}"),
    ("mimo", grouped_query.MIMO, {}, f"{_NEW}, {_LOGITS}"),
    ("minimax_m2", grouped_query.MINIMAX_M2, {}, _NEW),
    ("moonlight", latent_attention.DEEPSEEK, _LATENT, f"{_LOGITS} (deepseek_v3 without q_lora)"),
    (
        "nemotron_h",
        nemotron.NEMOTRON_H,
        {"fields": nemotron.FIELDS},
        f"{_BOTH}, logits of transformers 5.23",
    ),
    ("qwen2", _DENSE, {}, f"{_OLD}, {_LOGITS}"),
    (
        "qwen2_moe",
        (*_DENSE, *blocks.EXPERTS, *blocks.SHARED_EXPERT),
        {},
        "a checkpoint of transformers 4.57",
    ),
    ("qwen3", _DENSE, {}, f"{_OLD}, {_LOGITS}"),
    (
        "qwen3_moe",
        (*_DENSE, *blocks.EXPERTS, *blocks.UNGATED_SHARED_EXPERTS),
        {},
        f"{_BOTH}, {_LOGITS}",
    ),
    ("qwen3_5", (*qwen3_next.QWEN3_5, *qwen3_vl.TOWER), {**_ZERO, **_SEEING}, _NEW),
    ("qwen3_5_moe", (*qwen3_next.QWEN3_5, *qwen3_vl.TOWER), {**_ZERO, **_SEEING}, _NEW),
    ("qwen3_5_moe_text", qwen3_next.QWEN3_5_TEXT, _ZERO, _NEW),
    ("qwen3_5_text", qwen3_next.QWEN3_5_TEXT, _ZERO, _NEW),
    ("qwen3_6_moe", (*qwen3_next.QWEN3_6, *qwen3_vl.TOWER), {**_ZERO, **_SEEING}, _NEW),
    ("qwen3_next", qwen3_next.QWEN3_NEXT, _NEXT, f"{_BOTH}, {_LOGITS}"),
    ("qwen3_vl", qwen3_vl.QWEN3_VL, _SEEING, f"{_NEW}, {_LOGITS}"),
    ("qwen3_vl_moe", qwen3_vl.QWEN3_VL_MOE, _SEEING, f"{_NEW}, {_LOGITS}"),
)
FAMILIES: dict[str, Family] = {
    name: Family(name, rules, oracle=oracle, **options) for name, rules, options, oracle in _TABLES
}

# Families without a table, and the reason.  Megatron-Bridge's mappings make their layouts.
BRIDGED: Mapping[str, str] = {
    "mimo_v2_flash": "its layers differ in their number of query groups",
    "step3p5": "Megatron-Core has a gate for each channel of a head, but the checkpoint has only "
    "the first channel's",
}

# The sets of all families, for tensors whose family is not known.
TOGETHER: Together = tuple(dict.fromkeys(s for f in FAMILIES.values() for s in f.together))


@dataclass(frozen=True)
class Model:
    """What a configuration says about a model."""

    family: Family
    sizes: Mapping[str, int]
    tied: bool

    def words(self, sizes: Iterable[str]) -> str:
        """The values of these sizes as text, under Hugging Face's names."""
        names = {**FIELDS, **self.family.fields}
        made = {*sizes} | {other for size in sizes for other in DERIVED.get(size, ())}
        known = sorted(made & names.keys() & self.sizes.keys())
        return ", ".join(f"{names[size][0]} {self.sizes[size]}" for size in known)


# Parts of names by which slime chooses a converter, in addition to names of families.
_PARTS = {"kimi": "kimi_k2", "qwen36": "qwen3_6_moe"}
_CLASS = re.compile(r"(?:text)?(?:config|model|forcausallm|forconditionalgeneration)$")


def family_of(name: str, *, part: bool = False) -> Family:
    """The family of a model_type ("qwen3_moe") or of the class of a configuration or model
    ("Qwen3MoeConfig", "Qwen3VLForConditionalGeneration").  With `part`, the name may also hold a
    part by which slime chooses a converter ("kimi-k2-instruct").

    Raises:
        UnsupportedError: wsync has no rules for this name.
    """
    plain = _plain(name)
    known = {_plain(each): each for each in (*FAMILIES, *BRIDGED)}
    found = known.get(plain) or known.get(_CLASS.sub("", plain), "")
    if part and not found:
        parts = _PARTS | known
        found = parts.get(max((each for each in parts if each in plain), key=len, default=""), "")
    if found in BRIDGED and found not in FAMILIES:
        raise _core.UnsupportedError(
            f"wsync has no rules for the model family {found!r}: {BRIDGED[found]}; pass "
            "bridge=AutoBridge... to use Megatron-Bridge's mappings"
        )
    if not found:
        raise _core.UnsupportedError(
            f"wsync does not know the model family {name!r}; it knows "
            f"{', '.join(sorted(FAMILIES))}; wsync.families.register adds a family"
        )
    return FAMILIES[found]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Sizes: their names in Hugging Face configurations, then those in Megatron's arguments.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "h": ("hidden_size",),
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers", "num_layers"),
    "mtp": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers"),
    "block": ("mtp_hybrid_override_pattern",),  # one letter for each layer of an MTP block
    "heads": ("num_attention_heads",),
    "g": ("num_key_value_heads", "num_query_groups"),
    "d": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "ffn_hidden_size"),
    "moe_ffn": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared_ffn": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts"),
    # Gated delta nets: heads of keys and of values, channels of each, width of the convolution.
    "gk": ("linear_num_key_heads",),
    "gv": ("linear_num_value_heads",),
    "gdk": ("linear_key_head_dim",),
    "gdv": ("linear_value_head_dim",),
    "conv": ("linear_conv_kernel_dim",),
    "experts": (
        *("num_experts", "n_routed_experts", "num_local_experts"),
        *("moe_num_experts", "num_moe_experts"),
    ),
    # Multi-head latent attention: ranks of the projections, channels of a head without and with
    # rotary positions, and channels of its value.  Megatron's qk_head_dim means the channels
    # without rotary positions; elsewhere it means the sum of both.
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim", "qk_head_dim"),
    "rope": ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    "dv": ("v_head_dim",),
}


# Sizes that `read_model` computes: the first named size divided by the second.
DERIVED: Mapping[str, tuple[str, str]] = {"n": ("heads", "g"), "gn": ("gv", "gk")}


def read_model(
    config: Any,
    model_name: str | None = None,
    loaded_by: str = LOADERS[0],
    *,
    family: Family | None = None,
    checkpoint: Any = None,
) -> Model:
    """Reads family and sizes from a Hugging Face config or from Megatron's (slime's) arguments.

    `model_name` overrides the config's `model_type`; as in slime, it may be a longer name that
    contains the family's.  Sizes that the config lacks are left out; a rule that needs such a size
    raises an error with its name.  `loaded_by`: one of LOADERS.  `family`: overrides all names.
    `checkpoint`: the checkpoint's config.json, if `config` is something else.  Its sizes override
    those of the arguments, which may be Megatron's defaults.
    """
    if loaded_by not in LOADERS:
        raise _core.InvalidArgumentError(
            f"loaded_by={loaded_by!r}: it must be {' or '.join(map(repr, LOADERS))}"
        )
    if family is None:
        name = (
            model_name or getattr(config, "model_type", None) or getattr(config, "model_name", "")
        )
        if not name:
            raise _core.InvalidArgumentError(
                f"{type(config).__name__} has no model_type: pass model_name="
            )
        family = family_of(name, part=name == model_name).loaded_by(loaded_by)
    wanted = {**FIELDS, **family.fields}
    parts = _parts(config)
    read = _read_fields(parts, wanted)
    if getattr(parts[1], "group_query_attention", None) is False:
        read.pop("g", None)  # then Megatron ignores num_query_groups=1 in its arguments
    sizes = {**read, **_read_fields(_parts(checkpoint), wanted)}
    if "ffn" in sizes:
        sizes.setdefault("moe_ffn", sizes["ffn"])  # as Megatron does
    if "g" in family.sizes and sizes.get("heads"):
        _count_groups(parts[1], sizes)
    if "shared" in sizes and "moe_ffn" in sizes:
        sizes.setdefault("shared_ffn", sizes["shared"] * sizes["moe_ffn"])
    ties = _ties(_parts(checkpoint))
    if len(ties) != 1:
        ties = _ties(parts) or {not getattr(parts[1], "untie_embeddings_and_output_weights", True)}
    return Model(family, sizes, any(ties))


def _parts(config: Any) -> tuple[Any, Any]:
    """(configuration, its text model's configuration)."""
    return config, getattr(config, "text_config", None) or config


def _ties(parts: Iterable[Any]) -> set[bool]:
    """The values of tie_word_embeddings in these configurations."""
    found = [getattr(part, "tie_word_embeddings", None) for part in parts]
    return {bool(each) for each in found if each is not None}


def _count_groups(config: Any, sizes: dict[str, int]) -> None:
    """Adds query groups, channels of a head, and the DERIVED sizes.  Not for latent attention."""
    sizes.setdefault("g", sizes["heads"])
    sizes.setdefault("d", sizes.get("h", 0) // sizes["heads"])
    for size, (whole, part) in DERIVED.items():
        if sizes.get(part):
            sizes[size], rest = divmod(sizes.get(whole, 0), sizes[part])
            if rest or not sizes[size]:
                raise _core.LayoutError(
                    f"{type(config).__name__}: {FIELDS[whole][0]} {sizes.get(whole)} is not a "
                    f"multiple of {FIELDS[part][0]} {sizes[part]}"
                )


def read_sizes(config: Any) -> dict[str, int]:
    """The sizes of a Hugging Face configuration, except those of a family's own `fields`."""
    return _read_fields(_parts(config), FIELDS)


def _read_fields(parts: tuple[Any, Any], fields: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The value of each size: that of the first of its names that is set.

    parts: names like "vision_config.hidden_size" are looked up in parts[0], others in parts[1].
    """
    found: dict[str, int] = {}
    for size, names in fields.items():
        values = (_value(parts["." not in name], name) for name in names)
        value = next((v for v in values if v is not None and not isinstance(v, list)), None)
        if value is not None:  # a list, one value for each layer, gives no size
            found[size] = len(value) if isinstance(value, str) else int(value)
    return found


def _value(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part, None)
    return config


def register(
    name: str,
    rules: Iterable[Rule],
    *,
    fields: Mapping[str, Sequence[str]] | None = None,
    loaders: Mapping[str, tuple[Rule, ...]] | None = None,
    together: Together = (),
    settings: Mapping[str, Any] | None = None,
) -> Family:
    """Adds a model family for `wsync.megatron.layout` in this process, or replaces a family that
    was added before.

    Args:
        name: the configuration's `model_type`, or a `model_name`; for example "my_model".
        rules: one for each kind of parameter; if two match a name, the first is used.
        fields: sizes in the rules' views that are not in `FIELDS`, with the names of each size in
            configurations.
        loaders: rules that come first for models of a certain loader, by its name ("slime").
        together: sets of sibling modules, by the last part of their names; an engine needs the
            tensors of a set in one call.
        settings: fields of Megatron's TransformerConfig and the values for which the rules hold,
            for example {"layernorm_zero_centered_gamma": False}.  `wsync.megatron.layout` compares
            these fields with every layer's configuration, and refuses a field that a layer's
            configuration lacks.

    Raises:
        InvalidArgumentError: wsync has a family of this name, or a loader is not known.
    """
    if name in FAMILIES and not FAMILIES[name].added:
        raise _core.InvalidArgumentError(f"wsync has a family {name!r} already: take another name")
    if unknown := {*(loaders or {})}.difference(LOADERS):
        raise _core.InvalidArgumentError(
            f"loaders: {min(unknown)!r} is not one of {', '.join(LOADERS)}"
        )
    family = Family(name, tuple(rules), loaders or {}, {}, fields or {}, together, settings or {})
    FAMILIES[name] = family
    return family


def main(argv: Sequence[str] | None = None) -> int:
    """Lists the model families that wsync knows for Megatron-Core trainers, by model_type.  The
    second column names the programs that a family was compared with, bit for bit."""
    argparse.ArgumentParser("wsync families", description=main.__doc__).parse_args(argv)
    width = max(map(len, FAMILIES))
    print(f"{'family':<{width}}  compared with\n")
    for name, family in sorted(FAMILIES.items()):
        print(f"{name:<{width}}  {'added by the user' if family.added else family.oracle}")
    print(f"\nThese need Megatron-Bridge's mappings (bridge=): {', '.join(BRIDGED)}.")
    print("\nwsync.families.register adds a family; pydoc wsync.families shows how.")
    return 0
