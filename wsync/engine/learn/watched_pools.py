"""Thread pools whose tasks are seen as what the thread does that gives them: who watches that one,
also by modes of torch, watches them, and they come one after another.

A task runs in a thread of its pool, and the next one is given when it has ended: unless it waits,
perhaps for what comes after it, as one that fills a bounded queue does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from wsync.engine.learn.attribute_watch import unwatched
from wsync.engine.learn.thread_state import of_this_thread
from wsync.machine.deadline import POLL_SECONDS, Deadline

_IDLE_POLLS: Final = 20  # a second in which a task does nothing
_BUSY_SECONDS: Final = 0.001  # of its thread, in a poll: one that looks for work takes less
_LONGEST: Final = 30.0  # that one may work before the next


class _Block:
    """Around tasks.  late: one of them has not ended in time.  ended: what goes on in the context
    of the block is not seen any more."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self.late, self.ended, self._tell = False, False, tell

    def go_on(self) -> None:
        self.late = True
        self._tell()


_current: ContextVar[_Block | None] = ContextVar("wsync_watched_pools", default=None)
_lock = threading.Lock()
_blocks = 0
_submit: Any = None  # what pools did before the first of them


@contextmanager
def watched_pools(late: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Has tasks that this thread gives to pools, and those that these give, be seen.  Pools of
    others are as always.

    late: called where a task does not end, and from then on tasks run beside each other.
    """
    global _blocks, _submit
    with _lock:
        if not _blocks:
            _submit = ThreadPoolExecutor.submit
            ThreadPoolExecutor.submit = _run  # type: ignore[method-assign]
        _blocks += 1
    block = _Block(late)
    token = _current.set(block)
    try:
        yield
    finally:
        block.ended = True
        _current.reset(token)
        with _lock:
            _blocks = max(_blocks - 1, 0)  # none in a forked process
            if not _blocks:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


class _Task:
    """What a pool is given to run."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.clock = -1  # of its thread
        self.ended_by: BaseException | None = None  # what no `except Exception` catches
        self._given = [(of_this_thread(), function)]

    def __call__(self) -> Any:
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        as_there, function = self._given.pop()  # the pool keeps nothing of it
        try:
            return as_there(function)
        except Exception:
            raise
        except BaseException as error:
            self.ended_by = error
            raise

    def seconds(self) -> float:
        """That its thread has worked."""
        try:
            return time.clock_gettime(self.clock) if self.clock != -1 else 0.0
        except OSError:  # it is gone
            return 0.0


def _run(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    block = _current.get()
    if block is None or block.ended:
        given: Future[Any] = _submit(pool, function, *args, **kwargs)
        return given
    task = _Task(partial(function, *args, **kwargs))
    del function, args, kwargs  # what it is given is the task's alone
    with unwatched():  # of the pool's threads only what they do for these tasks
        future: Future[Any] = _submit(pool, task)
    if not _ends(future, task, block) and not block.late:
        block.go_on()
    if task.ended_by is not None and not block.late:
        raise task.ended_by
    return future


def _ends(future: Future[Any], task: _Task, block: _Block) -> bool:
    limit, idle, before = Deadline(_LONGEST), 0, 0.0
    while not block.late and limit.left and idle < _IDLE_POLLS:
        if wait([future], POLL_SECONDS).done:
            return True
        now = task.seconds()
        idle = idle + 1 if now - before < _BUSY_SECONDS else 0
        before = now
    return future.done()


def _end_in_child() -> None:
    """In a forked process nothing is watched."""
    global _blocks, _lock
    _lock = threading.Lock()
    if ThreadPoolExecutor.submit is _run:
        ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]
    _blocks = 0
    _current.set(None)


os.register_at_fork(after_in_child=_end_in_child)
