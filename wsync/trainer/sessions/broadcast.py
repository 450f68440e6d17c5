"""Remote engines: buckets are broadcast to them over process groups that they share with a trainer.

Every pipeline stage has a source, a rank that gathers the tensors of its stage into buckets and
broadcasts each in a group of its own with all workers of all remote engines.  Rank 0 alone talks
to the engines' APIs: it announces every bucket to every engine, all in the same order, so that no
two broadcasts can wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from wsync import _core
from wsync.dtypes import dtype_of
from wsync.exchange.groups import Store, UpdateGroup, default_backend, device_of
from wsync.exchange.rendezvous import Rendezvous
from wsync.handles.base import EngineHandle
from wsync.machine.addresses import own_address
from wsync.machine.deadline import (
    LATER_SECONDS,
    LEAVE_SECONDS,
    VERDICT_SECONDS,
    Check,
    Deadline,
    look_around,
)
from wsync.machine.device import staging
from wsync.machine.lanes import Lane, result
from wsync.messages.control import FLATTENED_BUCKET
from wsync.options import Options
from wsync.trainer.requests import Calls
from wsync.trainer.sessions.base import BucketSession

_LOCK_SECONDS = 0.1
_LOCK_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Remote:
    """The remote engines, as all ranks know them: number, name and tensor-parallel workers."""

    engines: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()

    def __str__(self) -> str:
        each = zip(self.names, self.workers, strict=True)
        return ", ".join(f"{name} (tp {workers})" for name, workers in each)


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket: where it lies in the ring."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)


def buckets(plan: _core.Plan, worker: int) -> list[list[Entry]]:
    """What a worker gets in every round, largest item size first: the bucket that engines make of
    names and shapes has no gaps, and each tensor must start at a multiple of its item size."""
    manifest = plan.manifest(worker)
    found: list[list[Entry]] = [[] for _ in range(plan.round_count)]
    for index in range(manifest.tensor_count):
        name, dtype, shape, _ = manifest.tensor(index)
        for _, round, offset, *_ in manifest.shards(index):
            entry = Entry(name, dtype, tuple(shape), offset, 0)
            nbytes = torch.Size(shape).numel() * entry.torch_dtype.itemsize
            found[round].append(Entry(name, dtype, tuple(shape), offset, nbytes))
    for bucket in found:
        bucket.sort(key=lambda entry: (-entry.torch_dtype.itemsize, entry.start))
    return found


class BroadcastSession(BucketSession):
    """A source's side: the rounds of its stage, broadcast to all remote engines at once.

    A bucket is free again when its broadcast has ended: the engines have it then, loaded or not.
    """

    def __init__(self, worker: int, remote: Remote, *, name: str, options: Options) -> None:
        super().__init__(worker, "wsync-broadcast")
        self._options = options
        self._remote = remote
        self._store = Store(options.deadline)
        backend = default_backend() if options.backend == "auto" else options.backend
        self._device = device_of(backend)
        size = 1 + sum(remote.workers)
        host = own_address(remote.names)
        self.rendezvous = Rendezvous(host, self._store.port, size, backend, name)
        self._group: UpdateGroup | None = None
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._tight = torch.empty(0, dtype=torch.uint8)
        self._buckets: list[list[Entry]] = []
        self._verdict: Deadline | None = None  # once a broadcast was seen to have broken off

    def attach(
        self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check
    ) -> tuple[int, int]:
        """Waits for all engines to join the group."""
        self._ring = staging(max(plan.ring_nbytes(self.worker), 1), device)
        self._buckets = buckets(plan, self.worker)
        self._waits = [plan.slot(self.worker, k)[2] for k in range(plan.round_count)]
        here = dataclasses.replace(self.rendezvous, host="localhost")
        try:
            self._group = here.join(
                0,
                timeout,
                check,
                device=self._device,
                collective_timeout=self._options.deadline,
            )
        except _core.DeadlineError as error:
            raise _core.DeadlineError(f"{error}; wanted: {self._remote}") from error
        return self._ring.data_ptr(), self._ring.numel()

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
        try:
            super().look()
        except _core.PeerClosedError:
            self._verdict = self._verdict or Deadline(VERDICT_SECONDS)
            if not self._verdict.left:
                raise

    def close(self) -> None:
        """Leaves the group and closes its store, which ends the engines' waits for either."""
        self._given_up.set()
        self._store.close()
        group, self._group = self._group, None
        if group is not None:
            self._lane.submit(group.close)
        self._lane.close()

    def _send(self, round: int) -> None:
        if self._group is None or not self._buckets[round]:
            return

        def check() -> None:
            if self._given_up.is_set():
                raise _core.StateError("the update has been given up")

        check()
        self._group.broadcast(self._tensors(self._buckets[round]), check)

    def _tensors(self, bucket: list[Entry]) -> list[torch.Tensor]:
        """What is broadcast: every tensor, or one run of bytes without gaps."""
        parts = [self._ring[entry.start : entry.start + entry.nbytes] for entry in bucket]
        if self._options.broadcast == "tensor":
            return parts
        start, nbytes = bucket[0].start, sum(entry.nbytes for entry in bucket)
        at = start
        for entry in bucket:
            if entry.start != at:
                break
            at += entry.nbytes
        else:
            return [self._ring[start:at]]
        if self._tight.numel() < nbytes:
            self._tight = torch.empty(nbytes, dtype=torch.uint8)
        torch.cat(parts, out=self._tight[:nbytes])
        return [self._tight[:nbytes]]


