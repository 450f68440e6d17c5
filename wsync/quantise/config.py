"""The quantization_config of a checkpoint: the method that quantises its weights.

wsync reads the forms of transformers' FineGrainedFP8Config ("fp8"; also slime's per-tensor form),
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

# Keys that may stand outside a configuration: the program that makes codes and scales, and whether
# scales are packed for DeepGEMM (slime's name for it).
BESIDE: Final = ("producer", "transform_ue8m0")
_MAX_BLOCK: Final = 1 << 31
# Names of layers that stay as they are.  All four keys are read, whatever the method is.
LISTS: Final = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
LINEAR: Final = "Linear"  # as a target: every linear layer

# Keys that are read separately, and keys without an effect on weights: they describe a server's
# activations and KV cache, or how the checkpoint was made.
_READ: Final = {"quant_method", *LISTS}
_SILENT: Final = {
    *("dequantize", "global_compression_ratio", "kv_cache_quant_algo", "kv_cache_scheme"),
    *("packed_modules_mapping", "quantization_status", "version", "producer"),
    *("observer", "observer_kwargs", "zp_dtype"),  # in groups
}
_Known = Mapping[str, tuple[object, ...]]
_ANY: Final[tuple[object, ...]] = ()  # for a key whose values are checked where they are read
_E4M3: Final[_Known] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "ue8m0"),
}
_NVFP4: Final[_Known] = {"quant_algo": ("NVFP4",), "group_size": (None, 16), "config_groups": _ANY}
# The known values of each key, by quant_method.
_METHODS: Final[Mapping[str, _Known]] = {
    "compressed-tensors": {"format": ("pack-quantized",), "config_groups": _ANY},
    "fp8": {**_E4M3, "transform_ue8m0": (None, False, True), "weight_block_size": _ANY},
    "modelopt": _NVFP4,
    "modelopt_fp4": _NVFP4,
    "mxfp8": {**_E4M3, "weight_block_size": (None, [1, 32])},
    "nvfp4": {**_NVFP4, "quant_algo": (None, "NVFP4")},  # miles' name for it
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
    "actorder": (None, False, "weight", "static"),  # the last two reorder only during calibration
}


class TensorFacts(NamedTuple):
    """A tensor as a layout has it: name, dtype, shape, keep-together group."""

    name: str
    dtype: str
    shape: Sequence[int]
    group: int = 0


def facts_of(model: _core.Layout | Iterable[TensorFacts]) -> list[TensorFacts]:
    """The facts of a layout's tensors; given facts are returned as a list."""
    if isinstance(model, _core.Layout):
        return [TensorFacts(*model.tensor(index)) for index in range(model.tensor_count)]
    return list(model)


class _Form(NamedTuple):
    """The tensors that a kind makes of a weight: suffixes after the weight's name, and dtypes."""

    codes: str  # suffix
    word: str  # dtype
    per_word: int  # codes in a word
    scales: str  # suffix
    scale: str  # dtype; "": the weight's
    second: str = ""  # suffix of a second scale; "": none
    shape: str = ""  # suffix of the weight's shape; "": none
    stacked: bool = False  # whether published checkpoints quantise [experts, rows, columns]
    in_word: int = 1  # scales in a word; if more than 1, each row has words of its own


class Derived(NamedTuple):
    """The tensors that replace a quantised weight.  second: a second scale.  shape: holds the
    weight's shape."""

    codes: TensorFacts
    scales: TensorFacts
    second: TensorFacts | None
    shape: TensorFacts | None


# by kind, as csrc/core/quantise/method.h names it
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
        block_rows, block_cols: the block that shares a scale; 0 and 0: the whole tensor.
        reciprocal: whether elements are multiplied by 1 / scale; else they are divided by scale.
        kept: the entries of the lists of modules that are not quantised.
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

        If the quantization_config or the mapping around it has {"producer": {"name": "slime"}} or
        {"producer": "slime"}, slime's arithmetic is used: FP8 blocks are multiplied by 1 / scale,
        and INT4 scales follow slime's rule.  If the quantization_config or the mapping around it
        has {"transform_ue8m0": True}, scales of FP8 blocks are powers of two, packed for DeepGEMM.

        Raises:
            UnsupportedError: a method, a key or a value is not known; the text names it.
            InvalidArgumentError: `config` is not a mapping.
        """
        given = inner_config(config)
        name = given.get("quant_method")
        if name is None and "quant_algo" in given:
            name = "modelopt"  # its own file has no quant_method
        if not isinstance(name, str) or name not in _METHODS:
            raise _refusal("quant_method", name, f"wsync knows only {', '.join(sorted(_METHODS))}")
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
        """The method and its block in words, without the producer of the codes."""
        block = f" of {self.block_rows} x {self.block_cols}" if self.block_rows else ""
        return self.kind.removesuffix("_slime") + block

    @property
    def published(self) -> Method:
        """The method as checkpoints have it: with scales that are not packed."""
        return replace(self, kind="fp8_ue8m0") if self.kind == "fp8_packed" else self

    def scales_name(self, name: str) -> str:
        """The name of a weight's scales."""
        return name + self.form.scales

    def derived(self, weight: TensorFacts, group: int = 0) -> Derived:
        """The tensors that replace a weight, which `check` must have passed."""
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
        """Raises UnsupportedError with the tensor's name if no checkpoint of the method has its
        shape."""
        name, shape = weight.name, tuple(weight.shape)
        why = ""
        if len(shape) != 2 and not (len(shape) == 3 and self.form.stacked):
            why = "only matrices can be quantised; FP8 blocks also take stacked experts"
        elif self.block_rows == 1 and shape[-1] % self.block_cols:
            why = f"its {shape[-1]} columns are not a multiple of {self.block_cols}"
        if why:
            raise _core.UnsupportedError(f"{name} {shape}: {self.kind}: {why}")

    def keeps(self, name: str) -> str:
        """The entry of the lists that keeps a tensor plain; "" if none does."""
        return self._kept.find(name)

    def targeted(self, name: str) -> bool:
        """Whether the targets include a linear layer's tensor."""
        return LINEAR in self.targets or self._targets.find(name) != ""

    @cached_property
    def _kept(self) -> Modules:
        return Modules(self.kept)

    @cached_property
    def _targets(self) -> Modules:
        return Modules(self.targets)


