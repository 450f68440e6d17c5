"""Thread pools whose tasks run at once, in the thread that gives them: who watches what that thread
does sees what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

_lock: Final = threading.Lock()
_blocks: list[int] = []  # the threads of those that run
_submit: Any = None  # what pools did before the first of them


@contextmanager
def inline_pools() -> Iterator[None]:
    """Has tasks that this thread gives to pools run at once.  Pools of others are as always."""
    global _submit
    thread = threading.get_ident()
    with _lock:
        if not _blocks:
            _submit = ThreadPoolExecutor.submit
            ThreadPoolExecutor.submit = _run  # type: ignore[method-assign]
        _blocks.append(thread)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(thread)
            if not _blocks:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


def _run(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    if threading.get_ident() not in _blocks:
        found: Future[Any] = _submit(pool, function, *args, **kwargs)
        return found
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future
