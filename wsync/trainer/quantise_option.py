"""What becomes of a model's tensors by Options.quantise."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from wsync import _core
from wsync.handles.base import EngineHandle
from wsync.module_tensors.names_in_messages import listed
from wsync.module_tensors.quantised_names import group_of_weight
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
from wsync.quantise.selection import Selection, by_lists, is_plain, select
from wsync.trainer.checkpoint_check import compare, config_in, has_codes, places_of

_log = logging.getLogger(__name__)

# The list that SGLang and vLLM read, by quant_method; "ignore" with others.
_WRITTEN: Final = {"fp8": "modules_to_not_convert", "mxfp8": "ignored_layers"}


def config_of(options: Options) -> Mapping[str, Any] | None:
    """The quantization_config that options mean, without what a file has around it; None where
    weights stay as the trainer has them.

    Raises:
        InvalidArgumentError: the checkpoint's is meant, and no folder is named.
        SystemCallError, LayoutError: the folder has no configuration that can be read.
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
    """The same for checkpoints, which have scales as they come and not packed for an engine."""
    if not isinstance(options.quantise, Mapping):
        return options
    kept = {key: value for key, value in options.quantise.items() if key != "transform_ue8m0"}
    return replace(options, quantise=kept)


def config_to_write(
    options: Options, base: Any, model: _core.Layout
) -> tuple[Mapping[str, Any] | None, str]:
    """The quantization_config to write in a checkpoint that has the configuration of `base` (a
    folder or a transformers configuration), and where it is from: base's own, and base's name; or
    what options mean, and "".  None where weights stay as they are.  See `exact_config` for what
    its lists have to say.

    model: what all ranks hold, which may be codes and scales itself.

    Raises:
        LayoutError: base is quantised by another method, or weights stay as they are and it is
            quantised; the text has both.
        WsyncError: as config_of, and Method.of for what options mean.
    """
    config = config_of(options)
    if config is None and has_codes(model):
        return None, ""
    delivered = "not quantised" if config is None else Method.of(config).text
    said = _said_by(base)
    if said is None:
        if config is None:
            return None, ""
        kept = {key: value for key, value in config.items() if key != "select"}
        return _named(kept), ""
    where = f"base={base!s:.200}" if isinstance(base, str | os.PathLike) else "base"
    try:
        method = Method.of(said)
    except _core.UnsupportedError as error:
        raise _core.LayoutError(f"{where}: {error}; what is delivered is {delivered}") from None
    if method.text != delivered:
        raise _core.LayoutError(
            f"{where}: its quantization_config is {method.text}, but what is delivered is "
            f"{delivered} (Options(quantise=) says how weights are delivered)"
        )
    return _named(inner_config(said)), where


