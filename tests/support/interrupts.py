"""A KeyboardInterrupt at any line of wsync that a call runs, as Ctrl-C may bring one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Tracer:
    def __init__(self, modules: tuple[str, ...], number: int) -> None:
        self._modules = modules
        self._left = number
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_globals.get("__name__") in self._modules else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.where:
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self._line


def interrupted(call: Callable[[], object], *modules: str) -> Iterator[str]:
    """Makes a call again and again, each time interrupted at the next line that this thread runs
    in one of the modules; yields where, after each.  Ends when no line is left."""
    number = 0
    while True:
        tracer, before = _Tracer(modules, number), sys.gettrace()
        sys.settrace(tracer)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if not tracer.where:
            return
        yield tracer.where
        number += 1
