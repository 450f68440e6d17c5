"""The engines that a trainer updates: who they are now, as rank 0 sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from wsync._core import InvalidArgumentError, WsyncError
from wsync.handles.base import EngineHandle, handles_of
from wsync.options import Options, numbers
from wsync.trainer.roster import Delivery, RolloutEngine

_log = logging.getLogger("wsync")


class Fleet:
    """A list of engines, or a function that returns the list, which may change between updates.

    welcome: called with an engine that joins later, before an update reaches it; raises if the
        engine cannot be updated.  None: the fleet is still being connected.
    handles: the engines that can be updated.  receivers: those with wsync's receiver.
    waiting: the engines that cannot be updated yet, by name, each with the reason.
    """

    def __init__(
        self,
        engines: Sequence[Any] | Callable[[], Sequence[Any]],
        offsets: Sequence[int] | None,
        options: Options,
        *,
        ranks: int,
        api_key: str | None,
    ) -> None:
        self.changes = callable(engines)
        self.welcome: Callable[[Sequence[EngineHandle]], object] | None = None
        self.handles: list[EngineHandle] = []
        self.receivers: list[EngineHandle] = []
        self.waiting: dict[str, str] = {}
        self._engines, self._offsets, self._options = engines, offsets, options
        self._ranks, self._api_key = ranks, api_key
        self._made: dict[Any, EngineHandle] = {}
        self._described: dict[int, RolloutEngine] = {}  # by the ids of handles
        self._warned: dict[str, str] = {}

    def look(self) -> list[RolloutEngine]:
        """Lists the engines now; returns their descriptions, in the order of `handles`."""
        self.waiting = {}
        options, known = self._options, self._made
        others: Any = {"api_key": self._api_key, "skip": self._wait_for if self._patient else None}
        handles = handles_of(self._engines, timeout=options.deadline, known=known, **others)
        gpus: list[int | None] = [None] * len(handles)
        if self._offsets is not None:
            gpus = [*numbers("engine_gpu_offsets", self._offsets)]
        if len(gpus) != len(handles):
            raise InvalidArgumentError(f"{len(gpus)} engine_gpu_offsets for {len(handles)} engines")
        pairs = zip(handles, gpus, strict=True)
        self.handles = [engine for engine, gpu in pairs if self._has(engine, gpu)]
        self._described = {id(engine): self._described[id(engine)] for engine in self.handles}
        self.receivers[:] = [engine for engine in self.receivers if id(engine) in self._described]
        return [*self._described.values()]

    @property
    def _patient(self) -> bool:
        """Whether updates go on without an engine that cannot be updated yet."""
        return self.welcome is not None and self._options.lost == "continue"

    def _has(self, engine: EngineHandle, gpu: int | None) -> bool:
        """Whether an engine can be updated."""
        if id(engine) in self._described:
            return True
        try:
            found = RolloutEngine.of(engine, gpu, self._options, self._ranks)
            if found.delivery not in (Delivery.STOCK, Delivery.BROADCAST):
                self.receivers.append(engine)
            if self.welcome is not None:
                self.welcome([engine])
                _log.info("wsync: engine %s joins", engine.name)
        except WsyncError as error:
            if not self._patient:
                raise
            self._wait_for(engine.name, error)
            return False
        self._described[id(engine)] = found
        return True

    def _wait_for(self, engine: object, error: WsyncError) -> None:
        name = str(engine)
        self.waiting[name] = str(error)
        if self._warned.get(name) != str(error):
            self._warned[name] = str(error)
            _log.warning("wsync: updates go without engine %s: %s", name, error)
