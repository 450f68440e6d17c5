"""SGLang engines that take tensors in weight-update sessions, as servers of 0.5.21 and newer do."""

from __future__ import annotations

import copy
from typing import Any

from support.engines import NEWEST
from support.sglang_processes import SglangProcesses

from wsync.messages.control import LOAD_FORMAT


class SglangSessions(SglangProcesses):
    """A session begins with an update's first request and ends before the engine goes on.

    Every worker process can be an engine of its own: see `alone`.
    """

    open = False

    def __init__(self) -> None:
        super().__init__(NEWEST)
        self.split = False

    def alone(self, rank: int, *, stock: bool) -> SglangSessions:
        """One worker as an engine.  stock: without wsync's loader."""
        made = copy.copy(self)
        made.processes = [self.processes[rank]]
        made.workers, made.split = 1, True
        made.load_formats = () if stock else (LOAD_FORMAT,)
        return made

    def prepare(self, family: str, **how: Any) -> None:
        self.open = False
        super().prepare(family, alone=self.split, **how)

    def update_weights_from_tensor(self, *arguments: Any, **how: Any) -> dict[str, Any]:
        if not self.open:
            self.ask("begin")
            self.open = True
        return super().update_weights_from_tensor(*arguments, **how)

    def continue_generation(self) -> None:
        if self.open:
            self.ask("end")
            self.open = False
        super().continue_generation()