def _named(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the method's name, which only hf_quant_config.json leaves out."""
    return {"quant_method": "modelopt", **config}


def exact_config(
    config: Mapping[str, Any], model: _core.Layout, options: Options, where: str
) -> Mapping[str, Any]:
    """A quantization_config that `config_to_write` has found, with a list that says of every module
    of a quantised model whether it is quantised.

    Engines read short names differently, so modules that stay plain are named in full, but where
    all engines take an entry for them.  Entries that mean what is quantised are left out: tensors
    of Options.checkpoint, or slime's names, have decided against them.  What engines ask FP8
    configurations for is there.

    where: the name of `base`, if the configuration is its own; engines may have been started from
    it.  Raises LayoutError, by name, where it means other modules than are quantised.
    """
    method = Method.of(config)
    facts = facts_of(model)
    names = {each.name for each in facts}
    codes, scales = method.form.codes, method.form.scales
    taken = {
        stem
        for name in names
        if name.endswith(scales) and (stem := name.removesuffix(scales)) + codes in names
    }
    plain = [each for each in facts if len(each.shape) > 1 and _has_weights(each, taken)]
    if method.kind == "nvfp4":
        _log.warning(
            "NVFP4: versions have no input_scale, which no trainer has: engines that start from "
            "one have to take weights alone as NVFP4 (w4a16), or theirs has what lay in memory"
        )
    if where:
        _check_base(method, taken, plain, options, where)
    while wrong := {*map(method.keeps, taken)} - {""}:
        method = replace(method, kept=tuple(each for each in method.kept if each not in wrong))
    full = [
        module_of(each.name)
        for each in plain
        if not method.keeps(each.name) or method.differs(each.name)
    ]
    found = {key: value for key, value in config.items() if key not in LISTS}
    name = str(found.get("quant_method"))
    if name in ("fp8", "mxfp8"):
        found = {"activation_scheme": "dynamic", "fmt": "e4m3", **found}
    if listed := list(dict.fromkeys([*method.kept, *full])):
        found[_WRITTEN.get(name, "ignore")] = listed
    return found


def _has_weights(each: TensorFacts, taken: Collection[str]) -> bool:
    """Whether a tensor of a quantised model is a weight of a plain module, or of its experts."""
    experts = len(each.shape) == 3 and "experts" in each.name.split(".")
    return (experts or each.name.endswith(".weight")) and each.name not in taken


def _check_base(
    method: Method,
    taken: Iterable[str],
    plain: Iterable[TensorFacts],
    options: Options,
    where: str,
) -> None:
    """Raises LayoutError where the lists of base mean other modules than are quantised."""
    hint = "(Options(quantise=) says how weights are delivered)"
    for name in taken:
        if entry := method.keeps(name):
            raise _core.LayoutError(
                f"{where}: by {entry!r} of its quantization_config {name} is not quantised, but "
                f"it is delivered so {hint}"
            )
    if options.checkpoint:  # whose tensors have decided, and engines hold them so
        return
    for each in plain:
        if by_lists(method, each):
            raise _core.LayoutError(
                f"{where}: by its quantization_config {each.name} is quantised, but it is "
                f"delivered as it is {hint}"
            )


def _said_by(base: Any) -> Mapping[str, Any] | None:
    """The quantization_config of a folder, or of a transformers configuration."""
    if isinstance(base, str | os.PathLike):
        try:
            return config_in(Path(base))
        except _core.SystemCallError as error:
            if error.native != errno.ENOENT:
                raise
            return None
    facts = base.to_dict() if hasattr(base, "to_dict") else {}
    return quantization_config(facts)


def tell_rearranged(engines: Sequence[EngineHandle], options: Options, model: _core.Layout) -> None:
    """Tells the handles whether their engines are sent weights that engines rearrange after
    loading.  Raises as config_of, and Method.of."""
    config = config_of(options)
    if config is None:
        rearranges = any(map(_rearranged, facts_of(model)))
    else:
        rearranges = not Method.of(config).kind.startswith("fp8")
    for engine in engines:
        if hasattr(type(engine), "rearranges"):  # and not by __getattr__
            own: Any = engine
            own.rearranges(rearranges)


def _rearranged(part: TensorFacts) -> bool:
    """Whether a tensor is codes of INT4, or scales of NVFP4 or MXFP8."""
    exponents = part.dtype in ("uint8", "float8_e8m0fnu") and part.name.endswith("_scale_inv")
    return exponents or part.name.endswith((".weight_packed", ".weight_scale_2"))


def select_quantised(
    model: _core.Layout, config: Mapping[str, Any], folder: str | None
) -> Selection:
    """Selects by a quantization_config and the checkpoint in a folder, if it has tensors, and
    compares what comes out with that.

    Raises what Method.of, places_of, select and compare do.
    """
    method = Method.of(config)
    places = places_of(folder) if folder else None
    rule = config.get("select", "lists")
    if places is None and rule == "lists":
        unknown = [name for name in method.unknown(facts_of(model)) if not is_plain(name)]
        if unknown:
            _log.warning("quantise: the model has no module called %s", listed(unknown))
    found = select(method, model, places, rule=rule)
    if found.left:
        _log.warning(
            "%s holds tensors as they are that its quantization_config does not except: %s",
            folder,
            listed(found.left),
        )
    if folder and places is not None:
        published = found
        if method.published is not method:
            published = select(method.published, model, places, rule=rule)
        compare(published.tensors, folder)
    return found


def quantise_rules(model: _core.Layout, options: Options) -> list[_core.QuantiseRule] | None:
    """What options have quantised of a model, for the quantiser; None: weights stay as they are.

    Raises what config_of and select_quantised do.
    """
    config = config_of(options)
    if config is None:
        return None
    numbers: dict[str, int] = {"": 0}  # of those that share a scale
    return [
        (
            *(row.name, row.kind, row.reciprocal, row.block_rows, row.block_cols),
            *(row.codes, row.scales, row.second, row.shape),
            numbers.setdefault(row.share, len(numbers)),
            row.group or group_of_weight(row.name),
        )
        for row in select_quantised(model, config, options.checkpoint).rows
    ]
