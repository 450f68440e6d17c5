"""How long a worker may take to learn, hardly less than the trainer waits for it, and how far it
is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

from wsync._core import DeadlineError
from wsync.machine.deadline import Deadline

PASSES: Final = 8  # that load_weights makes over all tensors: most are numbered, two have values

_learning: ContextVar[tuple[Deadline, Callable[[], object]] | None]
_learning = ContextVar("wsync_learning", default=None)


@contextlib.contextmanager
def learning(seconds: float, tell: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Around what may take so long, in this thread.  tell: called when load_weights has taken one
    more tensor, PASSES times for each."""
    token = _learning.set((Deadline(seconds), tell))
    try:
        yield
    finally:
        _learning.reset(token)


def taken() -> None:
    """load_weights takes one more tensor.  DeadlineError where learning has taken too long."""
    if (found := _learning.get()) is None:
        return
    limit, tell = found
    if not limit.left:
        raise DeadlineError(
            f"learning what load_weights does took over {limit.seconds:.1f} s; the trainer's "
            "Options(deadline=) gives more"
        )
    tell()
