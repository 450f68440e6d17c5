"""Buckets on a GPU for engines without wsync: what torch's exporter would send them, without it.

torch sends a CUDA tensor as a call of `torch.multiprocessing.reductions.rebuild_cuda_tensor`
whose arguments name an allocation by a handle of the driver (torch/csrc/StorageSharing.cpp), and
a counter in a file of /dev/shm (torch/csrc/CudaIPCTypes.cpp): 1 until the consumer, which has
closed the handle and read to the end, takes it down.  SGLang names the GPU by its UUID
(`sglang.srt.utils.patch_torch`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from wsync import _core
from wsync.machine.deadline import Check, Deadline, seconds
from wsync.messages import payload

_log = logging.getLogger(__name__)

COUNTERS: Final = 10_000  # in a file, as torch has it
_KIND: Final = b"\x02c"  # of torch's handles: version 2, of cudaMalloc
_POLL_SECONDS: Final = 0.001
LEFT_SECONDS: Final = 600.0  # that a request may be on its way, as at a gateway


@dataclasses.dataclass(frozen=True)
class GpuTensor:
    """Bytes in another process's memory of a GPU, as a payload has them; they are not open.

    uuid: the GPU's, as torch writes it: without "GPU-".  handle: the driver's, of the allocation.
    offset, nbytes: in the allocation.  counter: (name of a file in /dev/shm, which of its
    counters).
    """

    uuid: str
    handle: bytes
    offset: int
    nbytes: int
    counter: tuple[bytes, int]

    def arguments(self) -> tuple[object, ...]:
        """What rebuild_cuda_tensor is called with, for a storage of these bytes and a tensor of all
        of it.  There is no event to wait for."""
        return (
            payload.named("torch", "Tensor"),
            torch.Size([self.nbytes]),
            (1,),
            0,
            payload.named("torch.storage", "TypedStorage"),
            torch.uint8,
            self.uuid,
            _KIND + self.handle,
            self.nbytes,
            self.offset,
            False,
            *self.counter,
            bytes(64),
            False,
        )


# --- writing ---------------------------------------------------------------------------------


def bucket(tensor: GpuTensor, metadata: Sequence[Any]) -> bytes:
    """The payload of SGLang's load_format "flattened_bucket" for one worker."""
    call = payload.called(payload.REDUCTIONS, "rebuild_cuda_tensor", *tensor.arguments())
    return payload.flattened(call, metadata)


# --- memory ----------------------------------------------------------------------------------


_lock = threading.Lock()
retired_rings: list[tuple[GpuRing, float]] = []  # closed, but perhaps still open in an engine; when


def collect() -> int:
    """Frees closed rings that no consumer has open; returns the bytes of those still open.  A
    consumer may never have opened what it was sent, and cannot be asked: its ring is freed after
    ten minutes."""
    oldest = time.monotonic() - LEFT_SECONDS
    with _lock:
        kept = [(ring, since) for ring, since in retired_rings if ring.held() and since > oldest]
        free = [ring for ring, since in retired_rings if (ring, since) not in kept]
        retired_rings[:] = kept
    for ring in free:
        ring._memory.close()
    return sum(ring.nbytes for ring, _ in kept)


class GpuRing:
    """Memory of a GPU that engines without wsync take buckets from.

    It is one allocation by the driver.  What has been exported stays as it is until each consumer
    has let go: `acquire` waits for that, and `close` leaves it to `collect` to free what is still
    held then.
    """

    def __init__(self, nbytes: int, device: _core.Device) -> None:
        held = collect()
        try:
            self._memory = _core.IpcMemory(device.ordinal, nbytes)
        except _core.NoMemoryError as error:
            if held == 0:
                raise
            raise _core.NoMemoryError(
                f"{error}; engines have not let go of {held} bytes more"
            ) from None
        self.address = self._memory.address
        self.nbytes = nbytes
        self._uuid = device.uuid.removeprefix("GPU-").lower()
        self._handle = self._memory.handle
        with torch.inference_mode(False):  # other threads than this one write to them, too
            self._counters = payload.shared_bytes(8 * COUNTERS).view(torch.int64)
        self._file: bytes = self._counters.untyped_storage()._share_filename_cpu_()[1]
        self._free = list(range(COUNTERS - 1, -1, -1))
        self._exports: dict[int, tuple[int, int]] = {}  # by counter, from where to where
        self._exports_lock = threading.Lock()
        self._closed = False

    def export(self, offset: int, nbytes: int) -> GpuTensor:
        """Bytes of the ring for one consumer to open once.

        Consumers identify open storages only by their offset: until all of a storage
        has been acquired, none of another size may begin where it does.
        """
        with self._exports_lock:
            if self._closed:
                raise _core.StateError("the ring is closed")
            self._prune()
            counter = self._free.pop()
            self._counters[counter] = 1
            self._exports[counter] = (offset, offset + nbytes)
        return GpuTensor(self._uuid, self._handle, offset, nbytes, (self._file, counter))

    def payload(self, offset: int, nbytes: int, metadata: Sequence[Any]) -> bytes:
        """The bucket that lies there, for one worker of an engine.  It has to be written: what
        is read is not ordered after any stream."""
        return bucket(self.export(offset, nbytes), metadata)

    def held(self, offset: int = 0, nbytes: int | None = None) -> bool:
        """Whether a consumer has not let go of something that lies there."""
        end = self.nbytes if nbytes is None else offset + nbytes
        with self._exports_lock:
            self._prune()
            return any(first < end and offset < last for first, last in self._exports.values())

    def acquire(self, offset: int, nbytes: int, timeout: float, check: Check) -> None:
        """Waits until every consumer has let go of what lies there.

        Raises:
            DeadlineError: one has not; the ring may be closed, and another one made.
        """
        deadline = Deadline(timeout)
        while self.held(offset, nbytes):
            check()
            if not deadline.left:
                raise _core.DeadlineError(
                    f"{nbytes} bytes of GPU {self._uuid} were not let go of in {seconds(timeout)}; "
                    f"engines say so in /dev/shm{self._file.decode()}, if they see it"
                )
            time.sleep(_POLL_SECONDS)

    def close(self, engine: str = "") -> None:
        """Frees the memory, or leaves that to `collect`.  No work on it may be under way.

        engine: which one has been sent something of it, for the log.
        """
        with self._exports_lock:
            if self._closed:
                return
            self._closed = True
        with _lock:
            retired_rings.append((self, time.monotonic()))
        collect()
        if any(ring is self for ring, _ in retired_rings):
            _log.warning(
                "wsync: engine %s has not let go of a bucket, which keeps %d bytes of a GPU until "
                "it does, or for ten minutes",
                engine,
                self.nbytes,
            )

    def _prune(self) -> None:
        """Forgets what has been let go of; locked."""
        for counter in [c for c in self._exports if self._counters[c].item() <= 0]:
            del self._exports[counter]
            self._free.append(counter)
