"""Which attributes of modules and of tensors load_weights can have changed.

While it is tried, other threads go on: requests come in and are counted.  What they do is theirs,
and not put back.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch

from wsync.engine.learn.attributes_read import patching

# parameters before tensors: each of the two takes over how it was
_WATCHED: Final[tuple[Any, ...]] = (torch.nn.Module, torch.nn.Parameter, torch.Tensor)
# by these, classes of engines may find and set attributes in their own way
_WAYS: Final = ("__getattribute__", "__setattr__", "__delattr__")
# whose looks at a `__dict__` mean nothing: what they do by it is seen otherwise, or changes nothing
_QUIET: Final = (torch.nn.Module.__module__, functools.__name__)
_HERE: Final = "wsync.engine.learn.attributes_"


class Touched:
    """What the thread that watches, and threads that it starts meanwhile, look up and set."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self._looked_up: set[tuple[int, str]] = set()
        self._set: set[tuple[int, str]] = set()
        self._own_ways: dict[type, bool] = {}  # whether these classes have some

    def was_looked_up(self, owner: Any, name: str) -> bool:
        """Whether what the attribute holds may have been changed."""
        return (id(owner), name) in self._looked_up or self._hides(owner)

    def was_set(self, owner: Any, name: str, *, new: bool) -> bool:
        """Whether the attribute itself may have been set or deleted.  new: it was not there before.
        A functools.cached_property is set where it is looked up."""
        key = id(owner), name
        return key in self._set or (new and key in self._looked_up) or self._hides(owner)

    def _hides(self, owner: Any) -> bool:
        """Whether it may have been changed in ways that are not seen."""
        kind = type(owner)
        if kind not in self._own_ways:
            classes = list(itertools.takewhile(lambda base: base not in _WATCHED, kind.__mro__))
            ways = any(way in vars(base) for base in classes for way in _WAYS)
            self._own_ways[kind] = ways or len(classes) == len(kind.__mro__)
        return self._own_ways[kind] or (id(owner), "__dict__") in self._looked_up

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patching())
            for kind in _WATCHED:
                stack.enter_context(_instead(kind, "__getattribute__", self._looking_up))
                for way in ("__setattr__", "__delattr__"):
                    stack.enter_context(_instead(kind, way, self._setting))
            stack.enter_context(_instead(threading.Thread, "start", self._starting))
            self.threads.add(threading.get_ident())
            try:
                yield
            finally:
                self.threads.discard(threading.get_ident())

    def _looking_up(self, find: Callable[[Any, str], Any]) -> Any:
        def look_up(owner: Any, name: str) -> Any:
            if threading.get_ident() in self.threads and (
                name != "__dict__" or not _is_quiet(sys._getframe(1))
            ):
                self._looked_up.add((id(owner), name))
            return find(owner, name)

        return look_up

    def _setting(self, act: Callable[..., None]) -> Any:
        def note(owner: Any, name: str, *value: Any) -> None:
            if threading.get_ident() in self.threads:
                self._set.add((id(owner), name))
            act(owner, name, *value)

        return note

    def _starting(self, start: Callable[[threading.Thread], None]) -> Any:
        def begin(thread: threading.Thread) -> None:
            if threading.get_ident() in self.threads:
                own, run = vars(thread).get("run"), thread.run

                def watched() -> None:
                    del thread.run  # a thread that refers to itself would keep what it was given
                    if own is not None:
                        thread.run = own  # type: ignore[method-assign]
                    self.threads.add(threading.get_ident())
                    try:
                        run()
                    finally:
                        self.threads.discard(threading.get_ident())

                thread.run = watched  # type: ignore[method-assign]
            start(thread)

        return begin


_current: ContextVar[Touched | None] = ContextVar("wsync_touched", default=None)


def touched() -> Touched:
    """Of the watch that this thread has begun, or of one that it may begin."""
    return _current.get() or Touched()


@contextmanager
def watching(found: Touched) -> Iterator[None]:
    """Notes what the block looks up and sets."""
    if _current.get() is found:
        yield
        return
    token = _current.set(found)
    try:
        with found.watch():
            yield
    finally:
        _current.reset(token)


@contextmanager
def _instead(kind: Any, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Has a class do something otherwise, and then as before."""
    former = vars(kind).get(name)
    setattr(kind, name, other(getattr(kind, name)))
    try:
        yield
    finally:
        if former is None:
            delattr(kind, name)
        else:
            setattr(kind, name, former)


def _is_quiet(frame: Any) -> bool:
    """Whether a frame is torch's own, functools' or wsync's; not one of those that only pass on
    what others look up."""
    while frame.f_code.co_name in ("read", "look_up") and _module(frame).startswith(_HERE):
        frame = frame.f_back
    return _module(frame) in _QUIET or _module(frame).startswith("wsync.")


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
