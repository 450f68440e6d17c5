"""Names of tensors in a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_LISTED: Final = 5


def listed(names: Iterable[str]) -> str:
    """The first few names in order, and how many more."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")