class RemoteEngines:
    """Rank 0's side: what the engines' APIs are told.

    Args:
        engines: handles of all engines.
        remote: which of them are remote.
        lock: slime's rollout_engine_lock, held while buckets are on their way; or None.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        remote: Remote,
        lock: Any,
        options: Options,
    ) -> None:
        self._engines = [(index, engines[index]) for index in remote.engines]
        self._offsets: dict[int, int] = {}
        offset = 1
        for (index, engine), workers in zip(self._engines, remote.workers, strict=True):
            if not hasattr(engine, "call"):
                raise _core.UnsupportedError(
                    f"engine {engine.name}: its handle knows no process groups"
                )
            self._offsets[index] = offset
            offset += workers
        self._lock = None if lock is None else _Lock(lock)
        self._options = options
        self._meetings: list[Rendezvous] = []
        self._joining: Calls | None = None
        self._rounds: list[list[tuple[Rendezvous, list[Entry]]]] = []
        self._last = -1
        self._version = ""
        self._answers: list[tuple[str, int, Future[None]]] = []
        self._given_up = threading.Event()
        self._lanes = {index: Lane("wsync-remote") for index, _ in self._engines}

    def join(self, meetings: Sequence[Rendezvous]) -> None:
        """Has every engine join every source's group, in the same order, for joining blocks."""
        self._meetings = list(meetings)
        # a source whose group does not come about says why before engines are given up
        deadline = Deadline(self._options.request_deadline)

        def join(index: int, engine: EngineHandle) -> None:
            for meeting in meetings:
                arguments = {
                    "master_address": meeting.host,
                    "master_port": meeting.port,
                    "rank_offset": self._offsets[index],
                    "world_size": meeting.size,
                    "group_name": meeting.name,
                    "backend": meeting.backend,
                }
                _call(engine, "init_weights_update_group", arguments, deadline.left)

        self._joining = Calls(self._engines, join)

    def attach(
        self, plan: _core.Plan, workers: Sequence[int], timeout: float, check: Check
    ) -> None:
        """Waits until all engines have joined; `workers` are the sources' numbers in the plan, in
        the order of their meetings."""
        assert self._joining is not None
        self._joining.join(timeout, check)
        self._joining = None
        listed = [buckets(plan, worker) for worker in workers]
        self._rounds = [
            [(m, found[k]) for m, found in zip(self._meetings, listed, strict=True) if found[k]]
            for k in range(plan.round_count)
        ]
        self._last = max((k for k, found in enumerate(self._rounds) if found), default=-1)

    def begin(self, version: str, timeout: float, check: Check) -> None:
        self._version = version
        self._answers = []
        if self._lock is not None:
            self._lock.acquire(timeout, check)

    def post(self, round: int) -> None:
        """Announces the buckets of a round.  A failed engine is told no more."""
        for number, (meeting, bucket) in enumerate(self._rounds[round], 1):
            last = round == self._last and number == len(self._rounds[round])
            arguments: dict[str, Any] = {
                "names": [entry.name for entry in bucket],
                "dtypes": [entry.dtype for entry in bucket],
                "shapes": [list(entry.shape) for entry in bucket],
                "group_name": meeting.name,
            }
            if self._options.broadcast != "tensor":
                arguments["load_format"] = FLATTENED_BUCKET
            if last:
                arguments["weight_version"] = self._version
            for index, engine in self._engines:
                tell = functools.partial(self._tell, engine, arguments)
                self._answers.append((engine.name, round, self._lanes[index].submit(tell)))

    def check(self) -> None:
        """Raises what an engine has answered so far."""
        if self._joining is not None:
            self._joining.check()
        for _, _, answer in self._answers:
            if answer.done():
                answer.result()

    def prepared(self, timeout: float, check: Check) -> None:
        """Waits until every engine has loaded every bucket."""
        deadline = Deadline(timeout)
        for name, round, answer in self._answers:
            result(answer, deadline, check, f"engine {name}: bucket {round} was not loaded")
        self._release()

    def abort(self) -> None:
        self._given_up.set()
        # what is being raised says more than a lock that is gone, too
        with contextlib.suppress(Exception):
            self._release()

    def close(self) -> None:
        """Has the engines leave the groups, as far as they answer."""
        self._given_up.set()
        for lane in self._lanes.values():
            lane.close()
        if self._lock is not None:
            self._lock.close()
        meetings, self._meetings = self._meetings, []
        if not meetings:
            return

        def leave(index: int, engine: EngineHandle) -> None:
            for meeting in meetings:
                arguments = {"group_name": meeting.name}
                with contextlib.suppress(_core.RemoteError):  # it had not come so far
                    _call(engine, "destroy_weights_update_group", arguments, LEAVE_SECONDS)

        # an engine's handle may lack the call, and this is no place to say so
        with contextlib.suppress(Exception):
            Calls(self._engines, leave).join(LEAVE_SECONDS)

    def _tell(self, engine: EngineHandle, arguments: Mapping[str, Any]) -> None:
        if self._given_up.is_set():
            return
        try:
            timeout = self._options.request_deadline
            _call(engine, "update_weights_from_distributed", arguments, timeout)
        except BaseException:
            self._given_up.set()
            raise

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


