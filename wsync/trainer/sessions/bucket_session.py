"""A worker's rounds, and the base class of sessions with workers that take whole tensors."""

from __future__ import annotations

import abc
import functools
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future

from wsync import _core
from wsync.bucket import FlattenedTensorMetadata, metadata_at
from wsync.machine.daemon_threads import WorkerThread
from wsync.machine.deadline import Check, Deadline
from wsync.messages.control import WHOLE
from wsync.trainer.fused_experts import name_of

Span = tuple[int, int]
Bucket = list[FlattenedTensorMetadata]


class WorkerRounds:
    """A worker's part of a plan, as the trainer sees it.

    Attributes:
        manifest: what is delivered; buffer k is round k.
        slots: the place of each round in the ring.
    """

    def __init__(self, plan: _core.Plan, worker: int) -> None:
        self.manifest = plan.manifest(worker)
        self.slots = [plan.slot(worker, k) for k in range(plan.round_count)]

    @functools.cached_property
    def buckets(self) -> list[Bucket]:
        """The tensors of every round as SGLang describes them: whole tensors or single experts,
        with their offsets in the round's slot.  Tensors without elements are in the last bucket;
        engines say whether they take these."""
        buckets: list[Bucket] = [[] for _ in self.slots]
        empty: Bucket = []
        for index in range(self.manifest.tensor_count):
            name, dtype, shape, _ = self.manifest.tensor(index)
            if math.prod(shape) == 0:
                empty.append(metadata_at(0, name, dtype, shape))
            for shard in self.manifest.shards(index):
                start = shard.offset - self.slots[shard.buffer].offset
                part = (name, dtype, shape)
                if shard.extent != shape:
                    part = (name_of(name, shard.start), dtype, shard.extent[1:])
                buckets[shard.buffer].append(metadata_at(start, *part))
        if empty and (filled := [bucket for bucket in buckets if bucket]):
            filled[-1] += empty
        return buckets

    @functools.cached_property
    def last(self) -> int:
        """The last round with a bucket, because the last rounds may be for other workers only; -1
        if there is none."""
        return max((k for k, bucket in enumerate(self.buckets) if bucket), default=-1)

    @functools.cached_property
    def broadcasts(self) -> list[Bucket]:
        """The buckets as `buckets` has them, but with the largest item size first.  Engines make a
        bucket without gaps from names and shapes, and each tensor must start at a multiple of its
        item size."""
        return [
            sorted(bucket, key=lambda entry: (-entry.dtype.itemsize, entry.start_idx))
            for bucket in self.buckets
        ]


class BucketSession(abc.ABC):
    """A worker that takes whole tensors.  A thread sends it every round as a bucket, and the slot
    is free again when the bucket was sent.  Its methods are called in the same order as those of
    WorkerSession.

    worker: its number in the plan (see PlanWorker).
    """

    rounds: WorkerRounds  # once attached

    def __init__(self, worker: int, thread: str) -> None:
        self.worker = worker
        self._sent: list[Future[None]] = []
        self._given_up = threading.Event()
        self._version = ""
        self._refused = False  # whether a request has failed
        self._thread = WorkerThread(thread)

    @property
    def loaded(self) -> int:
        """How many rounds are known to have been taken."""
        return sum(sent.done() for sent in self._sent)

    @property
    def round_count(self) -> int:
        return len(self.rounds.slots)

    def accept(self, timeout: float, check: Check) -> bytes:
        return WHOLE

    @abc.abstractmethod
    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        """Makes the ring, and frees a former one.  Raises NoMemoryError if there is no memory."""

    def begin(self, update: int, version: str, timeout: float, check: Check) -> None:
        self._sent, self._version = [], version

    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        former = self.rounds.slots[round].wait_round
        if former >= 0:
            self.wait(former, timeout, check)

    def post(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        stream.synchronize(timeout, check)
        check()  # after a failed exchange, streams go on and may have copied anything
        self._sent.append(self._thread.submit(functools.partial(self._send, round)))

    @abc.abstractmethod
    def wait(self, round: int, timeout: float, check: Check) -> None:
        """Waits until a round has been taken."""

    def prepared(self, timeout: float, check: Check) -> None:
        deadline = Deadline(timeout)
        for round in range(len(self._sent)):
            self.wait(round, deadline.left, check)

    def abort(self, text: str) -> None:
        self._given_up.set()

    def close(self) -> None:
        self._given_up.set()
        self._thread.close()

    def _ask(self, request: Callable[[], object]) -> None:
        """Makes a request for a bucket, unless one has failed, because an engine may report the
        version that comes with the last bucket although it lacks another bucket."""
        if self._given_up.is_set() or self._refused:
            return
        try:
            request()
        except BaseException:
            self._refused = True
            raise

    @abc.abstractmethod
    def _send(self, round: int) -> None:
        """Sends a bucket; called from the thread."""
