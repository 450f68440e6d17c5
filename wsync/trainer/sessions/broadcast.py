"""Engines that take broadcasts: buckets go to them over a process group that they join.

Rank 0 gathers whole tensors into buckets.  It announces each bucket to every engine, in the same
order, and broadcasts it to all workers of all these engines at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import torch

from wsync import _core
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup, default_backend, device_of
from wsync.machine.daemon_threads import WorkerThread, result
from wsync.machine.deadline import (
    LATER_SECONDS,
    LEAVE_SECONDS,
    Check,
    Deadline,
    look_around,
)
from wsync.machine.device import has_nccl, on_gpu, staging
from wsync.machine.error_text import error_text
from wsync.machine.host import own_address
from wsync.messages.control import FLATTENED_BUCKET
from wsync.module_tensors import name_of
from wsync.options import Options
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.requests import NO_CALLS, Calls, UnderWay
from wsync.trainer.sessions.bucket_session import Bucket, BucketSession, Span, WorkerRounds


class BroadcastSession(BucketSession):
    """All engines that take broadcasts, as one worker.

    A bucket is free again when its broadcast has ended: the engines have it then, loaded or not.
    A group of NCCL uses memory of the rounds' GPU; any other group uses host memory.

    engines: the engines that take broadcasts.
    """

    _ring: torch.Tensor  # once made
    _announcements: list[dict[str, Any]]  # once attached: of the rounds' buckets

    def __init__(self, worker: int, engines: Sequence[CheckedEngine], *, options: Options) -> None:
        super().__init__(worker, "wsync-broadcast")
        self._options = options
        self._engines = list(enumerate(engines))
        self._store = Store(options.deadline)
        backend = default_backend() if options.backend == "auto" else options.backend
        self._device = device_of(backend)
        self._backend = backend
        size = 1 + sum(engine.workers for engine in engines)
        host = own_address([engine.name for engine in engines])
        self._place = Rendezvous(host, self._store.port, size, backend)
        self._group: UpdateGroup | None = None
        self._threads = [WorkerThread("wsync-announce") for _ in engines]
        self._joining = NO_CALLS
        self._answers: list[tuple[str, int, Future[None]]] = []

    @property
    def under_way(self) -> UnderWay:
        return [*self._joining.under_way, *((name, call) for name, _, call in self._answers)]

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        nbytes = max(plan.ring_nbytes(self.worker), 1)
        self._ring = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees a larger ring first
        if not (self._backend == "nccl" and has_nccl(device)):
            self._ring = staging(nbytes, device)
            return
        try:
            self._ring, self._device = on_gpu(nbytes, device), device_of(self._backend, device)
        except torch.OutOfMemoryError as error:
            text = f"a ring of {nbytes} bytes for broadcasts: {error_text(error)}"
            raise _core.NoMemoryError(text) from error

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Waits for all engines to join the group."""
        self.rounds = WorkerRounds(plan, self.worker)
        deadline, here = Deadline(timeout), dataclasses.replace(self._place, host="localhost")
        self._joining = Calls(self._engines, self._join)
        limit = self._options.deadline
        try:
            self._group = here.join(
                0, timeout, check, device=self._device, collective_timeout=limit
            )
        except _core.DeadlineError as error:
            wanted = ", ".join(f"{each.name} (tp {each.workers})" for _, each in self._engines)
            raise _core.DeadlineError(f"{error}; these should have joined: {wanted}") from error
        self._joining.join(deadline.left, check)
        self._announcements = [self._announcement(bucket) for bucket in self.rounds.broadcasts]
        return self._ring.data_ptr(), self._ring.numel()

    def _join(self, index: int, engine: CheckedEngine) -> None:
        before = sum(other.workers for _, other in self._engines[:index])
        arguments = {
            "master_address": self._place.host,
            "master_port": self._place.port,
            "rank_offset": 1 + before,
            "world_size": self._place.size,
            "group_name": self._place.name,
            "backend": self._place.backend,
        }
        # longer than the group's own deadline, whose error says more
        timeout = self._options.request_deadline
        engine.call("init_weights_update_group", arguments, timeout=timeout)

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        super().begin(update, version, timeout, check)
        self._answers = []

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        """Also announces the bucket; the last one carries the version."""
        super().post(round, stream, timeout, check)
        if not self.rounds.broadcasts[round]:
            return
        told = self._announcements[round]
        if round == self.rounds.last:
            told = {**told, "weight_version": self._version}
        for index, engine in self._engines:
            timeout = self._options.request_deadline
            call = functools.partial(engine.call, "update_weights_from_distributed", told, timeout)
            tell = functools.partial(self._ask, call)
            self._answers.append((engine.name, round, self._threads[index].submit(tell)))

    def _announcement(self, bucket: Bucket) -> dict[str, Any]:
        told: dict[str, Any] = {
            "names": [entry.name for entry in bucket],
            "dtypes": [name_of(entry.dtype) for entry in bucket],
            "shapes": [list(entry.shape) for entry in bucket],
            "group_name": self._place.name,
        }
        if self._options.broadcast != "tensor":
            told["load_format"] = FLATTENED_BUCKET
        return told

    def wait(self, round: int, timeout: float, check: Check) -> None:
        try:
            # the broadcast has a deadline of its own
            late = Deadline(timeout + LATER_SECONDS)
            result(self._sent[round], late, check, f"the broadcast of bucket {round} did not end")
        except _core.PeerClosedError:
            look_around(check)
            raise

    def look(self) -> None:
        """Raises engines' errors.  Only `wait` raises the error of a broadcast, because an engine's
        own error, which may be on its way, says more."""
        self._joining.check()
        for _, _, answer in self._answers:
            if answer.done():
                answer.result()

    def prepared(self, timeout: float, check: Check) -> None:
        """Also waits until every engine has loaded every bucket."""
        deadline = Deadline(timeout)
        super().prepared(timeout, check)
        for name, round, answer in self._answers:
            request = f"engine {name}: update_weights_from_distributed"
            result(answer, deadline, check, f"{request}: no answer for bucket {round}")

    def close(self) -> None:
        """Closes the group's store and leaves the group, which ends the waits of engines; then asks
        the engines to leave the group."""
        self._store.close()
        group, self._group = self._group, None
        if group is not None:
            self._thread.submit(group.close)
        super().close()
        for thread in self._threads:
            thread.close()
        joined, self._joining = self._joining.under_way, NO_CALLS
        if joined:
            # an engine's handle may lack the call, which is no error here
            with contextlib.suppress(Exception):
                Calls(self._engines, self._leave).join(LEAVE_SECONDS)

    def _leave(self, _: int, engine: CheckedEngine) -> None:
        arguments = {"group_name": self._place.name}
        with contextlib.suppress(_core.RemoteError):  # it may not have joined
            engine.call("destroy_weights_update_group", arguments, timeout=LEAVE_SECONDS)

    def _send(self, round: int) -> None:
        bucket = self.rounds.broadcasts[round]
        if self._group is None or not bucket:
            return

        def check() -> None:
            if self._given_up.is_set():
                raise _core.StateError("the update has been given up")

        check()
        slot = self._ring[self.rounds.slots[round].offset :]
        # one part for each tensor, or one run of bytes without gaps
        parts = [slot[entry.start_idx : entry.end_idx] for entry in bucket]
        if self._options.broadcast != "tensor":
            if all(a.end_idx == b.start_idx for a, b in pairwise(bucket)):
                parts = [slot[bucket[0].start_idx : bucket[-1].end_idx]]
            else:
                parts = [torch.cat(parts)]
        self._group.broadcast(parts, check)
