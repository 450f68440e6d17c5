"""Buckets on a GPU for engines without wsync, sent as torch's exporter sends them.

torch sends a CUDA tensor as a call of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.  The
arguments name an allocation by a handle of the driver (torch/csrc/StorageSharing.cpp), and a
counter in a file of /dev/shm (torch/csrc/CudaIPCTypes.cpp).  The counter is 1 until the consumer
has read everything and closed the handle.  SGLang names the GPU by its UUID
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

COUNTERS: Final = 10_000  # in a file, as in torch's
_KIND: Final = b"\x02c"  # begins torch's handles: version 2, cudaMalloc
_POLL_SECONDS: Final = 0.001
LEFT_SECONDS: Final = 600.0  # that a request may be on its way, for example at a gateway


@dataclasses.dataclass(frozen=True)
class GpuTensor:
    """Bytes in another process's memory of a GPU, as a payload names them, not yet opened.

    uuid: the GPU's, as torch writes it, without "GPU-".  handle: the driver's handle of the
    allocation.  offset, nbytes: in the allocation.  counter: (name of a file in /dev/shm, index of
    a counter there).
    """

    uuid: str
    handle: bytes
    offset: int
    nbytes: int
    counter: tuple[bytes, int]

    def arguments(self) -> tuple[object, ...]:
        """Returns rebuild_cuda_tensor's arguments for one tensor of all these bytes.  There is no
        event to wait for."""
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
    """Makes the payload of SGLang's load_format "flattened_bucket" for one worker."""
    call = payload.called(payload.REDUCTIONS, "rebuild_cuda_tensor", *tensor.arguments())
    return payload.flattened(call, metadata)


# --- memory ----------------------------------------------------------------------------------


_lock = threading.Lock()
retired_rings: list[tuple[GpuRing, float]] = []  # closed, and when; engines may use them


def collect() -> int:
    """Frees closed rings that no consumer has open; returns the bytes of the others.  A ring is
    freed after ten minutes in any case, because a consumer may never open its payload."""
    oldest = time.monotonic() - LEFT_SECONDS
    with _lock:
        kept = [(ring, since) for ring, since in retired_rings if ring.held() and since > oldest]
        free = [ring for ring, since in retired_rings if (ring, since) not in kept]
        retired_rings[:] = kept
    for ring in free:
        ring._memory.close()
    return sum(ring.nbytes for ring, _ in kept)


class GpuRing:
    """Memory of a GPU from which engines without wsync take buckets.

    It is one allocation of the driver.  Exported bytes stay as they are until each consumer has
    released them: `acquire` waits for that.  If some are not released when the ring is closed,
    `collect` frees the memory later.
    """

    def __init__(self, nbytes: int, device: _core.Device) -> None:
        held = collect()
        try:
            self._memory = _core.IpcMemory(device.ordinal, nbytes)
        except _core.NoMemoryError as error:
            if held == 0:
                raise
            raise _core.NoMemoryError(
                f"{error}; engines still hold {held} bytes of earlier buckets"
            ) from None
        self.address = self._memory.address
        self.nbytes = nbytes
        self._uuid = device.uuid.removeprefix("GPU-").lower()
        self._handle = self._memory.handle
        with torch.inference_mode(False):  # because other threads write to them, too
            self._counters = payload.shared_bytes(8 * COUNTERS).view(torch.int64)
        self._file: bytes = self._counters.untyped_storage()._share_filename_cpu_()[1]
        self._free = list(range(COUNTERS - 1, -1, -1))
        self._exports: dict[int, tuple[int, int]] = {}  # (begin, end) by counter
        self._exports_lock = threading.Lock()
        self._closed = False

    def export(self, offset: int, nbytes: int) -> GpuTensor:
        """Exports bytes of the ring; one consumer may open them once.

        Consumers know an open storage only by its offset.  Until a storage has been acquired as a
        whole, no storage of another size may begin at the same offset.
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
        """Makes the payload of a bucket at this offset, for one worker of an engine.  Write the
        bucket first, because the worker's reads do not wait for any stream."""
        return bucket(self.export(offset, nbytes), metadata)

    def held(self, offset: int = 0, nbytes: int | None = None) -> bool:
        """Whether a consumer has not yet released some of these bytes."""
        end = self.nbytes if nbytes is None else offset + nbytes
        with self._exports_lock:
            self._prune()
            return any(first < end and offset < last for first, last in self._exports.values())

    def acquire(self, offset: int, nbytes: int, timeout: float, check: Check) -> None:
        """Waits until every consumer has released these bytes.

        Raises:
            DeadlineError: a consumer has not released them; close this ring, and make another one.
        """
        deadline = Deadline(timeout)
        while self.held(offset, nbytes):
            check()
            if not deadline.left:
                raise _core.DeadlineError(
                    f"{nbytes} bytes of GPU {self._uuid} were not released within "
                    f"{seconds(timeout)}; to release them, the engine must see the trainer's "
                    f"/dev/shm{self._file.decode()}"
                )
            time.sleep(_POLL_SECONDS)

    def close(self, engine: str = "") -> None:
        """Frees the memory, or leaves that to `collect`.  No work on it may be under way.

        engine: name, for the log, of the engine that was sent a bucket of it.
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
                "wsync: engine %s has not released a bucket; until it does, or for ten minutes, %d "
                "bytes of a GPU stay allocated",
                engine,
                self.nbytes,
            )

    def _prune(self) -> None:
        """Forgets released exports; call it locked."""
        for counter in [c for c in self._exports if self._counters[c].item() <= 0]:
            del self._exports[counter]
            self._free.append(counter)
