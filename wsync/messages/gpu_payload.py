"""Buckets on a GPU for engines without wsync: what torch's exporter would send them, without it.

torch sends a CUDA tensor as a call of `torch.multiprocessing.reductions.rebuild_cuda_tensor`
whose arguments name an allocation by a handle of the driver (torch/csrc/StorageSharing.cpp), and
a counter in a file of /dev/shm (torch/csrc/CudaIPCTypes.cpp): 1 until the consumer, which has
closed the handle and read to the end, takes it down.  SGLang names the GPU by its UUID
(`sglang.srt.utils.patch_torch`); vLLM sends only the arguments, by the GPU's UUID
(`vllm.distributed.weight_transfer.ipc_engine`).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from wsync import _core
from wsync.layout import contiguous_strides
from wsync.machine.deadline import Check
from wsync.messages import payload, peer_memory

Handles = Mapping[str, "GpuTensor"]

COUNTERS: Final = 10_000  # in a file, as torch has it
_COUNTER: Final = struct.Struct("=q")
_FILE_NBYTES: Final = peer_memory.HEADER_NBYTES + COUNTERS * _COUNTER.size
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HANDLE_NBYTES: Final = 64
_PLAIN: Final = b"c"  # of cudaMalloc; "e" is torch's expandable segments
_VERSIONS: Final = (2, 3)  # of torch's handles; what is in a plain one has not changed
_MOST_NBYTES: Final = 2**63
_POLL_SECONDS: Final = 0.001


@dataclasses.dataclass(frozen=True)
class GpuTensor:
    """A tensor in another process's memory of a GPU, as a payload has it; it is not open.

    uuid: the GPU's, as torch writes it: without "GPU-".  handle: the driver's, of the allocation.
    offset, nbytes: of the storage in the allocation.  start: of the tensor in the storage, and
    stride, in elements.  counter: (name of a file in /dev/shm, which of its counters).
    """

    uuid: str
    handle: bytes
    offset: int
    nbytes: int
    counter: tuple[bytes, int]
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    start: int = 0

    def arguments(self, device: str | int) -> tuple[object, ...]:
        """What rebuild_cuda_tensor is called with.  There is no event to wait for."""
        return (
            payload.named("torch", "Tensor"),
            torch.Size(self.shape),
            self.stride,
            self.start,
            payload.named("torch.storage", "TypedStorage"),
            self.dtype,
            device,
            bytes((_VERSIONS[0],)) + _PLAIN + self.handle,
            self.nbytes,
            self.offset,
            False,
            *self.counter,
            bytes(_HANDLE_NBYTES),
            False,
        )

    def open(self) -> Opened:
        """Opens the memory in this process.

        Raises:
            UnsupportedError: this process does not see the GPU.
            StateError: the memory is this process's own.
            PeerClosedError: it is there no more.
            ProtocolError: the tensor does not lie inside it.
        """
        memory = _core.IpcMemory.open(_ordinal(self.uuid), self.handle)
        if self.offset + self.nbytes > memory.nbytes:
            text = f"storage of {self.nbytes} bytes at {self.offset} of {memory.nbytes} bytes"
            memory.close()
            raise payload.malformed(f"{text}")
        return Opened(self, memory)

    @property
    def spanned(self) -> int:
        """Elements from the tensor's first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


class Opened:
    """A GpuTensor that is open in this process: `nbytes` from `address` on.  A context manager."""

    def __init__(self, tensor: GpuTensor, memory: _core.IpcMemory) -> None:
        self._counter: tuple[bytes, int] | None = tensor.counter
        self._memory = memory
        itemsize = tensor.dtype.itemsize
        self.address = memory.address + tensor.offset + tensor.start * itemsize
        self.nbytes = tensor.spanned * itemsize

    def close(self) -> None:
        """Closes the memory and says so to its owner.  No work on it may be under way."""
        counter, self._counter = self._counter, None
        self._memory.close()
        if counter is not None:
            _count_down(*counter)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _count_down(file: bytes, counter: int) -> None:
    """Counts a consumer that has closed the memory, unless the owner has ended.  A file that is not
    torch's counters, and a counter of no consumers, stay as they are."""
    try:
        found = peer_memory.open_file(file, _FILE_NBYTES)
    except (OSError, _core.ProtocolError):
        return
    try:
        if os.fstat(found).st_size != _FILE_NBYTES:
            return
        at = peer_memory.HEADER_NBYTES + counter * _COUNTER.size
        with (
            mmap.mmap(found, _FILE_NBYTES) as data,
            memoryview(data) as whole,
            whole[at : at + _COUNTER.size] as word,
        ):
            _core.count_down(word, 0)
    finally:
        os.close(found)


