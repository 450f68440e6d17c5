"""What load_weights looks up, sets and deletes of modules and of tensors while it is tried.

Meanwhile torch.nn.Module, torch.nn.Parameter, torch.Tensor and threading.Thread.start are patched
for all threads of the process.  Other threads go on: requests come in and are counted.  What they
do is theirs, and not put back.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

import torch

from wsync.engine.learn.forms_of_values import ABSENT
from wsync.engine.learn.time_limit import check
from wsync.machine.deadline import POLL_SECONDS

# parameters before tensors: each of the two takes over how it was
WATCHED: Final[tuple[Any, ...]] = (torch.nn.Module, torch.nn.Parameter, torch.Tensor)
_is_compiling: Final = torch.compiler.is_dynamo_compiling
# a class that overrides one of these may pass the patches by
_WAYS: Final = ("__getattribute__", "__setattr__", "__delattr__")
# modules that use a `__dict__` on behalf of what the patches have seen already
_QUIET: Final = (torch.nn.Module.__module__, functools.__name__)


class Watch:
    """What the thread that watches, and threads that it starts meanwhile, look up, set and delete.

    read, changed: told of it, one thread at a time: with the owner, the name, and, of what is
    looked up, the value, or ABSENT.  beside: make what threads that are started run in.
    """

    def __init__(self) -> None:
        self.read: list[Callable[[Any, str, Any], None]] = []
        self.changed: list[Callable[[Any, str], None]] = []
        self.beside: list[Callable[[], AbstractContextManager[object]]] = []
        self._threads: set[int] = set()
        self._telling = threading.RLock()  # who is told looks up attributes, too
        self._looked_up: set[tuple[int, str]] = set()
        self._changed: set[tuple[int, str]] = set()
        self._own_ways: dict[type, bool] = {}  # whether these classes have some

    def was_looked_up(self, owner: Any, name: str) -> bool:
        """Whether what the attribute holds may have been changed."""
        return (id(owner), name) in self._looked_up or self._hides(owner)

    def was_changed(self, owner: Any, name: str, *, new: bool) -> bool:
        """Whether the attribute itself may have been set or deleted.  new: it was not there before.
        A functools.cached_property is set where it is looked up."""
        key = id(owner), name
        return key in self._changed or (new and key in self._looked_up) or self._hides(owner)

    def _hides(self, owner: Any) -> bool:
        """Whether it may have been changed in ways that are not seen."""
        kind = type(owner)
        if kind not in self._own_ways:
            classes = list(itertools.takewhile(lambda base: base not in WATCHED, kind.__mro__))
            ways = any(way in vars(base) for base in classes for way in _WAYS)
            self._own_ways[kind] = ways or len(classes) == len(kind.__mro__)
        return self._own_ways[kind] or (id(owner), "__dict__") in self._looked_up

    @contextmanager
    def patches(self) -> Iterator[None]:
        with ExitStack() as stack:
            _running.append(self)
            stack.callback(_forget, self)
            for kind in WATCHED:
                looking_up = functools.partial(self._looking_up, kind)
                stack.enter_context(instead(kind, "__getattribute__", looking_up))
                for way in ("__setattr__", "__delattr__"):
                    stack.enter_context(instead(kind, way, self._changing))
            stack.enter_context(instead(threading.Thread, "start", self._starting))
            stack.enter_context(self.this_thread())
            yield

    @contextmanager
    def this_thread(self, *, watched: bool = True) -> Iterator[None]:
        """watched: whether this thread is, in the block."""
        thread = threading.get_ident()
        before = thread in self._threads
        (self._threads.add if watched else self._threads.discard)(thread)
        try:
            yield
        finally:
            (self._threads.add if before else self._threads.discard)(thread)

    def watches_this_thread(self) -> bool:
        return threading.get_ident() in self._threads

    def _looking_up(self, kind: Any, find: Callable[[Any, str], Any]) -> Any:
        def look_up(owner: Any, name: str) -> Any:
            if _is_compiling():  # another thread's module: this is what a compiler can follow
                return super(kind, owner).__getattribute__(name)
            if threading.get_ident() not in self._threads:
                return find(owner, name)
            if name != "__dict__" or not _is_quiet(sys._getframe(1)):
                self._looked_up.add((id(owner), name))
            try:
                value = find(owner, name)
            except AttributeError:
                # a tensor or a part of its own, or what a __getattr__ makes up, is found next
                self._tell(self.read, owner, name, ABSENT)
                raise
            self._tell(self.read, owner, name, value)
            return value

        return look_up

    def _tell(self, told: list[Callable[..., None]], *what: Any) -> None:
        with self._telling:
            for tell in told:
                tell(*what)

    def _changing(self, act: Callable[..., None]) -> Any:
        def change(owner: Any, name: str, *value: Any) -> None:
            if threading.get_ident() not in self._threads:
                return act(owner, name, *value)
            self._changed.add((id(owner), name))
            try:
                act(owner, name, *value)
            finally:
                self._tell(self.changed, owner, name)

        return change

    def _starting(self, start: Callable[[threading.Thread], None]) -> Any:
        def begin(thread: threading.Thread) -> None:
            if threading.get_ident() in self._threads:
                own, run, beside = vars(thread).get("run"), thread.run, list(self.beside)

                def watched() -> None:
                    del thread.run  # a thread that refers to itself would keep what it was given
                    if own is not None:
                        thread.run = own  # type: ignore[method-assign]
                    with ExitStack() as stack:
                        for make in (self.this_thread, *beside):
                            stack.enter_context(make())
                        run()

                thread.run = watched  # type: ignore[method-assign]
            start(thread)

        return begin


_current: ContextVar[Watch | None] = ContextVar("wsync_attribute_watch", default=None)
_running: Final[list[Watch]] = []  # the first of one thread, and those within


def _forget(watch: Watch) -> None:
    with suppress(ValueError):  # in a forked process
        _running.remove(watch)


def watched_as_here() -> Callable[[], AbstractContextManager[object]]:
    """For another thread: a context in which it is watched as this one is now."""
    return functools.partial(_entered, [w.this_thread for w in _running if w.watches_this_thread()])


def unwatched() -> AbstractContextManager[object]:
    """A context in which this thread is not watched, nor are those that it starts."""
    mine = [watch for watch in _running if watch.watches_this_thread()]
    return _entered([functools.partial(watch.this_thread, watched=False) for watch in mine])


@contextmanager
def _entered(made: list[Callable[[], AbstractContextManager[object]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for make in made:
            stack.enter_context(make())
        yield


def watch() -> Watch:
    """The one that this thread has begun, or one that it may begin."""
    return _current.get() or Watch()


@contextmanager
def watching(
    found: Watch | None = None,
    *,
    read: Callable[[Any, str, Any], None] | None = None,
    changed: Callable[[Any, str], None] | None = None,
    beside: Callable[[], AbstractContextManager[object]] | None = None,
) -> Iterator[None]:
    """Notes what the block looks up, sets and deletes.  found: if it is not `watch()`."""
    found = found or watch()
    with ExitStack() as stack:
        if _current.get() is None:
            stack.enter_context(_patching())
        if _current.get() is not found:
            stack.callback(_current.reset, _current.set(found))
            stack.enter_context(found.patches())
        added: list[tuple[list[Any], Any]]
        added = [(found.read, read), (found.changed, changed), (found.beside, beside)]
        for told, tell in added:
            if tell is not None:
                told.append(tell)
                stack.callback(told.remove, tell)
        yield


_patches: Final[list[Callable[[], None]]] = []  # what undoes them


@contextmanager
def instead(kind: Any, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Has a class do something otherwise, and then as before: a profiler may have changed it."""
    former = vars(kind).get(name)

    def undo() -> None:
        if former is not None:
            setattr(kind, name, former)
        elif name in vars(kind):
            delattr(kind, name)

    _patches.append(undo)  # another thread may fork at any time
    try:
        setattr(kind, name, other(getattr(kind, name)))
        yield
    finally:
        if undo in _patches:  # not in a forked process
            undo()
            _patches.remove(undo)


_lock = threading.Lock()


@contextmanager
def _patching() -> Iterator[None]:
    """Around patches, which one thread makes at a time, also in what it calls.  DeadlineError where
    another one does not end them in the time there is to learn."""
    lock = _lock
    while not lock.acquire(timeout=POLL_SECONDS):
        check()
    try:
        yield
    finally:
        lock.release()


def _end_in_child() -> None:
    """In a forked process nothing is watched."""
    global _lock
    _lock = threading.Lock()
    while _patches:
        _patches.pop()()
    _running.clear()
    _current.set(None)


os.register_at_fork(after_in_child=_end_in_child)


def _is_quiet(frame: Any) -> bool:
    """Whether a frame is torch's own, functools' or wsync's."""
    module = str(frame.f_globals.get("__name__", ""))
    return module in _QUIET or module.startswith("wsync.")
