"""The quantization_config of a checkpoint: by which method its weights are quantised.

Read are the forms of transformers' FineGrainedFP8Config ("fp8"; also slime's per-tensor form),
compressed-tensors 0.20 ("compressed-tensors", format "pack-quantized"), SGLang's Fp8Config
("mxfp8") and modelopt's export ("modelopt" with quant_algo "NVFP4").
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from wsync import _core

_PRODUCERS: Final = ("", "slime")
_MAX_BLOCK: Final = 1 << 31
_LISTS: Final = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_DTYPES: Final = ("float32", "bfloat16", "float16")
_NVFP4_METHODS: Final = ("modelopt", "modelopt_fp4", "nvfp4")

# Keys that say nothing of what weights become: of activations that are quantised while a server
# runs, of its KV cache, and of how the checkpoint was made.
_SILENT: Final = (
    *("dequantize", "global_compression_ratio", "kv_cache_quant_algo", "kv_cache_scheme"),
    *("packed_modules_mapping", "producer", "quantization_status", "version"),
)


class TensorFacts(NamedTuple):
    """A tensor as a layout has it: name, dtype, shape, keep-together group."""

    name: str
    dtype: str
    shape: Sequence[int]
    group: int = 0


class _Form(NamedTuple):
    """What the tensors of a kind are called behind the weight's name, and their dtypes."""

    codes: str  # suffix
    word: str  # dtype
    per_word: int  # codes in a word
    scales: str
    scale: str  # "": the weight's
    further: tuple[str, ...] = ()
    stacked: bool = False  # whether published checkpoints have it of [experts, rows, columns]


# kind: as csrc/core/quantise/method.h names it
_FORMS: Final = {
    "fp8_block": _Form("", "float8_e4m3fn", 1, "_scale_inv", "float32", stacked=True),
    "fp8_ue8m0": _Form("", "float8_e4m3fn", 1, "_scale_inv", "float32", stacked=True),
    "fp8_tensor": _Form("", "float8_e4m3fn", 1, "_scale", "float32"),
    "int4": _Form("_packed", "int32", 8, "_scale", "", ("_shape",)),
    "int4_slime": _Form("_packed", "int32", 8, "_scale", "", ("_shape",)),
    "mxfp8": _Form("", "float8_e4m3fn", 1, "_scale_inv", "uint8"),
    "nvfp4": _Form("", "uint8", 2, "_scale", "float8_e4m3fn", ("_scale_2",)),
}