def module_of(name: str) -> str:
    """The module of a tensor.  A parameter of fused experts ("experts.gate_up_proj") counts as a
    module, because other models have a module with this name."""
    return name.removesuffix(".weight")


class Modules:
    """A list that names modules.  An entry is a run of whole parts of a name ("mlp.gate"), a name
    or a part with `*`, or a regular expression after "re:".

    A list can have hundreds of entries and a model tens of thousands of tensors, so names are
    looked up in a dict.
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
        """The entry that matches a tensor; "" if none does."""
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
    """The quantization_config in a config.json; None if it has none."""
    for part in (config, config.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(found, Mapping) and found:
            return found
    return None


def inner_config(config: object) -> Mapping[str, Any]:
    """The quantization_config inside a file's configuration, with the BESIDE keys outside of it.
    Raises InvalidArgumentError if `config` is not a mapping."""
    if not isinstance(config, Mapping):
        raise _core.InvalidArgumentError(
            f"quantization_config={config!r:.200}: it must be the mapping of a config.json"
        )
    found = quantization_config(config) or config
    inner = found.get("quantization")  # of hf_quant_config.json
    if isinstance(inner, Mapping) and "quant_method" not in found:
        found = {**inner, **_beside(found)}
    return {**found, **_beside(config)}


def _beside(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: config[key] for key in BESIDE if key in config}


def _check_known(config: Mapping[str, Any], known: _Known, where: str = "") -> None:
    """Raises UnsupportedError if a value is not known, or if a key that is not known is set."""
    for key, values in known.items():
        if values and config.get(key) not in values:
            expected = " or ".join(map(repr, values))
            raise _refusal(f"{where}{key}", config.get(key), f"wsync knows only {expected}")
    for key in sorted(config.keys() - known.keys() - _READ - _SILENT):
        if config[key] not in (None, False, "", (), [], {}) and not _counts_zeros(key, config[key]):
            raise _refusal(
                f"{where}{key}", config[key], "wsync does not know its effect on weights"
            )


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    """Returns a value of a configuration that must be a mapping.  None stands for an empty
    mapping."""
    if not isinstance(value or {}, Mapping):
        raise _refusal(where, value, "it must be a mapping")
    return value or {}


def _counts_zeros(key: str, value: object) -> bool:
    """Whether a sparsity_config only counts zeros: older versions of compressed-tensors write it
    with the format "dense", which means that zeros are stored like other values."""
    return (
        key == "sparsity_config" and isinstance(value, Mapping) and value.get("format") == "dense"
    )


def _texts(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """All strings in the lists of these keys; a single string counts as a list."""
    found: dict[str, None] = {}
    for key in keys:
        value = config.get(key) or []
        each = [value] if isinstance(value, str) else value
        if not isinstance(each, Sequence) or not all(isinstance(one, str) for one in each):
            raise _refusal(key, value, "it must be a list of names")
        found.update(dict.fromkeys(each))
    return tuple(found)


def _fp8(config: Mapping[str, Any], slime: bool) -> Method:
    """transformers' FineGrainedFP8Config or, without a block size, slime's per-tensor form."""
    block = config.get("weight_block_size")
    power = next((key for key in ("transform_ue8m0", "scale_fmt") if config.get(key)), "")
    if power and block != [128, 128]:
        raise _refusal("weight_block_size", block, f"with {power} it must be [128, 128]")
    if block is None:
        return Method("fp8_tensor", 0, 0)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(_is_size, block)):
        raise _refusal("weight_block_size", block, "it must be [rows, columns]")
    kinds = {"transform_ue8m0": "fp8_packed", "scale_fmt": "fp8_ue8m0"}
    rows, cols = block
    return Method(kinds.get(power, "fp8_block"), rows, cols, reciprocal=slime and not power)


def _int4(config: Mapping[str, Any], slime: bool) -> Method:
    """compressed-tensors' groups, which must have one size."""
    targets: dict[str, None] = {}
    sizes: dict[Any, None] = {}
    for name, given in _mapping("config_groups", config.get("config_groups")).items():
        place = f"config_groups.{name}"
        group = _mapping(place, given)  # not the list of a preset scheme: {"W4A16": ["Linear"]}
        weights = _mapping(f"{place}.weights", group.get("weights"))
        _check_known(group, _GROUP, f"{place}.")
        _check_known({**weights, "group_size": None}, _INT4, f"{place}.weights.")
        targets.update(dict.fromkeys(_texts(group, "targets") or (LINEAR,)))
        sizes[weights.get("group_size")] = None
    size, *others = sizes or [0]
    if others or not _is_size(size) or size % 8:
        wanted = "all groups must have one group_size, a multiple of 8"
        raise _refusal("config_groups", [*sizes], wanted)
    return Method("int4_slime" if slime else "int4", 1, size, targets=tuple(targets))


def _is_size(size: Any) -> bool:
    return type(size) is int and 0 < size < _MAX_BLOCK
