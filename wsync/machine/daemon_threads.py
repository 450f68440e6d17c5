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
_ending: Final = weakref.WeakSet[threading.Thread]()  # closed threads, and threads of single calls


def result(future: Future[_T], deadline: Deadline, check: Check, late: str) -> _T:
    """Waits for a call and returns its result, calling `check` meanwhile.  After the deadline it
    raises a DeadlineError that begins with `late`."""
    while not wait([future], POLL_SECONDS).done:
        check()
        deadline.check(late)
    return future.result()


class WorkerThread:
    """One daemon thread that makes calls in order.

    If a call never returns, its thread and the calls queued behind it are lost, but its caller can
    go on.  The interpreter waits for it a second at most; with a ThreadPoolExecutor it hangs.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        # ends the thread if nobody closes it, for example because of Ctrl-C before it is kept
        weakref.finalize(self, self._calls.put, None)
        self._thread = threading.Thread(target=_drive, args=(self._calls,), daemon=True, name=name)
        self._thread.start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Ends the thread after the calls that were submitted; returns at once."""
        _ending.add(self._thread)
        self._calls.put(None)


@atexit.register
def _await_ends() -> None:
    """Waits at most a second for closed threads and single calls.  torch ends the process by
    SIGABRT if Python stops a daemon thread that is just freeing a tensor or a group."""
    deadline = Deadline(_LAST_SECONDS)
    for thread in list(_ending):
        thread.join(deadline.left)


def start(name: str, call: Callable[[], _T]) -> Future[_T]:
    """Makes one call in a daemon thread of its own."""
    future: Future[_T] = Future()
    # the thread has its call from the start: an interrupt here leaves no idle thread
    thread = threading.Thread(target=_make, args=(future, call), daemon=True, name=name)
    thread.start()
    _ending.add(thread)
    return future


def _drive(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := calls.get()) is not None:
        _make(*item)
        del item  # the thread must not keep a finished call


def _make(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, call  # the error's traceback holds this frame and must not keep them
