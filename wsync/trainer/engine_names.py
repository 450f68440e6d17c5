"""Compares the names of tensors with those that engines know, as far as that can be told.

wsync's receiver says what it has no place for.  Many loaders of SGLang and vLLM pass over names
that they do not know without a word, and the engine's weights stay what they were.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from wsync import _core
from wsync.checkpoints.safetensors_layout import Place
from wsync.layout import ADAPTERS, WRAPPERS
from wsync.module_tensors.names_in_messages import listed
from wsync.quantise.config import TensorFacts, facts_of
from wsync.trainer.compare_checkpoint import is_quantised, other_shapes, places_of

_log = logging.getLogger(__name__)

# parts of names that no engine knows: wrappers', adapters' and torch.nn.utils.parametrize's
_NOT_A_MODELS: Final = WRAPPERS | ADAPTERS | {"parametrizations"}
# what DistributedDataParallel, peft and TRL's value heads put before all names of a model
_PREFIXES: Final = ("module.", "base_model.model.", "pretrained_model.")
_VALUE_HEAD: Final = "v_head."
# what engines put themselves before names of a base model or a part, but not before these
_BASES: Final = ("model.", "transformer.")
_WHOLE: Final = (*_BASES, "lm_head.")
_ANYWAY: Final = "(Options(checkpoint='') compares none)"
_DEPTH: Final = 3  # components of a prefix, at most


def check_names(model: _core.Layout, folders: Iterable[str]) -> None:
    """Raises LayoutError, by name, for tensors under the names of a wrapped model, and for
    parameters without elements, which end a server of SGLang.

    folders: of checkpoints, whose own names may be such: Phi-4-multimodal's has adapters.
    """
    facts = facts_of(model)
    names = [each.name for each in facts if not each.name.startswith(_VALUE_HEAD)]
    found = [name for name in names if not _NOT_A_MODELS.isdisjoint(name.split("."))]
    if any(all(name.startswith(prefix) for name in names) for prefix in _PREFIXES):
        found = found or names
    for folder in folders if found else ():
        known = places_in(folder)
        found = [name for name in found if name not in known]
    if found:
        raise _core.LayoutError(
            f"{listed(found)}: names that a wrapper of the model or an adapter has made: "
            "wsync.fsdp.layout(model) takes those of torch's wrappers off, and peft's "
            "merge_and_unload() gives a model without its own (Options(checkpoint=) names a folder "
            "whose tensors have these names, if they are the model's)"
        )
    if hollow := [each.name for each in facts if each.shape == (0,) and "float" in each.dtype]:
        raise _core.LayoutError(
            f"{listed(hollow)}: no elements, as DeepSpeed's ZeRO-3 leaves parameters between "
            "passes: call within deepspeed.zero.GatheredParameters, which has all of them"
        )


def compare_names(
    engine: str, tensors: Sequence[TensorFacts], folder: str, places: Mapping[str, Place]
) -> None:
    """Raises LayoutError where the checkpoint that an engine was started from has the tensors
    without the first components of their names, or in other shapes, unless it is quantised.  Warns
    where it has none of the names.

    engine: its name.  folder: the checkpoint's.  places: its tensors, as places_in has them.
    """
    started = f"engine {engine} was started from {folder}, which has"
    _check_shapes(tensors, folder, places, started)
    names = [each.name for each in tensors]
    if prefix := _prefix(names, places):
        behind = [name for name in names if name.startswith(prefix)]
        raise _core.LayoutError(
            f"{listed(behind)}: {started} these without {prefix!r}, and its own loading may pass "
            f"over names that it does not know {_ANYWAY}"
        )
    if places and not any(name in places for name in names):
        _log.warning("%s: %s none of these names", listed(names), started)


def check_base(tensors: Sequence[TensorFacts], folder: str) -> None:
    """Raises LayoutError where a checkpoint whose configuration versions on a disk get has tensors
    in other shapes, unless it is quantised.  folder: as in places_in."""
    text = f"{folder}, whose configuration every version gets, has"
    _check_shapes(tensors, folder, places_in(folder), text)


def _check_shapes(
    tensors: Sequence[TensorFacts], folder: str, places: Mapping[str, Place], text: str
) -> None:
    others = other_shapes(tensors, places)
    if others and not is_quantised(Path(folder)):
        raise _core.LayoutError(f"{text} other shapes: {listed(others)} {_ANYWAY}")


def check_room(tensors: Sequence[TensorFacts], folder: str) -> None:
    """Raises LayoutError for tensors that are larger than those of the checkpoint that an engine
    was started from: its loaders may take the part of them that there is room for.  folder: as in
    places_in."""
    places = places_in(folder)
    larger = [
        each
        for each in tensors
        if each.name in places and any(map(operator.gt, each.shape, places[each.name].shape))
    ]
    if texts := other_shapes(larger, places):
        raise _core.LayoutError(
            f"{listed(texts)}: {folder}, which the engine was started from, has less, and its own "
            "loading may cut off the rest"
        )


def _prefix(names: Iterable[str], known: Collection[str]) -> str:
    """What stands before names of which none is known, and all would be without it; or ""."""
    found, others = dict[str, None](), set[str]()
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(len(parts), _DEPTH + 1)):
            prefix = ".".join(parts[:depth]) + "."
            rest = name.removeprefix(prefix)
            own = prefix in _BASES and not rest.startswith(_WHOLE)
            if name not in known and rest in known and not own:
                found[prefix] = None
            else:
                others.add(prefix)
    return next((prefix for prefix in found if prefix not in others), "")


def places_in(folder: str) -> Mapping[str, Place]:
    """The tensors of a checkpoint; none where it is not here (""), or has no safetensors files."""
    try:
        return (places_of(folder) if folder else None) or {}
    except _core.WsyncError:  # compare() says so
        return {}
