"""How Options.quantise changes a model's tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from wsync import _core
from wsync.handles.base import EngineHandle
from wsync.handles.sglang_base import ApiHandle
from wsync.module_tensors.names import group_of_weight, weight_of
from wsync.options import Options
from wsync.quantise.config import (
    BESIDE,
    LISTS,
    Method,
    TensorFacts,
    facts_of,
    inner_config,
    module_of,
    quantization_config,
)
from wsync.quantise.selection import Selection, select
from wsync.trainer.checkpoint_check import compare, config_in, has_codes, places_of

_log = logging.getLogger(__name__)

# the name of the list that SGLang and vLLM read, by quant_method; "ignore" for other methods
_WRITTEN: Final = {"fp8": "modules_to_not_convert", "mxfp8": "ignored_layers"}


def config_of(options: Options) -> Mapping[str, Any] | None:
    """The quantization_config that options choose, without the mapping that a file has around it;
    None if weights stay as the trainer has them.

    Raises:
        InvalidArgumentError: options choose the checkpoint's, but name no folder.
        SystemCallError, LayoutError: the folder's configuration cannot be read.
    """
    given = options.quantise
    if given is None:
        return None
    beside: Mapping[str, Any] = {} if isinstance(given, str) else given
    if not beside.keys() <= set(BESIDE):
        return inner_config(given)
    if not options.checkpoint:
        raise _core.InvalidArgumentError(
            f"quantise={given!r}: checkpoint={options.checkpoint!r} names no folder"
        )
    found = config_in(Path(options.checkpoint))
    return None if found is None else {**inner_config(found), **beside}


def for_files(options: Options) -> Options:
    """The options for writing checkpoints, whose scales are not packed for an engine."""
    if not isinstance(options.quantise, Mapping):
        return options
    kept = {key: value for key, value in options.quantise.items() if key != "transform_ue8m0"}
    return replace(options, quantise=kept)


def config_to_write(options: Options, base: Any, model: _core.Layout) -> Mapping[str, Any] | None:
    """The quantization_config to write in a checkpoint that has the configuration of `base` (a
    folder or a transformers configuration): base's own, or the one that options choose.  None if
    weights stay as they are.  `exact_config` completes its lists.

    model: what all ranks hold, perhaps already codes and scales.

    Raises:
        LayoutError: base is not quantised as the delivered weights are; the text names both.
        WsyncError: the errors of config_of and Method.of.
    """
    config = config_of(options)
    if config is None and has_codes(model):
        return None
    delivered = "not quantised" if config is None else Method.of(config).text
    said = _said_by(base)
    if said is None:
        return None if config is None else _named(config)
    try:
        held = Method.of(said).text
    except _core.UnsupportedError as error:
        held = str(error)
    if held != delivered:
        raise _core.LayoutError(
            f"base={base!s:.200}: its quantization_config is {held}, but what is delivered is "
            f"{delivered} (Options(quantise=) chooses how weights are delivered)"
        )
    return _named(inner_config(said))


def _named(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the method's name, which only hf_quant_config.json leaves out."""
    return {"quant_method": "modelopt", **config}


def exact_config(config: Mapping[str, Any], model: _core.Layout) -> Mapping[str, Any]:
    """A quantization_config of `config_to_write`, with a list of all modules that stay plain.

    Engines read short names differently, so the list has full names.  An FP8 configuration gets the
    entries that engines require.
    """
    method = Method.of(config)
    if method.kind == "nvfp4":
        _log.warning(
            "NVFP4: versions have no input_scale, because no trainer has one.  Engines that start "
            "from a version must use NVFP4 for weights only (w4a16); otherwise their input_scale "
            "is whatever was in memory"
        )
    found = {key: value for key, value in config.items() if key not in LISTS}
    name = str(found.get("quant_method"))
    if name in ("fp8", "mxfp8"):
        found = {"activation_scheme": "dynamic", "fmt": "e4m3", **found}
    plain = [module_of(each.name) for each in facts_of(model) if _is_plain(each)]
    if listed := list(dict.fromkeys([*method.kept, *plain])):
        found[_WRITTEN.get(name, "ignore")] = listed
    return found


def _is_plain(each: TensorFacts) -> bool:
    """Whether a tensor of a quantised model is a plain weight, of a module or of experts."""
    experts = len(each.shape) == 3 and "experts" in each.name.split(".")
    weight = experts or (len(each.shape) > 1 and each.name.endswith(".weight"))
    return weight and not weight_of(each.name, each.dtype)


def _said_by(base: Any) -> Mapping[str, Any] | None:
    """The quantization_config of a folder, or of a transformers configuration."""
    if isinstance(base, str | os.PathLike):
        return config_in(Path(base)) if Path(base, "config.json").exists() else None
    return quantization_config(base.to_dict()) if hasattr(base, "to_dict") else None


def tell_rearranged(engines: Sequence[EngineHandle], options: Options, model: _core.Layout) -> None:
    """Tells the handles whether updates deliver weights that engines rearrange after loading.
    Raises the errors of config_of and Method.of."""
    config = config_of(options)
    if config is None:
        rearranges = any(map(_rearranged, facts_of(model)))
    else:
        rearranges = not Method.of(config).kind.startswith("fp8")
    for engine in engines:
        if isinstance(engine, ApiHandle):
            engine.rearranges(rearranges)


def _rearranged(part: TensorFacts) -> bool:
    """Whether a tensor is codes of INT4, or scales of NVFP4 or MXFP8."""
    exponents = part.dtype in ("uint8", "float8_e8m0fnu") and part.name.endswith("_scale_inv")
    return exponents or part.name.endswith((".weight_packed", ".weight_scale_2"))


def select_quantised(
    model: _core.Layout, config: Mapping[str, Any], folder: str | None
) -> Selection:
    """Selects tensors by a quantization_config and by the checkpoint in a folder, if the folder has
    tensors; compares the result with this checkpoint.

    Raises the errors of Method.of, places_of, select and compare.
    """
    method = Method.of(config)
    places = places_of(folder) if folder else None
    found = select(method, model, places)
    if folder and places is not None:
        published = found
        if method.published is not method:
            published = select(method.published, model, places)
        compare(published.tensors, folder)
    return found


def quantise_rules(model: _core.Layout, options: Options) -> list[_core.QuantiseRule] | None:
    """The quantiser's rules for a model; None if weights stay as they are.

    Raises the errors of config_of and select_quantised.
    """
    config = config_of(options)
    if config is None:
        return None
    found = select_quantised(model, config, options.checkpoint)
    method = found.method
    numbers: dict[str, int] = {"": 0}  # of groups that share a scale
    return [
        (
            *(weight.name, method.kind, method.reciprocal),
            *(method.block_rows, method.block_cols, made.codes.name, made.scales.name),
            made.second and made.second.name,
            made.shape and made.shape.name,
            numbers.setdefault(share, len(numbers)),
            weight.group or group_of_weight(weight.name),
        )
        for weight, made, share in found.rows
    ]
