"""Checks the settings of layers that do not show in the shapes of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wsync import _core
from wsync.families.registry import Model
from wsync.layout import global_name
from wsync.megatron.global_names import LAYER

if TYPE_CHECKING:
    from torch.nn import Module

# Sizes and Megatron's names for them; shapes show only the product of these sizes.
_SAME_SHAPE = {"g": "num_query_groups", "d": "kv_channels"}


def check_layers(chunks: Sequence[Module], spec: Model) -> None:
    """Raises LayoutError if a layer's configuration gives its bytes another meaning than the
    family's rules do."""
    family = spec.family
    if not family.rules:
        return
    needed: dict[str, tuple[object, str]] = {
        field: (value, f"the family {family.name!r} needs {value}")
        for field, value in family.settings.items()
    }
    for size, field in _SAME_SHAPE.items():
        if size in family.sizes and size not in family.fields:
            said = spec.sizes[size]
            needed[field] = said, f"the configuration says {said} ({spec.words([size])})"
    for path, layer in (each for chunk in chunks for each in chunk.named_modules()):
        config = getattr(layer, "config", None)
        if config is None or LAYER.fullmatch(global_name(path)) is None:
            continue
        for field, (value, text) in needed.items():
            # wsync's own families name fields that some versions of Megatron lack.
            if family.added and field in family.settings and not hasattr(config, field):
                raise _core.LayoutError(
                    f"{path}: {type(config).__name__} has no field {field!r}, but the settings "
                    f"of the family {family.name!r} need it"
                )
            found = getattr(config, field, value)
            if found != value:
                raise _core.LayoutError(f"{path}: the trainer's {field} is {found}, but {text}")