class _Lock:
    """slime's lock: an actor or object of which acquire() says whether it was got."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._held = False
        self._lane = Lane("wsync-lock")  # an actor may never answer, and another lock waits

    def acquire(self, timeout: float, check: Check) -> None:
        deadline = Deadline(timeout)
        late = "rollout_engine_lock: held by somebody else, and not released"
        while not self._held:
            asked = self._lane.submit(functools.partial(self._call, "acquire"))
            try:
                self._held = bool(result(asked, deadline, check, late))
            except BaseException:
                asked.add_done_callback(self._give_back)
                raise
            check()
            if not self._held:
                deadline.check(late)
                time.sleep(_LOCK_SECONDS)

    def release(self) -> None:
        if self._held:
            self._held = False
            released = self._lane.submit(functools.partial(self._call, "release"))
            wait = Deadline(_LOCK_ANSWER_SECONDS)
            result(released, wait, _nothing, "rollout_engine_lock: no answer")

    def close(self) -> None:
        self._lane.close()

    def _give_back(self, asked: Future[Any]) -> None:
        """Nobody waits any more for what has been asked."""
        if asked.exception() is None and asked.result():
            self._call("release")

    def _call(self, name: str) -> Any:
        method = getattr(self._lock, name)
        if not hasattr(method, "remote"):
            return method()
        import ray

        return ray.get(method.remote())


def _nothing() -> None:
    """For waits that nothing ends but the deadline."""


def _call(engine: Any, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
    engine.call(method, arguments, timeout)
