"""Time that is left of a deadline, and what is looked at meanwhile."""

import time
from collections.abc import Callable
from typing import Final

Check = Callable[[], object]
"""What a wait calls again and again: it raises what ends the wait."""


def left(end: float) -> float:
    """Seconds until a time of time.monotonic()."""
    return max(end - time.monotonic(), 0.0)


MAX_DEADLINE: Final = 3600.0
