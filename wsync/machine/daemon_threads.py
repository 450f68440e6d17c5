"""Daemon threads that make calls in order."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from wsync.machine.deadline import POLL_SECONDS, Check, Deadline

_T = TypeVar("_T")
_LAST_SECONDS: Final = 1.0
_ending: Final = weakref.WeakSet[threading.Thread]()  # of closed ones, and of single calls


def result(future: Future[_T], deadline: Deadline, check: Check, late: str) -> _T:
    """What a call of a WorkerThread returns; DeadlineError that begins with `late` after the
    deadline.  `check` is called while this waits."""
    while not wait([future], POLL_SECONDS).done:
        check()
        deadline.check(late)
    return future.result()


class WorkerThread:
    """One daemon thread that makes calls in order.

    A call that never returns costs its thread and what is queued behind it, and keeps neither
    its caller nor, for more than a second, the interpreter from ending, as a ThreadPoolExecutor's
    would.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        # ends the thread where nobody closes this, as where Ctrl-C comes before it is kept
        weakref.finalize(self, self._calls.put, None)
        self._thread = threading.Thread(target=_drive, args=(self._calls,), daemon=True, name=name)
        self._thread.start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Ends the thread after what was submitted; returns at once."""
        _ending.add(self._thread)
        self._calls.put(None)


@atexit.register
def _await_ends() -> None:
    """Lets closed threads and single calls come to their ends.  A daemon thread that Python stops
    while it drops a tensor or a group ends the process by SIGABRT: torch does not bear it."""
    deadline = Deadline(_LAST_SECONDS)
    for thread in list(_ending):
        thread.join(deadline.left)


def start(name: str, call: Callable[[], _T]) -> Future[_T]:
    """Makes one call in a daemon thread of its own."""
    future: Future[_T] = Future()
    # it has its call from the start: an interrupt here leaves no thread that waits for one
    thread = threading.Thread(target=_make, args=(future, call), daemon=True, name=name)
    thread.start()
    _ending.add(thread)
    return future


def _drive(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := calls.get()) is not None:
        _make(*item)
        del item  # the thread must not keep what it is done with


def _make(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, call  # nor may the error, whose traceback holds this frame
