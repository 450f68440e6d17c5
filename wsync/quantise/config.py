"""The quantization_config of a checkpoint: by which method its weights are quantised.

Read are the forms of transformers' FineGrainedFP8Config ("fp8"; also slime's per-tensor form),
compressed-tensors 0.20 ("compressed-tensors", format "pack-quantized"), SGLang's Fp8Config
("mxfp8") and modelopt's export ("modelopt" with quant_algo "NVFP4").
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from wsync import _core

# What may be said beside a configuration: who makes codes and scales, and whether scales are packed
# as DeepGEMM takes them (slime's name of it).
BESIDE: Final = ("producer", "transform_ue8m0")
_MAX_BLOCK: Final = 1 << 31
LISTS: Final = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_DTYPES: Final = ("float32", "bfloat16", "float16")
LINEAR: Final = "Linear"  # as a target: every linear layer

# Keys that say nothing of what weights become: of activations that are quantised while a server
# runs, of its KV cache, and of how the checkpoint was made.
_SILENT: Final = (
    *("dequantize", "global_compression_ratio", "kv_cache_quant_algo", "kv_cache_scheme"),
    *("packed_modules_mapping", "quantization_status", "version", "producer"),
)


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
        reader = _Reader(inner_config(config))
        name = reader.take("quant_method")
        if name is None and "quant_algo" in reader.left:
            name = "modelopt"  # in its own file it does not say so
        read = _READERS.get(name) if isinstance(name, str) else None
        if read is None:
            raise _refusal("quant_method", name, f"known are {', '.join(sorted(_READERS))}")
        return read(reader)

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
        """Raises UnsupportedError, by name, for a tensor that the method cannot take."""
        name, shape = weight.name, tuple(weight.shape)
        why = ""
        if weight.dtype not in _DTYPES:
            why = f"it is {weight.dtype}; {', '.join(_DTYPES)} can be quantised"
        elif len(shape) == 3 and not self.form.stacked:
            why = "no checkpoint format has experts stacked in it"
        elif len(shape) not in (2, 3):
            why = "matrices can be quantised"
        elif 0 in shape:
            why = "it has no elements"
        elif multiple := self._multiple(shape[-1]):
            why = f"its {shape[-1]} columns are no multiple of {multiple}"
        if why:
            raise _core.UnsupportedError(f"{name} {shape}: {self.kind}: {why}")

    def _multiple(self, cols: int) -> int:
        """What the columns have to be a multiple of and are not; 0: nothing."""
        if self.block_rows != 1:
            return 0
        wanted = math.lcm(self.block_cols, self.form.per_word)
        return wanted if cols % wanted else 0

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


def _says_nothing(key: str, value: object) -> bool:
    """Older versions of compressed-tensors count zeros, and say that these are stored as all else
    is: "dense"."""
    if key == "sparsity_config" and isinstance(value, Mapping) and value.get("format") == "dense":
        return True
    return value in (None, False, "", (), [], {})


class _Reader:
    """Takes the keys of a mapping one by one, and refuses what is left."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self.left = dict(given)
        self._where = where

    def take(self, key: str) -> Any:
        """The value of a key; None where it is not given."""
        return self.left.pop(key, None)

    def one_of(self, key: str, *known: object) -> Any:
        """The value of a key, which has to be one of these."""
        value = self.take(key)
        if not any(type(value) is type(each) and value == each for each in known):
            raise self.refusal(key, value, f"known is {' or '.join(map(repr, known))}")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """[rows, columns]"""
        value = self.take(key)
        if value is None:
            return None
        if (
            not isinstance(value, Sequence)
            or len(value) != 2
            or not all(type(size) is int and 0 < size < _MAX_BLOCK for size in value)
        ):
            raise self.refusal(key, value, "[rows, columns] is wanted")
        return value[0], value[1]

    def texts(self, *keys: str) -> tuple[str, ...]:
        """All texts of some lists; one text stands for a list of it."""
        found: dict[str, None] = {}
        for key in keys:
            value = self.take(key)
            each = [value] if isinstance(value, str) else value
            if each is None:
                continue
            if not isinstance(each, Sequence) or not all(isinstance(one, str) for one in each):
                raise self.refusal(key, value, "a list of names is wanted")
            found.update(dict.fromkeys(each))
        return tuple(found)

    def inner(self, key: str) -> _Reader:
        """A mapping in this one; an empty one where it is not given."""
        value = self.take(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(key, value, "a mapping is wanted")
        return _Reader(value or {}, f"{self._where}{key}.")

    def groups(self) -> list[_Reader]:
        groups = self.inner("config_groups")
        return [groups.inner(name) for name in list(groups.left)]

    def end(self, *silent: str) -> None:
        """Refuses keys that nothing has asked for and that are set; silent: what may be."""
        for key, value in self.left.items():
            if key not in silent and not _says_nothing(key, value):
                raise self.refusal(key, value, "it is not known what this does to weights")

    def refusal(self, key: str, value: object, known: str) -> _core.UnsupportedError:
        return _refusal(f"{self._where}{key}", value, known)


def _by_slime(reader: _Reader) -> bool:
    producer = reader.take("producer")
    return (producer.get("name") if isinstance(producer, Mapping) else producer) == "slime"


def _fp8(reader: _Reader) -> Method:
    """transformers' FineGrainedFP8Config, and without a block size slime's per-tensor form."""
    slime = _by_slime(reader)
    reader.one_of("fmt", None, "e4m3")
    reader.one_of("activation_scheme", None, "dynamic")
    power = reader.one_of("scale_fmt", None, "ue8m0") and "scale_fmt"
    packed = reader.one_of("transform_ue8m0", None, False, True) and "transform_ue8m0"
    block = reader.block("weight_block_size")
    kept = reader.texts("ignored_layers", "modules_to_not_convert")
    reader.end(*_SILENT)
    if (key := packed or power) and block != (128, 128):
        raise reader.refusal("weight_block_size", block, f"known with {key} is [128, 128]")
    if block is None:
        return Method("fp8_tensor", 0, 0, kept=kept)
    if packed:
        return Method("fp8_packed", *block, kept=kept)
    if power:
        return Method("fp8_ue8m0", *block, kept=kept)
    return Method("fp8_block", *block, reciprocal=slime, kept=kept)


def _mxfp8(reader: _Reader) -> Method:
    reader.one_of("fmt", None, "e4m3")
    reader.one_of("activation_scheme", None, "dynamic")
    reader.one_of("scale_fmt", None, "ue8m0")
    block = reader.block("weight_block_size")
    if block not in (None, (1, 32)):
        raise reader.refusal("weight_block_size", block, "known is [1, 32]")
    kept = reader.texts("ignored_layers", "modules_to_not_convert")
    reader.end(*_SILENT)
    return Method("mxfp8", 1, 32, kept=kept)


def _compressed_tensors(reader: _Reader) -> Method:
    slime = _by_slime(reader)
    reader.one_of("format", "pack-quantized")
    kept = reader.texts("ignore")
    targets: dict[str, None] = {}
    sizes = []
    for group in reader.groups():
        group.one_of("format", None, "pack-quantized")
        group.one_of("input_activations", None)
        group.one_of("output_activations", None)
        targets.update(dict.fromkeys(group.texts("targets") or (LINEAR,)))
        weights = group.inner("weights")
        weights.one_of("symmetric", None, True)
        sizes.append(_int4_group(weights))
        group.end()
    reader.end(*_SILENT)
    if len(set(sizes)) != 1:
        raise reader.refusal("config_groups", sizes, "one group_size for all groups is wanted")
    kind = "int4_slime" if slime else "int4"
    return Method(kind, 1, sizes[0], kept=kept, targets=tuple(targets))


def _int4_group(weights: _Reader) -> int:
    """The group size of INT4 weights."""
    weights.one_of("num_bits", 4)
    weights.one_of("type", None, "int")
    weights.one_of("strategy", "group")
    order = weights.take("actorder")
    if order not in (None, False, "weight", "static"):  # these two order while calibrating only
        raise weights.refusal(
            "actorder", order, "columns in the order of activations (g_idx) are not supported"
        )
    weights.one_of("dynamic", None, False)
    size = weights.take("group_size")
    if type(size) is not int or not 0 < size < _MAX_BLOCK or size % 8:
        raise weights.refusal("group_size", size, "a multiple of 8 is wanted")
    # how a calibration found its scales, and the dtype of zero points, if there are any
    weights.end("observer", "observer_kwargs", "zp_dtype")
    return size


def _nvfp4(reader: _Reader) -> Method:
    """modelopt's export, and miles' name of it."""
    reader.one_of("quant_algo", "NVFP4")
    reader.one_of("group_size", None, 16)
    kept = reader.texts("ignore", "exclude_modules")
    reader.end(*_SILENT, "config_groups")  # which say once more what quant_algo says
    return Method("nvfp4", 1, 16, kept=kept)


def _miles_nvfp4(reader: _Reader) -> Method:
    """The same without modelopt's quant_algo."""
    return _nvfp4(_Reader({"quant_algo": "NVFP4", **reader.left}))


_READERS: Final[Mapping[str, Callable[[_Reader], Method]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "modelopt": _nvfp4,
    "modelopt_fp4": _nvfp4,
    "nvfp4": _miles_nvfp4,
}
