"""Engines without wsync: one request per bucket, as slime sends them to SGLang."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from wsync import _core
from wsync.bucket import FlattenedTensorBucket
from wsync.machine.daemon_threads import result
from wsync.machine.deadline import Check, Deadline
from wsync.machine.fork_guard import Owner
from wsync.messages import payload
from wsync.messages.control import FLATTENED_BUCKET
from wsync.messages.gpu_payload import LEFT_SECONDS, GpuRing
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.requests import UnderWay
from wsync.trainer.sessions.bucket_session import BucketSession, Span, WorkerRounds


class SharedRing:
    """A file in /dev/shm that streams of a device can write to, with the methods of GpuRing.

    An engine that has answered has read the file: copies from host memory that is not pinned do not
    return before they are done.
    """

    def __init__(self, nbytes: int, device: _core.Device) -> None:
        self._bytes = payload.shared_bytes(nbytes)
        payload.keep(self._bytes)
        # also if the connection is dropped and nobody calls `close`
        self._ended = weakref.finalize(self, _by_owner, Owner(), payload.remove, self._bytes)
        self.address = self._bytes.data_ptr()
        self.nbytes = nbytes
        # streams keep this object, too, while they use the memory
        self._registered: object = _core.host_register(self.address, nbytes, device, self._bytes)
        self._later: threading.Timer | None = None
        self._pickled: dict[int, tuple[Sequence[Any], bytes]] = {}  # by id of the metadata

    def payload(self, offset: int, nbytes: int, metadata: Sequence[Any]) -> bytes:
        """As of a GpuRing.  A bucket's payload is the same for all workers and in every update, so
        it is pickled once.  Metadata must not change, and belongs to one place."""
        if id(metadata) in self._pickled:
            payload.keep(self._bytes, 1)
            return self._pickled[id(metadata)][1]
        flat = self._bytes[offset : offset + nbytes]
        data = payload.bucket(FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata))
        self._pickled[id(metadata)] = metadata, data
        return data

    def close(self) -> None:
        """Removes the file, even if parts of it have not been read."""
        self._ended.detach()
        if self._later is not None:
            self._later.cancel()  # it keeps the memory
        payload.remove(self._bytes)

    def leave(self, engine: str) -> None:
        """Keeps the file for ten minutes, because the engine may still read it.  If this process
        ends earlier, the file stays until its last reader has ended.  A stock server that does not
        find the file ends.  A file that was left to the engine before is removed, because the
        engine has answered requests since."""
        if self._later is not None:
            return
        if (former := _left.get(engine)) is not None:
            former.close()
        _left[engine] = self
        self._ended.detach()
        self._ended = weakref.finalize(self, _by_owner, Owner(), payload.give_back, self._bytes)
        self._registered = None
        self._later = threading.Timer(LEFT_SECONDS, self.close)
        self._later.daemon = True
        self._later.start()


# by engine; a ring's timer keeps it here
_left: Final = weakref.WeakValueDictionary[str, SharedRing]()


def _by_owner(owner: Owner, call: Callable[[torch.Tensor], None], ring: torch.Tensor) -> None:
    if owner:
        call(ring)


class StockSession(BucketSession):
    """A stock engine.  Each round is a bucket in shared memory, with a request of its own.

    A bucket is free again when its request has been answered and, on a GPU, every worker has
    released it.  The last bucket carries the version.  If an update ends before that, the engine
    cannot refuse to run, so the trainer leaves it paused.

    on_gpu: whether buckets are in memory of the device, a GPU.  If not, they are in a file.
    """

    def __init__(
        self, worker: int, engine: CheckedEngine, *, timeout: float, on_gpu: bool = False
    ) -> None:
        super().__init__(worker, "wsync-stock")
        self._engine = engine
        self._timeout = timeout
        self._on_gpu = on_gpu
        self._ring: SharedRing | GpuRing | None = None

    @property
    def under_way(self) -> UnderWay:
        return [(self._engine.name, sent) for sent in self._sent if not sent.done()]

    def make_ring(self, plan: _core.Plan, device: _core.Device) -> None:
        former, self._ring = self._ring, None
        if former is not None:
            former.close()
        kind = GpuRing if self._on_gpu else SharedRing
        self._ring = kind(max(plan.ring_nbytes(self.worker), 1), device)

    def attach(self, plan: _core.Plan, device: _core.Device, timeout: float, check: Check) -> Span:
        assert self._ring is not None
        self.rounds = WorkerRounds(plan, self.worker)
        return self._ring.address, self._ring.nbytes

    def acquire(self, round: int, stream: _core.Stream, timeout: float, check: Check) -> None:
        deadline = Deadline(timeout)
        super().acquire(round, stream, timeout, check)
        if isinstance(self._ring, GpuRing):
            slot = self.rounds.slots[round]
            try:
                self._ring.acquire(slot.offset, slot.nbytes, deadline.left, check)
            except _core.DeadlineError as error:
                raise _core.DeadlineError(f"engine {self._engine.name}: {error}") from None

    def wait(self, round: int, timeout: float, check: Check) -> None:
        """Waits until the request of a round has been answered."""
        request = f"engine {self._engine.name}: update_weights_from_tensor"
        late = f"{request}: no answer for bucket {round}"
        result(self._sent[round], Deadline(timeout), check, late)

    def look(self) -> None:
        for sent in self._sent:
            if sent.done():
                sent.result()

    def close(self) -> None:
        if isinstance(self._ring, GpuRing):
            self._ring.close(self._engine.name)
        elif self._ring is not None:
            if not all(sent.done() for sent in self._sent):
                # also if this process ends before the engine has read it
                self._ring.leave(self._engine.name)
            self._thread.submit(functools.partial(self._close, self._ring))
        super().close()

    def _send(self, round: int) -> None:
        ring, metadata = self._ring, self.rounds.buckets[round]
        if not metadata:
            return
        assert ring is not None
        slot = self.rounds.slots[round]

        def payloads() -> list[bytes]:
            workers = range(self._engine.workers)
            return [ring.payload(slot.offset, slot.nbytes, metadata) for _ in workers]

        request = functools.partial(
            self._engine.update_weights,
            payloads,
            load_format=FLATTENED_BUCKET,
            weight_version=self._version if round == self.rounds.last else None,
            timeout=self._timeout,
        )
        self._ask(request)

    def _close(self, ring: SharedRing) -> None:
        """Removes the file once all requests have ended.  Leaves it if a request that was sent got
        no answer."""
        errors = [request.exception() for request in self._sent]
        if any(
            isinstance(error, _core.PeerClosedError | _core.DeadlineError)
            and not isinstance(error.__cause__, ConnectionRefusedError)
            for error in errors
        ):
            ring.leave(self._engine.name)
        else:
            ring.close()
