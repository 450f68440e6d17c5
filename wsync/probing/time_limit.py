"""How long a worker may take to learn, hardly less than the trainer waits for it, and how far it
is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

from wsync._core import DeadlineError
from wsync.machine.deadline import Deadline

PASSES: Final = 9  # that load_weights makes over all tensors: most are numbered, two have values

_limit: ContextVar[Deadline | None] = ContextVar("wsync_learning", default=None)
_tell: ContextVar[Callable[[], object] | None] = ContextVar("wsync_learning_tell", default=None)


@contextlib.contextmanager
def learning(seconds: float, tell: Callable[[], object] | None = None) -> Iterator[None]:
    """Around what may take so long, in this thread; it calls `check` time and again.  tell: called
    when load_weights has taken one more tensor, PASSES times for each."""
    tokens = _limit.set(Deadline(seconds)), _tell.set(tell)
    try:
        yield
    finally:
        _limit.reset(tokens[0])
        _tell.reset(tokens[1])


def taken() -> None:
    """load_weights takes one more tensor.  DeadlineError as of `check`."""
    check()
    tell = _tell.get()
    if tell is not None:
        tell()


def is_over() -> bool:
    """Whether learning has taken too long."""
    limit = _limit.get()
    return limit is not None and not limit.left


def check() -> None:
    """Raises DeadlineError where learning has taken too long."""
    limit = _limit.get()
    if limit is not None and is_over():
        raise DeadlineError(
            f"learning what load_weights does took over {limit.seconds:.1f} s; the trainer's "
            "Options(deadline=) gives more"
        )


def _end_in_child() -> None:
    """A forked process has nobody to tell, and whose time ends is its parent."""
    _limit.set(None)
    _tell.set(None)


os.register_at_fork(after_in_child=_end_in_child)