@dataclass(frozen=True)
class Method:
    """How the weights of a checkpoint are quantised.

    Attributes:
        kind: as csrc/core/quantise/method.h names it: fp8_block, fp8_ue8m0, fp8_tensor, int4,
            int4_slime, mxfp8 or nvfp4.
        block_rows, block_cols: elements that share a scale; 0 and 0: the whole tensor.
        reciprocal: elements are multiplied by 1 / scale, else divided by scale.
        kept: modules that are not quantised: names, runs of whole parts of one ("mlp.gate"), names
            with `*`, and regular expressions behind "re:".
        targets: compressed-tensors' targets; "Linear" stands for every linear layer.
    """

    kind: str
    block_rows: int
    block_cols: int
    reciprocal: bool = False
    kept: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)

    def __post_init__(self) -> None:
        for pattern in (*self.kept, *self.targets):
            _compiled(pattern)  # a wrong one is named before anything else is done

    @staticmethod
    def of(config: Mapping[str, Any], *, producer: str = "") -> Method:
        """The method of a quantization_config, of a whole config.json that has one (also in
        text_config), or of modelopt's hf_quant_config.json.

        producer: whose arithmetic is wanted where several make the same form: "slime" multiplies
        by 1 / scale in FP8 blocks and has its own rule for INT4 scales; "" divides, and scales as
        compressed-tensors does.

        Raises:
            UnsupportedError: a method, a key or a value that is not known; the text names it.
            InvalidArgumentError: no such configuration at all.
        """
        if producer not in _PRODUCERS:
            raise _core.InvalidArgumentError(
                f"producer={producer!r}: known are {', '.join(map(repr, _PRODUCERS))}"
            )
        found = _inner(config)
        name = found.get("quant_method")
        if name is None and found.get("quant_algo") is not None:
            name = "modelopt"
        read = _READERS.get(name) if isinstance(name, str) else None
        if read is None:
            raise _refusal("quant_method", name, f"known are {', '.join(sorted(_READERS))}")
        return read(found, producer)

    @property
    def form(self) -> _Form:
        return _FORMS[self.kind]

    def scales_name(self, name: str) -> str:
        """The name of a weight's scales."""
        return name + self.form.scales

    def derived(self, weight: TensorFacts, group: int = 0) -> tuple[TensorFacts, ...]:
        """The codes, the scales and the further tensors of a weight; `check` has passed it."""
        form, shape = self.form, tuple(weight.shape)
        *outer, rows, cols = shape
        grid: tuple[int, ...] = (1,)
        if self.block_rows:
            grid = (*outer, -(-rows // self.block_rows), -(-cols // self.block_cols))
        words = (*outer, rows, -(-cols // form.per_word))
        found = [
            TensorFacts(weight.name + form.codes, form.word, words, group),
            TensorFacts(weight.name + form.scales, form.scale or weight.dtype, grid, group),
        ]
        for suffix in form.further:
            dtype, whole = _FURTHER[suffix]
            found.append(TensorFacts(weight.name + suffix, dtype, whole, group))
        return tuple(found)

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
        """The entry of the lists by which a tensor is not quantised; "": none."""
        return next((entry for entry in self.kept if self._kept[entry](name)), "")

    def targeted(self, name: str) -> bool:
        """Whether the targets name a tensor that belongs to a linear layer."""
        return any(match(name) for match in self._targets)

    @cached_property
    def _kept(self) -> Mapping[str, Callable[[str], bool]]:
        return {entry: _compiled(entry) for entry in self.kept}

    @cached_property
    def _targets(self) -> Sequence[Callable[[str], bool]]:
        return [
            (lambda _: True) if entry == "Linear" else _compiled(entry) for entry in self.targets
        ]


_FURTHER: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "_shape": ("int64", (2,)),
    "_scale_2": ("float32", ()),
}


def module_of(name: str) -> str:
    """The module of a tensor; fused experts are parameters whose own name is a module's in others
    ("experts.gate_up_proj")."""
    return name.removesuffix(".weight")


def _compiled(entry: str) -> Callable[[str], bool]:
    """Whether an entry of a list means a tensor."""
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry[3:])
        except (re.error, RecursionError, OverflowError) as error:
            raise _core.UnsupportedError(
                f"quantization_config: {entry!r} is no regular expression: {error}"
            ) from None
        return lambda name: pattern.match(module_of(name)) is not None
    if "*" in entry:
        glob = re.compile(".*".join(map(re.escape, entry.split("*"))))
        return lambda name: (
            glob.fullmatch(module_of(name)) is not None
            or any(map(glob.fullmatch, module_of(name).split(".")))
        )
    inner = f".{entry.rstrip('.')}."
    return lambda name: inner in f".{name}."


def _refusal(key: str, value: object, known: str) -> _core.UnsupportedError:
    return _core.UnsupportedError(f"quantization_config: {key}={value!r}: {known}")


def _inner(config: object) -> Mapping[str, Any]:
    """The configuration inside of what a file has around it."""
    for _ in range(3):  # config.json: text_config: quantization_config
        if not isinstance(config, Mapping):
            break
        around = next(
            (
                key
                for key in ("quantization_config", "quantization", "text_config")
                if isinstance(config.get(key), Mapping) and "quant_method" not in config
            ),
            None,
        )
        if around is None:
            return config
        config = config[around]
    raise _core.InvalidArgumentError(
        f"quantization_config={config!r:.200}: the mapping of a checkpoint's config.json is wanted"
    )


class _Reader:
    """Takes the keys of a mapping one by one, and refuses what is left."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self._left = dict(given)
        self._where = where

    def one_of(self, key: str, *known: object) -> Any:
        """The value of a key, one of these; None where it is not given."""
        value = self._left.pop(key, None)
        if not any(
            value is each or (type(value) is type(each) and value == each) for each in known
        ):
            raise self.refusal(key, value, f"known is {' or '.join(map(repr, known))}")
        return value

    def positive(self, key: str) -> int:
        value = self._left.pop(key, None)
        if type(value) is not int or not 0 < value < _MAX_BLOCK:
            raise self.refusal(key, value, "a positive number is wanted")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, or one text; none where it is not given."""
        value = self._left.pop(key, None)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            raise self.refusal(key, value, "a list of names is wanted")
        return tuple(value)

    def kept(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry for key in _LISTS for entry in self.texts(key)))

    def inner(self, key: str) -> Mapping[str, Any] | None:
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(key, value, "a mapping is wanted")
        return value

    def take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def end(self, *silent: str) -> None:
        """Refuses keys that nothing has asked for and that are set; silent: what may be."""
        for key, value in self._left.items():
            if key not in silent and value not in (None, False, "", (), [], {}):
                raise self.refusal(key, value, "it is not known what this does to weights")

    def refusal(self, key: str, value: object, known: str) -> _core.UnsupportedError:
        return _refusal(self._where + str(key), value, known)


def _fp8(config: Mapping[str, Any], producer: str) -> Method:
    """transformers' FineGrainedFP8Config, and without a block size slime's per-tensor form."""
    reader = _Reader(config)
    reader.take("quant_method")
    reader.one_of("fmt", None, "e4m3")
    reader.one_of("activation_scheme", None, "dynamic")
    power = reader.one_of("scale_fmt", None, "ue8m0")
    block = reader.take("weight_block_size")
    kept = reader.kept()
    reader.end(*_SILENT)
    if block is None:
        if power:
            raise reader.refusal("scale_fmt", power, "a weight_block_size is wanted with it")
        return Method("fp8_tensor", 0, 0, kept=kept)
    rows, cols = _block(reader, block)
    if not power:
        return Method("fp8_block", rows, cols, producer == "slime", kept)
    if (rows, cols) != (128, 128):
        raise reader.refusal("weight_block_size", block, "known with scale_fmt is [128, 128]")
    return Method("fp8_ue8m0", rows, cols, kept=kept)


def _block(reader: _Reader, given: Any) -> tuple[int, int]:
    good = (
        isinstance(given, Sequence)
        and len(given) == 2
        and all(type(size) is int and 0 < size < _MAX_BLOCK for size in given)
    )
    if not good:
        raise reader.refusal("weight_block_size", given, "[rows, columns] are wanted")
    return given[0], given[1]


def _mxfp8(config: Mapping[str, Any], producer: str) -> Method:
    reader = _Reader(config)
    _not_of_slime(config, producer)
    reader.take("quant_method")
    reader.one_of("fmt", None, "e4m3")
    reader.one_of("activation_scheme", None, "dynamic")
    reader.one_of("scale_fmt", None, "ue8m0")
    block = reader.take("weight_block_size")
    if block is not None and _block(reader, block) != (1, 32):
        raise reader.refusal("weight_block_size", block, "known is [1, 32]")
    kept = reader.kept()
    reader.end(*_SILENT)
    return Method("mxfp8", 1, 32, kept=kept)


def _not_of_slime(config: Mapping[str, Any], producer: str) -> None:
    if producer == "slime":
        raise _refusal("quant_method", config.get("quant_method"), "slime does not quantise by it")


def _compressed_tensors(config: Mapping[str, Any], producer: str) -> Method:
    reader = _Reader(config)
    reader.take("quant_method")
    reader.one_of("format", "pack-quantized")
    kept = reader.kept()
    groups = _groups(reader)
    reader.end(*_SILENT)
    targets: dict[str, None] = {}
    sizes = set()
    for name, group in groups.items():
        part = _Reader(group, f"config_groups.{name}.")
        part.one_of("input_activations", None)
        part.one_of("output_activations", None)
        part.one_of("format", None, "pack-quantized")
        chosen = part.texts("targets")
        targets.update(dict.fromkeys(chosen))
        for entry in chosen:
            if entry != "Linear" and entry.isidentifier() and entry[0].isupper():
                raise part.refusal(
                    "targets", list(chosen), f"known of classes is 'Linear', not {entry!r}"
                )
        sizes.add(_int4_group(part))
        part.end()
    if len(sizes) > 1:
        raise _refusal(
            "config_groups", sorted(groups), f"group sizes {sorted(sizes)}: one is wanted"
        )
    kind = "int4_slime" if producer == "slime" else "int4"
    return Method(kind, 1, sizes.pop(), kept=kept, targets=tuple(targets) or ("Linear",))


def _groups(reader: _Reader) -> Mapping[str, Mapping[str, Any]]:
    groups = reader.inner("config_groups")
    if not groups or not all(isinstance(group, Mapping) for group in groups.values()):
        raise reader.refusal("config_groups", groups, "a mapping of groups is wanted")
    return groups


def _int4_group(group: _Reader) -> int:
    """The group size of symmetric INT4 weights."""
    weights = _Reader(group.inner("weights") or {}, "weights.")
    weights.one_of("num_bits", 4)
    weights.one_of("type", None, "int")
    if weights.take("symmetric") not in (None, True):
        raise weights.refusal("symmetric", False, "INT4 with zero points is not supported")
    weights.one_of("strategy", "group")
    order = weights.take("actorder")
    if order not in (None, False, "weight", "static"):
        raise weights.refusal(
            "actorder", order, "columns that are ordered by activations (g_idx) are not supported"
        )
    weights.one_of("dynamic", None, False)
    size = weights.positive("group_size")
    # which scales a calibration found is past: updates have none
    weights.end("observer", "observer_kwargs", "zp_dtype")
    if size % 8:
        raise weights.refusal("group_size", size, "a multiple of 8 is wanted")
    return size


def _nvfp4(config: Mapping[str, Any], producer: str) -> Method:
    """modelopt's export, in config.json or in hf_quant_config.json; and miles' name of it."""
    _not_of_slime(config, producer)
    reader = _Reader(config)
    method = reader.take("quant_method")
    algorithm = reader.take("quant_algo")
    if algorithm != "NVFP4" and not (algorithm is None and method == "nvfp4"):
        raise reader.refusal("quant_algo", algorithm, "known is 'NVFP4'")
    if config.get("group_size") is not None:
        reader.one_of("group_size", 16)
    kept = reader.kept()
    if config.get("config_groups") is not None:
        for name, group in _groups(reader).items():
            part = _Reader(group, f"config_groups.{name}.")
            part.texts("targets")
            weights = _Reader(part.inner("weights") or {}, f"config_groups.{name}.weights.")
            weights.one_of("num_bits", 4)
            weights.one_of("type", "float")
            weights.one_of("dynamic", None, False)
            weights.one_of("group_size", 16)
            weights.end()
            part.end("input_activations")
    reader.end(*_SILENT)
    return Method("nvfp4", 1, 16, kept=kept)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], str], Method]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    **dict.fromkeys(_NVFP4_METHODS, _nvfp4),
}
