"""Names of tensors in a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FUSED: Final = (".experts.gate_up_proj", ".experts.down_proj")

_LISTED: Final = 5


def listed(names: Iterable[str]) -> str:
    """The first few names in order, and how many more."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def unfused(names: Iterable[str]) -> str:
    """What helps where an engine does not know some names, as the end of a message; or ""."""
    if any(name.endswith(FUSED) for name in names):
        return "; wsync.fsdp.layout(model) gives fused experts the names that checkpoints have"
    return ""
