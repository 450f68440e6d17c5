"""Compares what a trainer holds with the checkpoint of its model: names, shapes and dtypes."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from wsync import _core
from wsync.checkpoints.safetensors_layout import (
    INDEX,
    SINGLE,
    Checkpoint,
    Place,
    read_config,
    system_calls,
)
from wsync.module_tensors.names_in_messages import listed
from wsync.module_tensors.quantised_names import group_of_parts, is_note
from wsync.quantise.config import TensorFacts, facts_of, quantization_config

_log = logging.getLogger(__name__)

_LAYER: Final = re.compile(r"(?:.*?\.)?layers\.\d+\.")
_FLOATS: Final = ("float32", "bfloat16", "float16")


def places_of(folder: str | os.PathLike[str]) -> Mapping[str, Place] | None:
    """The tensors of a checkpoint; None, and the log says so, for a folder without safetensors
    files (a name on the Hugging Face hub, say).

    Raises SystemCallError or LayoutError for one that cannot be read.
    """
    path = Path(folder)
    with system_calls(path):
        known = (path / INDEX).exists() or (path / SINGLE).exists()
    if known:
        return Checkpoint(folder).places
    _log.info("%s has no safetensors files: the trainer's names are not compared", folder)
    return None


def compare(
    model: _core.Layout | Iterable[TensorFacts],
    folder: str | os.PathLike[str],
    places: Mapping[str, Place] | None = None,
    *,
    quantised: bool = False,
) -> None:
    """Warns of tensors that only the checkpoint has, and of other dtypes.

    model: a layout, or the facts of its tensors.  places: the checkpoint's tensors, if they have
    been read.  quantised: the model's tensors are those of the quantised checkpoint, codes, scales
    and all.  A folder without safetensors files and one that cannot be read are not compared; the
    log says so.

    Raises:
        LayoutError: tensors that the checkpoint does not have, or has in other shapes; the text
            names them.  Where the trainer quantises also codes and scales that it lacks, or has in
            another dtype: engines without wsync convert what they are sent, and keep what they are
            not sent.  Only a warning where the checkpoint is quantised and the trainer does not.
    """
    if places is None:
        try:
            places = places_of(folder)
        except _core.WsyncError as error:
            _log.warning("the trainer's names are not compared with a checkpoint: %s", error)
    if places is None:
        return
    facts = facts_of(model)
    kept = {each.name for each in facts}
    lacking = [name for name in places if name not in kept]
    odd = {
        name: f"{name} ({places[name].dtype}, here {dtype})"
        for name, dtype, _, _ in facts
        if name in places and places[name].dtype != dtype
    }
    wrong = {
        "it has no": [each.name for each in facts if each.name not in places],
        "other shapes": other_shapes(facts, places),
    }
    quantised = quantised or any(is_part(each.name, each.dtype) for each in facts)
    if quantised:
        wrong |= _other_parts(facts, places, odd, lacking)
    texts = [f"{text}: {listed(names)}" for text, names in wrong.items() if names]
    if texts and (quantised or not is_quantised(Path(folder))):
        raise _core.LayoutError(
            f"the trainer's tensors are not those of {folder}: {'; '.join(texts)} (Options"
            "(checkpoint=) names another folder, or none by '')"
        )
    for text in texts:
        _log.warning("%s, whose tensors are quantised: %s", folder, text)
    _warn(f"only {folder} has", lacking)
    _warn(f"{folder} has another dtype of", list(odd.values()))


def _other_parts(
    facts: Sequence[TensorFacts],
    places: Mapping[str, Place],
    odd: Mapping[str, str],
    lacking: Sequence[str],
) -> dict[str, list[str]]:
    """Which of a checkpoint's codes and scales the trainer lacks, or has in another dtype.  It may
    lack whole layers, as those of MTP."""
    parts = {name for name, place in places.items() if is_part(name, place.dtype)}
    parts |= {each.name for each in facts if is_part(each.name, each.dtype)}
    same = {each.name for each in facts if _readable(each, places)}
    layers = {_layer(each.name) for each in facts} | {""}
    return {
        "other dtypes": [text for name, text in odd.items() if name in parts - same],
        "only it has": [name for name in lacking if name in parts and _layer(name) in layers],
    }


def _layer(name: str) -> str:
    """The beginning of a tensor's name that all of its layer have; "": it is in none."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def _readable(each: TensorFacts, places: Mapping[str, Place]) -> bool:
    """Whether a tensor has scales in float32 where engines read any floating-point dtype: Qwen3's
    FP8 checkpoints have bfloat16.  INT4's are of the weights' dtype."""
    stem = each.name.removesuffix("_scale")
    floats = each.name in places and places[each.name].dtype in _FLOATS
    scales = each.name.endswith(("_scale", "_scale_inv")) and f"{stem}_packed" not in places
    return each.dtype == "float32" and floats and scales


def is_part(name: str, dtype: str) -> bool:
    """Whether a tensor is codes or scales."""
    return group_of_parts(name, dtype) != 0 and not is_note(name)


def other_shapes(facts: Iterable[TensorFacts], places: Mapping[str, Place]) -> list[str]:
    """The tensors of which a checkpoint has others, in words.  Scales of whole tensors are () in
    some and (1,) in others."""
    return [
        f"{name} {tuple(shape)} where it has {places[name].shape}"
        for name, _, shape, _ in facts
        if name in places and not _same_shape(shape, places[name].shape)
    ]


def _same_shape(one: Sequence[int], other: Sequence[int]) -> bool:
    return tuple(one) == tuple(other) or (
        max(len(one), len(other)) == 1 and math.prod((*one, *other)) == 1
    )


def _warn(text: str, names: Sequence[str]) -> None:
    if names:
        _log.warning("%s %s", text, listed(names))


def is_quantised(folder: Path) -> bool:
    """By the model's configuration, if there is one; one that cannot be read may say so."""
    try:
        return quantization_config(read_config(folder / "config.json")) is not None
    except _core.LayoutError:
        return False
    except _core.SystemCallError as error:
        return error.native != errno.ENOENT
