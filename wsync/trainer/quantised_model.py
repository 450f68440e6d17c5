"""What becomes of a model's tensors by Options.quantise."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wsync import _core
from wsync.checkpoints.safetensors_layout import read_config
from wsync.options import Options
from wsync.quantise.config import Method, quantization_config
from wsync.quantise.selection import Selection, select
from wsync.report import listed
from wsync.trainer.compare_checkpoint import compare, places_of

_log = logging.getLogger(__name__)


def config_of(options: Options) -> Mapping[str, Any] | None:
    """The quantization_config that options mean; None where weights stay as the trainer has them.

    Raises:
        InvalidArgumentError: "checkpoint", and no folder is named.
        SystemCallError, LayoutError: the folder has no configuration that can be read.
    """
    if options.quantise is None or isinstance(options.quantise, Mapping):
        return options.quantise
    if not options.checkpoint:
        raise _core.InvalidArgumentError(
            f"quantise={options.quantise!r}: checkpoint={options.checkpoint!r} names no folder"
        )
    folder = Path(options.checkpoint)
    found = quantization_config(read_config(folder / "config.json"))
    if found is None:
        try:
            found = read_config(folder / "hf_quant_config.json")  # of modelopt
        except _core.SystemCallError as error:
            if error.native != errno.ENOENT:
                raise
    return found


def select_quantised(
    model: _core.Layout, config: Mapping[str, Any], folder: str | None
) -> Selection:
    """Selects by a quantization_config and the checkpoint in a folder, if it has tensors, and
    compares what comes out with that.

    Raises what Method.of, places_of, select and compare do.
    """
    method = Method.of(config)
    places = places_of(folder) if folder else None
    found = select(method, model, places)
    if found.left:
        _log.warning(
            "%s holds tensors as they are that its quantization_config does not except: %s",
            folder,
            listed(found.left),
        )
    if folder and places is not None:
        compare(found.tensors, folder, places, quantised=True)
    return found
