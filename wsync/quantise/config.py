"""The quantization_config of a checkpoint: by which method its weights are quantised.

Read are the forms of transformers' FineGrainedFP8Config ("fp8"; also slime's per-tensor form),
compressed-tensors 0.20 ("compressed-tensors", format "pack-quantized"), SGLang's Fp8Config
("mxfp8") and modelopt's export ("modelopt" with quant_algo "NVFP4").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from wsync import _core

# What may be said beside a configuration: who makes codes and scales, and whether scales are packed
# as DeepGEMM takes them (slime's name of it).
BESIDE: Final = ("producer", "transform_ue8m0")
_MAX_BLOCK: Final = 1 << 31
LISTS: Final = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
LINEAR: Final = "Linear"  # as a target: every linear layer

# Keys that are read by themselves, and those that say nothing of what weights become: of
# activations that are quantised while a server runs, of its KV cache, and of how the checkpoint was
# made.
_READ: Final = {"quant_method", *LISTS}
_SILENT: Final = {
    *("dequantize", "global_compression_ratio", "kv_cache_quant_algo", "kv_cache_scheme"),
    *("packed_modules_mapping", "quantization_status", "version", "producer"),
    *("observer", "observer_kwargs", "zp_dtype"),  # of groups
}
_Known = Mapping[str, tuple[object, ...]]
_ANY: Final[tuple[object, ...]] = ()  # of a key whose values are looked at where they are read
_E4M3: Final[_Known] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "ue8m0"),
}
_NVFP4: Final[_Known] = {"quant_algo": ("NVFP4",), "group_size": (None, 16), "config_groups": _ANY}
# The values of each key that are known, by quant_method.
_METHODS: Final[Mapping[str, _Known]] = {
    "compressed-tensors": {"format": ("pack-quantized",), "config_groups": _ANY},
    "fp8": {**_E4M3, "transform_ue8m0": (None, False, True), "weight_block_size": _ANY},
    "modelopt": _NVFP4,
    "modelopt_fp4": _NVFP4,
    "mxfp8": {**_E4M3, "weight_block_size": (None, [1, 32])},
    "nvfp4": {**_NVFP4, "quant_algo": (None, "NVFP4")},  # miles' name of it
}
_GROUP: Final[_Known] = {
    "format": (None, "pack-quantized"),
    "weights": _ANY,
    "targets": _ANY,
    "input_activations": (None,),
    "output_activations": (None,),
}
_INT4: Final[_Known] = {
    "num_bits": (4,),
    "type": (None, "int"),
    "strategy": ("group",),
    "symmetric": (None, True),
    "dynamic": (None, False),
    "actorder": (None, False, "weight", "static"),  # these two order while calibrating only
}


class TensorFacts(NamedTuple):
    """A tensor as a layout has it: name, dtype, shape, keep-together group."""

    name: str
    dtype: str
    shape: Sequence[int]
    group: int = 0


def facts_of(model: _core.Layout | Iterable[TensorFacts]) -> list[TensorFacts]:
    """The tensors of a layout, or those that are given."""
    if isinstance(model, _core.Layout):
        return [TensorFacts(*model.tensor(index)) for index in range(model.tensor_count)]
    return list(model)


class _Form(NamedTuple):
    """What the tensors of a kind are called behind the weight's name, and their dtypes."""

    codes: str  # suffix
    word: str  # dtype
    per_word: int  # codes in a word
    scales: str
    scale: str  # "": the weight's
    second: str = ""  # of a second scale; "": none
    shape: str = ""  # of the weight's shape; "": none
    stacked: bool = False  # whether published checkpoints have it of [experts, rows, columns]
    in_word: int = 1  # scales of a row of blocks in one word, of which each row has its own


class Derived(NamedTuple):
    """The tensors that a quantised weight becomes; second: a second scale; shape: the weight's."""

    codes: TensorFacts
    scales: TensorFacts
    second: TensorFacts | None
    shape: TensorFacts | None


# kind: as csrc/core/quantise/method.h names it
_FORMS: Final = {
    "fp8_block": _Form("", "float8_e4m3fn", 1, "_scale_inv", "float32", stacked=True),
    "fp8_ue8m0": _Form("", "float8_e4m3fn", 1, "_scale_inv", "float32", stacked=True),
    "fp8_packed": _Form("", "float8_e4m3fn", 1, "_scale_inv", "int32", stacked=True, in_word=4),
    "fp8_tensor": _Form("", "float8_e4m3fn", 1, "_scale", "float32"),
    "int4": _Form("_packed", "int32", 8, "_scale", "", shape="_shape"),
    "int4_slime": _Form("_packed", "int32", 8, "_scale", "", shape="_shape"),
    "mxfp8": _Form("", "float8_e4m3fn", 1, "_scale_inv", "uint8"),
    "nvfp4": _Form("", "uint8", 2, "_scale", "float8_e4m3fn", second="_scale_2"),
}


