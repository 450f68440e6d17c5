"""Engines that take broadcasts: buckets go to them over process groups that they join.

Every pipeline stage has a source, a rank that gathers the tensors of its stage into buckets and
broadcasts each in a group of its own with all workers of all such engines.  Rank 0, the source of
its own stage, announces every bucket to every engine, all in the same order, so that no two
broadcasts can wait for each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch

from wsync import _core
from wsync.exchange.polled_collectives import first_line
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup, default_backend, device_of
from wsync.machine.daemon_threads import result
from wsync.machine.deadline import (
    LATER_SECONDS,
    VERDICT_SECONDS,
    Check,
    Deadline,
    look_around,
)
from wsync.machine.device import has_nccl, on_gpu, staging
from wsync.machine.host import own_address
from wsync.options import Options
from wsync.trainer.broadcast_requests import BroadcastRequests
from wsync.trainer.requests import UnderWay
from wsync.trainer.roster import RolloutEngine
from wsync.trainer.round_contents import Bucket, WorkerRounds
from wsync.trainer.sessions.base import BucketSession, Span


class BroadcastSession(BucketSession):
    """A source: the rounds of its stage, broadcast to all engines at once.

    A bucket is free again when its broadcast has ended: the engines have it then, loaded or not.
    A group of NCCL is given memory of the GPU that rounds lie on, any other one memory of the host.

    Args:
        engines: those that take broadcasts.
        name: of the source's group.

    `requests` announces the buckets of all sources; on ranks other than 0 it does nothing.
    """

    def __init__(
        self, worker: int, engines: Sequence[RolloutEngine], *, name: str, options: Options
    ) -> None:
        super().__init__(worker, "wsync-broadcast")
        self.requests = BroadcastRequests([], {}, options)
        self._options = options
        self._engines = engines
        self._store = Store(options.deadline)
        backend = default_backend() if options.backend == "auto" else options.backend
        self._device = device_of(backend)
        self._backend = backend
        size = 1 + sum(engine.workers for engine in engines)
        host = own_address([engine.name for engine in engines])
        self.rendezvous = Rendezvous(host, self._store.port, size, backend, name)
        self._group: UpdateGroup | None = None
        self._ring = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._tight = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._verdict: Deadline | None = None  # once a broadcast was seen to have broken off

    @property
    def under_way(self) -> UnderWay:
        return self.requests.under_way

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        nbytes = max(plan.ring_nbytes(self.worker), 1)
        if not _sends_from(self._backend, device):
            self._ring = staging(nbytes, device)
            return
        try:
            self._ring = on_gpu(nbytes, device)
        except torch.OutOfMemoryError as error:
            raise _core.NoMemoryError(
                f"a ring of {nbytes} bytes for broadcasts: {first_line(error)}"
            ) from error
        self._device = device_of(self._backend, device)

    def drop_ring(self) -> None:
        self._ring = torch.empty(0, dtype=torch.uint8, device="cpu")

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        """Waits for all engines to join the group, and on rank 0 every other group."""
        self.rounds = WorkerRounds(plan, self.worker)
        if self._ring.numel() < self.rounds.ring_nbytes:
            self.make_ring(plan, device)
        deadline, here = Deadline(timeout), dataclasses.replace(self.rendezvous, host="localhost")
        self.requests.join()
        try:
            self._group = here.join(
                0,
                timeout,
                check,
                device=self._device,
                collective_timeout=self._options.deadline,
            )
        except _core.DeadlineError as error:
            wanted = ", ".join(f"{engine.name} (tp {engine.workers})" for engine in self._engines)
            raise _core.DeadlineError(f"{error}; wanted: {wanted}") from error
        self.requests.joined(plan, deadline.left, check)
        return self._ring.data_ptr(), self._ring.numel()

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        super().begin(update, version, timeout, check)
        self.requests.begin(version)

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        super().post(round, stream, timeout, check)
        self.requests.announce(round)

    def wait(self, round: int, timeout: float, check: Check) -> None:
        try:
            # the broadcast has a deadline of its own
            late = Deadline(timeout + LATER_SECONDS)
            result(self._sent[round], late, check, f"bucket {round} was not taken")
        except _core.PeerClosedError:
            look_around(check)
            raise

    def look(self) -> None:
        """A broadcast that breaks off is reported a little later: what an engine says of it, which
        is on its way, says more."""
        self.requests.check()
        try:
            super().look()
        except _core.PeerClosedError:
            self._verdict = self._verdict or Deadline(VERDICT_SECONDS)
            if not self._verdict.left:
                raise

    def prepared(self, timeout: float, check: Check) -> None:
        deadline = Deadline(timeout)
        super().prepared(timeout, check)
        self.requests.answered(deadline.left, check)

    def abort(self, text: str) -> None:
        super().abort(text)
        self.requests.abort()

    def close(self) -> None:
        """Leaves the group and closes its store, which ends the engines' waits for either."""
        self._given_up.set()
        self._store.close()
        group, self._group = self._group, None
        if group is not None:
            self._lane.submit(group.close)
        self._lane.close()
        self.requests.close()

    def _send(self, round: int) -> None:
        bucket = self.rounds.broadcasts[round]
        if self._group is None or not bucket:
            return

        def check() -> None:
            if self._given_up.is_set():
                raise _core.StateError("the update has been given up")

        check()
        slot = self._ring[self.rounds.slots[round].offset :]
        self._group.broadcast(self._tensors(slot, bucket), check)

    def _tensors(self, slot: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
        """What is broadcast: every tensor, or one run of bytes without gaps."""
        parts = [slot[entry.start_idx : entry.end_idx] for entry in bucket]
        if self._options.broadcast == "tensor":
            return parts
        if all(a.end_idx == b.start_idx for a, b in pairwise(bucket)):
            return [slot[bucket[0].start_idx : bucket[-1].end_idx]]
        nbytes = sum(entry.numel for entry in bucket)
        if self._tight.numel() < nbytes:
            self._tight = torch.empty(nbytes, dtype=torch.uint8, device=slot.device)
        torch.cat(parts, out=self._tight[:nbytes])
        return [self._tight[:nbytes]]


def _sends_from(backend: str, device: _core.Device) -> bool:
    """Whether a group of this backend sends what lies on the device without a copy on the host."""
    return backend == "nccl" and has_nccl(device)
