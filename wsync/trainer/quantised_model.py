"""What becomes of a model's tensors by Options.quantise."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wsync import _core
from wsync.checkpoints.safetensors_layout import read_config
from wsync.options import Options
from wsync.quantise.config import BESIDE, Method, inner_config, quantization_config
from wsync.quantise.selection import Selection, select
from wsync.report import listed
from wsync.trainer.compare_checkpoint import compare, places_of

_log = logging.getLogger(__name__)


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


def config_in(folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of quantised weights; None where it says nothing.

    Raises SystemCallError, LayoutError: it has no configuration that can be read.
    """
    found = quantization_config(read_config(folder / "config.json"))
    if found is None:
        try:
            found = read_config(folder / "hf_quant_config.json")  # of modelopt
        except _core.SystemCallError as error:
            if error.native != errno.ENOENT:
                raise
    return found


def config_to_write(options: Options, base: Any) -> Mapping[str, Any] | None:
    """The quantization_config that a checkpoint needs beside the configuration of `base`, a folder
    or a transformers configuration; None where that has it, or weights stay as they are.

    Raises:
        LayoutError: base is quantised by another method; the text has both.
        WsyncError: as config_of, and Method.of for what options mean.
    """
    config = config_of(options)
    if config is None:
        return None
    delivered = Method.of(config)
    said = _said_by(base)
    if said is None:
        kept = {key: value for key, value in config.items() if key != "select"}
        return {"quant_method": "modelopt", **kept}  # hf_quant_config.json alone leaves it out
    where = f"base={base!s:.200}" if isinstance(base, str | os.PathLike) else "base"
    try:
        method = Method.of(said)
    except _core.UnsupportedError as error:
        raise _core.LayoutError(
            f"{where}: {error}; what is delivered is {delivered.text}"
        ) from None
    if method.text != delivered.text:
        raise _core.LayoutError(
            f"{where}: its quantization_config is {method.text}, but what is delivered is "
            f"{delivered.text}"
        )
    return None


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


def select_quantised(
    model: _core.Layout, config: Mapping[str, Any], folder: str | None
) -> Selection:
    """Selects by a quantization_config and the checkpoint in a folder, if it has tensors, and
    compares what comes out with that.

    Raises what Method.of, places_of, select and compare do.
    """
    method = Method.of(config)
    places = places_of(folder) if folder else None
    found = select(method, model, places, rule=config.get("select", "lists"))
    if found.left:
        _log.warning(
            "%s holds tensors as they are that its quantization_config does not except: %s",
            folder,
            listed(found.left),
        )
    if folder and places is not None:
        compare(found.tensors, folder, places, quantised=True)
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
            row.group,
        )
        for row in select_quantised(model, config, options.checkpoint).rows
    ]
