"""Requests to engines that take broadcasts, which trainer rank 0 makes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from wsync import _core
from wsync.exchange.update_group import Rendezvous
from wsync.machine.daemon_threads import Lane, result
from wsync.machine.deadline import LEAVE_SECONDS, Check, Deadline
from wsync.messages.control import FLATTENED_BUCKET
from wsync.module_tensors import name_of
from wsync.options import Options
from wsync.trainer.requests import NO_CALLS, Calls, UnderWay
from wsync.trainer.round_contents import WorkerRounds


class BroadcastRequests:
    """Has engines join the groups of all sources, and announces every bucket to them.

    Args:
        engines: those that take broadcasts.
        places: where each source's group meets, by the source's number in the plan.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        places: Mapping[int, Rendezvous],
        options: Options,
    ) -> None:
        self._engines = list(enumerate(engines))
        self._places = places
        self._options = options
        self._joining = NO_CALLS
        # by round: the arguments of every announcement
        self._rounds: list[list[dict[str, Any]]] = []
        self._version = ""
        self._answers: list[tuple[str, int, Future[None]]] = []
        self._given_up = threading.Event()
        self._lanes = [Lane("wsync-announce") for _ in engines]

    @property
    def under_way(self) -> UnderWay:
        return [*self._joining.under_way, *((name, call) for name, _, call in self._answers)]

    def join(self) -> None:
        """Has every engine join every source's group, in the same order, for joining blocks."""
        # a source whose group does not come about says why before engines are given up
        deadline = Deadline(self._options.request_deadline)

        def join(index: int, engine: Any) -> None:
            before = sum(other.workers for _, other in self._engines[:index])
            for place in self._places.values():
                arguments = {
                    "master_address": place.host,
                    "master_port": place.port,
                    "rank_offset": 1 + before,
                    "world_size": place.size,
                    "group_name": place.name,
                    "backend": place.backend,
                }
                engine.call("init_weights_update_group", arguments, timeout=deadline.left)

        self._joining = Calls(self._engines, join)

    def joined(self, plan: _core.Plan, timeout: float, check: Check) -> None:
        """Waits until all engines have joined, and takes on a plan."""
        self._joining.join(timeout, check)
        self._rounds = [[] for _ in range(plan.round_count)]
        for source, place in self._places.items():
            for round, bucket in enumerate(WorkerRounds(plan, source).broadcasts):
                arguments: dict[str, Any] = {
                    "names": [entry.name for entry in bucket],
                    "dtypes": [name_of(entry.dtype) for entry in bucket],
                    "shapes": [list(entry.shape) for entry in bucket],
                    "group_name": place.name,
                }
                if self._options.broadcast != "tensor":
                    arguments["load_format"] = FLATTENED_BUCKET
                if bucket:
                    self._rounds[round].append(arguments)

    def begin(self, version: str) -> None:
        self._version = version
        self._answers = []

    def announce(self, round: int) -> None:
        """Announces the buckets of a round.  A failed engine is told no more."""
        last = not any(self._rounds[round + 1 :])
        for arguments in self._rounds[round]:
            if last and arguments is self._rounds[round][-1]:
                arguments = {**arguments, "weight_version": self._version}
            for index, engine in self._engines:
                tell = functools.partial(self._tell, engine, arguments)
                self._answers.append((engine.name, round, self._lanes[index].submit(tell)))

    def check(self) -> None:
        """Raises what an engine has answered so far."""
        self._joining.check()
        for _, _, answer in self._answers:
            if answer.done():
                answer.result()

    def answered(self, timeout: float, check: Check) -> None:
        """Waits until every engine has loaded every bucket."""
        deadline = Deadline(timeout)
        for name, round, answer in self._answers:
            request = f"engine {name}: update_weights_from_distributed"
            result(answer, deadline, check, f"{request}: no answer for bucket {round}")

    def abort(self) -> None:
        self._given_up.set()

    def close(self) -> None:
        """Has the engines leave the groups, as far as they answer."""
        self._given_up.set()
        for lane in self._lanes:
            lane.close()
        joined, self._joining = self._joining.under_way, NO_CALLS
        if not joined:
            return

        def leave(index: int, engine: Any) -> None:
            for place in self._places.values():
                arguments = {"group_name": place.name}
                with contextlib.suppress(_core.RemoteError):  # it had not come so far
                    engine.call("destroy_weights_update_group", arguments, timeout=LEAVE_SECONDS)

        # an engine's handle may lack the call, and this is no place to say so
        with contextlib.suppress(Exception):
            Calls(self._engines, leave).join(LEAVE_SECONDS)

    def _tell(self, engine: Any, arguments: Mapping[str, Any]) -> None:
        if self._given_up.is_set():
            return
        try:
            timeout = self._options.request_deadline
            engine.call("update_weights_from_distributed", arguments, timeout=timeout)
        except BaseException:
            self._given_up.set()
            raise
