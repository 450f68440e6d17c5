"""How long a worker may take to learn: as long as the trainer waits for it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

from wsync._core import DeadlineError

# (when it ends, seconds that it may take)
_limit: ContextVar[tuple[float, float]] = ContextVar("wsync_learning", default=(math.inf, 0.0))


@contextlib.contextmanager
def learning(seconds: float) -> Iterator[None]:
    """Around what may take so long, in this thread; it calls `check` time and again."""
    token = _limit.set((time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def check() -> None:
    """Raises DeadlineError where learning has taken too long."""
    end, seconds = _limit.get()
    if time.monotonic() > end:
        raise DeadlineError(f"learning what load_weights does took over {seconds:.1f} s")