def _plain_uuid(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _ordinal(uuid: str) -> int:
    """Which GPU of this process it is."""
    _, devices = _core.cuda_devices()
    uuids = [_plain_uuid(device[0]) for device in devices]
    if _plain_uuid(uuid) not in uuids:
        raise _core.UnsupportedError(
            f"GPU {uuid} is none of the {len(uuids)} that this process sees: {', '.join(uuids)}"
        )
    return uuids.index(_plain_uuid(uuid))


# --- writing ---------------------------------------------------------------------------------


def bucket(tensor: GpuTensor, metadata: Sequence[Any]) -> bytes:
    """The payload of SGLang's load_format "flattened_bucket" for one worker."""
    call = payload.called(payload.REDUCTIONS, "rebuild_cuda_tensor", *tensor.arguments(tensor.uuid))
    return payload.flattened(call, metadata)


def vllm_handles(handles: Handles | Sequence[Handles]) -> bytes:
    """What vLLM's `ipc_handles_pickled` holds, before base64: a tensor by the GPU's UUID if it
    takes them packed, and else a list of such dicts, in the order of its `names`.  Every worker
    takes the one on its own GPU."""
    if isinstance(handles, Mapping):
        return payload.values(_by_uuid(handles))
    return payload.values([_by_uuid(each) for each in handles])


def _by_uuid(handles: Handles) -> dict[str, object]:
    # a worker puts its own ordinal in the place of the owner's
    return {uuid: tensor.arguments(0) for uuid, tensor in handles.items()}


# --- reading ---------------------------------------------------------------------------------


def load(data: bytes | str) -> object:
    """`payload.load` that takes tensors on a GPU too, as GpuTensor."""
    return payload.load(data, gpu=_rebuild)


def load_vllm_handles(data: bytes | str) -> dict[str, GpuTensor] | list[dict[str, GpuTensor]]:
    """What `vllm_handles` was given, from its payload.  ProtocolError for anything else."""
    value = payload.load(data)
    if isinstance(value, list):
        return [_from_uuids(each) for each in value]
    return _from_uuids(value)


def _from_uuids(value: object) -> dict[str, GpuTensor]:
    if not isinstance(value, dict):
        raise payload.malformed(f"handles are a {type(value).__name__} instead of a dict")
    return {uuid: _parse(arguments, uuid) for uuid, arguments in value.items()}


def _rebuild(*arguments: object) -> GpuTensor:
    """torch.multiprocessing.reductions.rebuild_cuda_tensor, of any arguments."""
    return _parse(arguments, arguments[6] if len(arguments) > 6 else None)


def _parse(arguments: object, uuid: object) -> GpuTensor:
    """A tensor from rebuild_cuda_tensor's arguments, which anyone may have made up."""
    if not isinstance(arguments, tuple) or len(arguments) != 15:
        raise payload.malformed("a tensor on a GPU has 15 arguments")
    kind, shape, stride, start, storage, dtype, _, handle, nbytes, offset = arguments[:10]
    _, file, counter, _, waits = arguments[10:]
    if kind is not payload.refuse_call or storage is not payload.refuse_call:
        raise payload.malformed("a tensor on a GPU is not of torch's own classes")
    if not isinstance(uuid, str) or not _UUID.fullmatch(uuid):
        raise payload.malformed(f"{payload.brief(uuid)} is not the UUID of a GPU")
    if not isinstance(dtype, torch.dtype):
        raise payload.malformed(f"{payload.brief(dtype)} is not the dtype of a tensor")
    if not isinstance(file, bytes) or not peer_memory.is_file_name(file):
        raise payload.malformed(f"{payload.brief(file)} is not torch's file of counters")
    if waits is not False:  # torch's exporter asks for that, and its event ends with it
        raise payload.malformed("a tensor on a GPU that is to wait for an event")
    tensor = GpuTensor(
        uuid,
        _plain_handle(handle),
        _number("offset of a storage", offset, _MOST_NBYTES),
        _number("size of a storage", nbytes, _MOST_NBYTES),
        (file, _number("counter", counter, COUNTERS)),
        dtype,
        payload.read_sizes(shape),
        payload.read_sizes(stride),
        _number("offset of a tensor", start, _MOST_NBYTES),
    )
    if len(tensor.shape) != len(tensor.stride):
        raise payload.malformed(f"shape {tensor.shape} with stride {tensor.stride}")
    end = (tensor.start + tensor.spanned) * dtype.itemsize if tensor.spanned else 0
    if end > tensor.nbytes:
        raise payload.malformed(
            f"tensor of shape {tensor.shape} and stride {tensor.stride} at "
            f"{tensor.start} needs {end} bytes of a storage of {tensor.nbytes}"
        )
    return tensor


def _number(what: str, value: object, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise payload.malformed(f"{what} {payload.brief(value)}: not from 0 to {end - 1}")
    return value


def _plain_handle(handle: object) -> bytes:
    if not isinstance(handle, bytes) or len(handle) < 2 or handle[0] not in _VERSIONS:
        raise payload.malformed("a handle of GPU memory in no form that is known")
    if handle[1:2] != _PLAIN or len(handle) != 2 + _HANDLE_NBYTES:
        raise payload.malformed(
            f"a handle of GPU memory of kind {handle[1:2]!r} and {len(handle)} bytes: "
            "only plain allocations are opened, no expandable segments"
        )
    return handle[2:]


# --- memory ----------------------------------------------------------------------------------

_lock = threading.Lock()
_parting: list[GpuRing] = []  # closed, but not let go of by every consumer


def collect() -> int:
    """Frees closed rings that no consumer has open; returns the bytes of those still open."""
    with _lock:
        free = [ring for ring in _parting if not ring.held()]
        for ring in free:
            _parting.remove(ring)
        left = sum(ring.nbytes for ring in _parting)
    for ring in free:
        ring._memory.close()
    return left


class GpuRing:
    """Memory of a GPU that engines without wsync take buckets from.

    It is one allocation by the driver.  What has been exported stays as it is until each consumer
    has let go: `acquire` waits for that, and `close` leaves it to `collect` to free what is still
    held then; memory whose consumer has died without a word is held until this process ends.
    """

    def __init__(self, nbytes: int, uuid: str) -> None:
        held = collect()
        try:
            self._memory = _core.IpcMemory(_ordinal(uuid), nbytes)
        except _core.NoMemoryError as error:
            if held == 0:
                raise
            raise _core.NoMemoryError(
                f"{error}; engines have not let go of {held} bytes more"
            ) from None
        self.address = self._memory.address
        self.nbytes = nbytes
        self._uuid = _plain_uuid(uuid)
        self._handle = self._memory.handle
        self._counters = payload.shared_bytes(COUNTERS * _COUNTER.size).view(torch.int64)
        self._file: bytes = self._counters.untyped_storage()._share_filename_cpu_()[1]
        self._free = list(range(COUNTERS - 1, -1, -1))
        self._exports: dict[int, tuple[int, int]] = {}  # by counter, from where to where
        self._exports_lock = threading.Lock()
        self._closed = False

    def export(
        self,
        offset: int,
        nbytes: int,
        *,
        dtype: torch.dtype = torch.uint8,
        shape: tuple[int, ...] | None = None,
        start: int = 0,
    ) -> GpuTensor:
        """A storage of the ring for one consumer to open once, and a tensor in it: all its bytes,
        or a contiguous one of `shape` that starts at element `start`.

        Consumers identify open storages only by their offset: until all of a storage
        has been acquired, none of another size may begin where it does.
        """
        sizes = (nbytes,) if shape is None else shape
        end = (start + math.prod(sizes)) * dtype.itemsize
        if min(offset, nbytes, start) < 0 or offset + nbytes > self.nbytes or end > nbytes:
            raise _core.InvalidArgumentError(
                f"tensor of shape {sizes} and {dtype} at {start} of {nbytes} bytes at {offset} of "
                f"a ring of {self.nbytes}"
            )
        counter = self._take_counter(offset, offset + nbytes)
        return GpuTensor(
            self._uuid,
            self._handle,
            offset,
            nbytes,
            (self._file, counter),
            dtype,
            sizes,
            contiguous_strides(sizes),
            start,
        )

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
        end = time.monotonic() + timeout
        while self.held(offset, nbytes):
            check()
            if time.monotonic() > end:
                raise _core.DeadlineError(
                    f"{nbytes} bytes of GPU {self._uuid} were not let go of in {timeout:.0f} s; "
                    f"engines say so in /dev/shm{self._file.decode()}, if they see it"
                )
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Frees the memory, or leaves that to `collect`.  No work on it may be under way."""
        with self._exports_lock:
            if self._closed:
                return
            self._closed = True
        with _lock:
            _parting.append(self)
        collect()

    def _prune(self) -> None:
        """Forgets what has been let go of; locked."""
        for counter in [c for c in self._exports if self._counters[c].item() <= 0]:
            del self._exports[counter]
            self._free.append(counter)

    def _take_counter(self, first: int, last: int) -> int:
        with self._exports_lock:
            if self._closed:
                raise _core.StateError("the ring is closed")
            if not self._free:
                self._prune()
            if not self._free:
                raise _core.NoMemoryError(
                    f"a ring has {COUNTERS} buckets that no engine has let go of"
                )
            counter = self._free.pop()
            self._counters[counter] = 1
            self._exports[counter] = (first, last)
            return counter
