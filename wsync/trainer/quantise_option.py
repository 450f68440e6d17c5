"""How Options.quantise changes a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wsync import _core
from wsync.handles.base import EngineHandle
from wsync.handles.sglang_base import ApiHandle
from wsync.module_tensors.names import group_of_weight
from wsync.options import Options
from wsync.quantise.config import BESIDE, Method, TensorFacts, facts_of, inner_config
from wsync.quantise.selection import Selection, select
from wsync.trainer.checkpoint_check import compare, config_in, places_of


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
