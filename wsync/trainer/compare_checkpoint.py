"""Compares what a trainer holds with the checkpoint of its model: names, shapes and dtypes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from wsync import _core
from wsync.checkpoints.safetensors_layout import INDEX, SINGLE, Checkpoint, system_calls
from wsync.report import listed

_log = logging.getLogger(__name__)


def compare(model: _core.Layout, folder: str | os.PathLike[str]) -> None:
    """Warns of tensors that only the checkpoint has, and of other dtypes.

    A folder without safetensors files (a name on the Hugging Face hub, say) and one that cannot be
    read are not compared; the log says so.

    Raises:
        LayoutError: tensors that the checkpoint does not have, or has in other shapes; the text
            names them.  Of a quantised checkpoint, whose tensors have other names, only a warning.
    """
    path = Path(folder)
    try:
        with system_calls(path):
            known = (path / INDEX).exists() or (path / SINGLE).exists()
        if not known:
            _log.info("%s has no safetensors files: the trainer's names are not compared", folder)
            return
        places = Checkpoint(folder).places
        quantised = _is_quantised(path)
    except _core.WsyncError as error:
        _log.warning("the trainer's names are not compared with a checkpoint: %s", error)
        return
    facts = [model.tensor(index)[:3] for index in range(model.tensor_count)]
    unknown = [name for name, _, _ in facts if name not in places]
    shapes = [
        f"{name} {shape} where it has {places[name].shape}"
        for name, _, shape in facts
        if name in places and tuple(shape) != places[name].shape
    ]
    wrong = [
        f"{text}: {listed(names)}"
        for text, names in (("it has no", unknown), ("other shapes", shapes))
        if names
    ]
    if wrong and not quantised:
        raise _core.LayoutError(
            f"the trainer's tensors are not those of {folder}: {'; '.join(wrong)} (Options"
            "(checkpoint=) names another folder, or none by '')"
        )
    for text in wrong:
        _log.warning("%s, whose tensors are quantised: %s", folder, text)
    kept = {name for name, _, _ in facts}
    _warn(f"only {folder} has", [name for name in places if name not in kept])
    dtypes = {name: place.dtype for name, place in places.items()}
    odd = [f"{n} ({dtypes[n]}, here {d})" for n, d, _ in facts if n in dtypes and d != dtypes[n]]
    _warn(f"{folder} has another dtype of", odd)


def _warn(text: str, names: Sequence[str]) -> None:
    if names:
        _log.warning("%s %s", text, listed(names))


def _is_quantised(folder: Path) -> bool:
    """By the model's configuration, if there is one."""
    with system_calls(folder):
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return False
    return isinstance(config, dict) and bool(config.get("quantization_config"))
