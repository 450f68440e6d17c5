"""How long a worker may take to learn: hardly less than the trainer waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from wsync._core import DeadlineError
from wsync.machine.deadline import Deadline

_limit: ContextVar[Deadline | None] = ContextVar("wsync_learning", default=None)


@contextlib.contextmanager
def learning(seconds: float) -> Iterator[None]:
    """Around what may take so long, in this thread; it calls `check` time and again."""
    token = _limit.set(Deadline(seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def check() -> None:
    """Raises DeadlineError where learning has taken too long."""
    limit = _limit.get()
    if limit is not None and not limit.left:
        raise DeadlineError(
            f"learning what load_weights does took over {limit.seconds:.1f} s; the trainer's "
            "Options(deadline=) gives more"
        )