@dataclass(frozen=True)
class Method:
    """How the weights of a checkpoint are quantised.

    Attributes:
        kind: as csrc/core/quantise/method.h names it: fp8_block, fp8_ue8m0, fp8_packed,
            fp8_tensor, int4, int4_slime, mxfp8 or nvfp4.
        block_rows, block_cols: elements that share a scale; 0 and 0: the whole tensor.
        reciprocal: elements are multiplied by 1 / scale, else divided by scale.
        kept: modules that are not quantised, as the lists of the method have them.
        targets: compressed-tensors' targets; "Linear" stands for every linear layer.
    """

    kind: str
    block_rows: int
    block_cols: int
    reciprocal: bool = False
    kept: tuple[str, ...] = ()
    targets: tuple[str, ...] = (LINEAR,)

    @staticmethod
    def of(config: Mapping[str, Any]) -> Method:
        """The method of a quantization_config, of a whole config.json that has one (also in
        text_config), or of modelopt's hf_quant_config.json.

        With {"producer": {"name": "slime"}} or {"producer": "slime"} in it, inside or outside,
        the arithmetic is slime's where that differs: FP8 blocks are multiplied by 1 / scale, and
        INT4 scales go by another rule.  With {"transform_ue8m0": True}, inside or outside, scales
        of FP8 blocks are powers of two, packed as DeepGEMM's kernels take them.

        Raises:
            UnsupportedError: a method, a key or a value that is not known; the text names it.
            InvalidArgumentError: no mapping at all.
        """
        given = inner_config(config)
        name = given.get("quant_method")
        if name is None and "quant_algo" in given:
            name = "modelopt"  # in its own file it does not say so
        if not isinstance(name, str) or name not in _METHODS:
            raise _refusal("quant_method", name, f"known are {', '.join(sorted(_METHODS))}")
        if isinstance(block := given.get("weight_block_size"), tuple):
            given = {**given, "weight_block_size": [*block]}
        _check_known(given, _METHODS[name])
        producer = given.get("producer")
        slime = (producer.get("name") if isinstance(producer, Mapping) else producer) == "slime"
        if name == "fp8":
            found = _fp8(given, slime)
        elif name == "compressed-tensors":
            found = _int4(given, slime)
        else:
            found = Method("mxfp8", 1, 32) if name == "mxfp8" else Method("nvfp4", 1, 16)
        return replace(found, kept=_texts(given, *LISTS))

    @property
    def form(self) -> _Form:
        return _FORMS[self.kind]

    @property
    def text(self) -> str:
        """What a checkpoint's reader has to know of it, whoever made the codes."""
        block = f" of {self.block_rows} x {self.block_cols}" if self.block_rows else ""
        return self.kind.removesuffix("_slime") + block

    @property
    def published(self) -> Method:
        """The method as checkpoints have it, which keep scales as they come."""
        return replace(self, kind="fp8_ue8m0") if self.kind == "fp8_packed" else self

    def scales_name(self, name: str) -> str:
        """The name of a weight's scales."""
        return name + self.form.scales

    def derived(self, weight: TensorFacts, group: int = 0) -> Derived:
        """What becomes of a weight that `check` has passed."""
        form, shape = self.form, tuple(weight.shape)
        *outer, rows, cols = shape
        grid: tuple[int, ...] = (1,)
        if form.in_word > 1:
            grid = (*outer, rows, -(-cols // (self.block_cols * form.in_word)))
        elif self.block_rows:
            grid = (*outer, -(-rows // self.block_rows), -(-cols // self.block_cols))
        words = (*outer, rows, -(-cols // form.per_word))

        def fact(suffix: str, dtype: str, shape: tuple[int, ...]) -> TensorFacts:
            return TensorFacts(weight.name + suffix, dtype, shape, group)

        return Derived(
            codes=fact(form.codes, form.word, words),
            scales=fact(form.scales, form.scale or weight.dtype, grid),
            second=fact(form.second, "float32", ()) if form.second else None,
            shape=fact(form.shape, "int64", (2,)) if form.shape else None,
        )

    def check(self, weight: TensorFacts) -> None:
        """Raises UnsupportedError, by name, for a tensor whose shape no checkpoint of the method
        has."""
        name, shape = weight.name, tuple(weight.shape)
        why = ""
        if len(shape) != 2 and not (len(shape) == 3 and self.form.stacked):
            why = "matrices are quantised, and in FP8 blocks experts that are stacked"
        elif self.block_rows == 1 and shape[-1] % self.block_cols:
            why = f"its {shape[-1]} columns are no multiple of {self.block_cols}"
        if why:
            raise _core.UnsupportedError(f"{name} {shape}: {self.kind}: {why}")

    def keeps(self, name: str) -> str:
        """The entry of the lists by which a tensor stays plain; "": none."""
        return self._kept.find(name)

    def targeted(self, name: str) -> bool:
        """Whether the targets name a tensor that belongs to a linear layer."""
        return LINEAR in self.targets or self._targets.find(name) != ""

    @cached_property
    def _kept(self) -> Modules:
        return Modules(self.kept)

    @cached_property
    def _targets(self) -> Modules:
        return Modules(self.targets)


def module_of(name: str) -> str:
    """The module of a tensor; fused experts are parameters whose own name is a module's in others
    ("experts.gate_up_proj")."""
    return name.removesuffix(".weight")


class Modules:
    """A list that names modules: whole parts of their names in a row ("mlp.gate"), names with `*`,
    of a whole name or of one part, and regular expressions behind "re:".

    Lists of whole models have hundreds of entries, and models ten thousands of tensors: names are
    looked up.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._names: dict[str, str] = {}
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for entry in entries:
            if entry.startswith("re:"):
                self._patterns.append((entry, re.compile(entry[3:])))
            elif "*" in entry:
                text = ".*".join(map(re.escape, entry.split("*")))
                if "." not in entry:
                    text = rf"(.*\.)?{text}(\..*)?"
                self._patterns.append((entry, re.compile(rf"{text}\Z")))
            else:
                self._names.setdefault(entry.rstrip("."), entry)

    def find(self, name: str) -> str:
        """The entry that means a tensor; "": none."""
        module = module_of(name)
        parts = module.split(".") if self._names else []
        for first in range(len(parts)):
            for last in range(first, len(parts)):
                if found := self._names.get(".".join(parts[first : last + 1])):
                    return found
        return next((entry for entry, pattern in self._patterns if pattern.match(module)), "")


def _refusal(key: str, value: object, known: str) -> _core.UnsupportedError:
    return _core.UnsupportedError(f"quantization_config: {key}={value!r}: {known}")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of quantised weights; None where it says nothing."""
    for part in (config, config.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(found, Mapping) and found:
            return found
    return None


def inner_config(config: object) -> Mapping[str, Any]:
    """The configuration inside of what a file has around it, with what is said beside it.  Raises
    InvalidArgumentError for what is no mapping."""
    if not isinstance(config, Mapping):
        raise _core.InvalidArgumentError(
            f"quantization_config={config!r:.200}: the mapping of a config.json is wanted"
        )
    found = quantization_config(config) or config
    inner = found.get("quantization")  # of hf_quant_config.json
    if isinstance(inner, Mapping) and "quant_method" not in found:
        found = {**inner, **_beside(found)}
    return {**found, **_beside(config)}


def _beside(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: config[key] for key in BESIDE if key in config}


def _check_known(config: Mapping[str, Any], known: _Known, where: str = "") -> None:
    """Refuses other values than those that are known, and keys that are not known and set."""
    for key, values in known.items():
        if values and config.get(key) not in values:
            expected = " or ".join(map(repr, values))
            raise _refusal(f"{where}{key}", config.get(key), f"known is {expected}")
    for key in sorted(config.keys() - known.keys() - _READ - _SILENT):
        if config[key] not in (None, False, "", (), [], {}) and not _counts_zeros(key, config[key]):
            raise _refusal(
                f"{where}{key}", config[key], "it is not known what this does to weights"
            )


def _counts_zeros(key: str, value: object) -> bool:
    """Older versions of compressed-tensors count zeros, and say that these are stored as all else
    is: "dense"."""
    return (
        key == "sparsity_config" and isinstance(value, Mapping) and value.get("format") == "dense"
    )


def _texts(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """All texts of some lists; one text stands for a list of it."""
    found: dict[str, None] = {}
    for key in keys:
        value = config.get(key) or []
        each = [value] if isinstance(value, str) else value
        if not isinstance(each, Sequence) or not all(isinstance(one, str) for one in each):
            raise _refusal(key, value, "a list of names is wanted")
        found.update(dict.fromkeys(each))
    return tuple(found)


def _fp8(config: Mapping[str, Any], slime: bool) -> Method:
    """transformers' FineGrainedFP8Config, and without a block size slime's per-tensor form."""
    block = config.get("weight_block_size")
    power = next((key for key in ("transform_ue8m0", "scale_fmt") if config.get(key)), "")
    if power and block != [128, 128]:
        raise _refusal("weight_block_size", block, f"known with {power} is [128, 128]")
    if block is None:
        return Method("fp8_tensor", 0, 0)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(_is_size, block)):
        raise _refusal("weight_block_size", block, "[rows, columns] is wanted")
    kinds = {"transform_ue8m0": "fp8_packed", "scale_fmt": "fp8_ue8m0"}
    rows, cols = block
    return Method(kinds.get(power, "fp8_block"), rows, cols, reciprocal=slime and not power)


def _int4(config: Mapping[str, Any], slime: bool) -> Method:
    """compressed-tensors' groups, all of one size."""
    targets: dict[str, None] = {}
    sizes: dict[Any, None] = {}
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        _check_known(group, _GROUP, f"config_groups.{name}.")
        _check_known({**weights, "group_size": None}, _INT4, f"config_groups.{name}.weights.")
        targets.update(dict.fromkeys(_texts(group, "targets") or (LINEAR,)))
        sizes[weights.get("group_size")] = None
    size, *others = sizes or [0]
    if others or not _is_size(size) or size % 8:
        wanted = "one group_size for all groups, a multiple of 8, is wanted"
        raise _refusal("config_groups", [*sizes], wanted)
    return Method("int4_slime" if slime else "int4", 1, size, targets=tuple(targets))


def _is_size(size: Any) -> bool:
    return type(size) is int and 0 < size < _MAX_BLOCK
