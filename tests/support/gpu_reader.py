"""What a consumer of wsync's buckets on a GPU does: reads their payloads, opens the memory and
counts itself off.  SGLang leaves that to torch, which needs a GPU for it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch

from wsync import _core
from wsync.messages import payload
from wsync.messages.gpu_payload import COUNTERS, GpuRing, GpuTensor

_COUNTER_NBYTES: Final = 8
_HEADER_NBYTES: Final = 64  # of torch's segments
_FILE_NBYTES: Final = _HEADER_NBYTES + COUNTERS * _COUNTER_NBYTES


class _Handle(ctypes.Structure):
    """CUipcMemHandle of cuda.h."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def _call(name: str, *arguments: Any) -> None:
    """A call of the driver; DeviceError where it fails."""
    library = ctypes.CDLL(os.environ.get("WSYNC_CUDA_LIB", "libcuda.so.1"))
    found, status = ctypes.c_void_p(), ctypes.c_int()
    wanted = (ctypes.byref(found), 12000, ctypes.c_uint64(0), ctypes.byref(status))
    library.cuGetProcAddress_v2(name.encode(), *wanted)
    code = ctypes.CFUNCTYPE(ctypes.c_int)(found.value)(*arguments)
    if code != 0:
        raise _core.DeviceError(f"{name}: {code}")


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[None]:
    """The GPU's own context, which wsync and torch use too."""
    context = ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    try:
        _call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent", ctypes.byref(context))
    finally:
        _call("cuDevicePrimaryCtxRelease", ordinal)


class Mapped:
    """The allocation of another process that a handle stands for: `nbytes` from `address` on."""

    def __init__(self, ordinal: int, handle: bytes) -> None:
        self._ordinal = ordinal
        self._at = ctypes.c_uint64()
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with _context(ordinal):
            given = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle", ctypes.byref(self._at), given, ctypes.c_uint(1))
            _call("cuMemGetAddressRange", ctypes.byref(base), ctypes.byref(nbytes), self._at)
        self.address, self.nbytes = self._at.value, nbytes.value

    def close(self) -> None:
        if self._at.value:
            with _context(self._ordinal):
                at, self._at = self._at, ctypes.c_uint64()
                _call("cuIpcCloseMemHandle", at)

    __del__ = close  # where a call has failed


def _ordinal(uuid: str) -> int:
    """Which GPU of this process it is."""
    _, devices = _core.cuda_devices()
    uuids = [device[0].removeprefix("GPU-") for device in devices]
    if uuid not in uuids:
        raise _core.UnsupportedError(f"GPU {uuid} is none of {', '.join(uuids)}")
    return uuids.index(uuid)


def new_ring(nbytes: int, uuid: str) -> GpuRing:
    """A ring on a GPU of this process."""
    device: Any = SimpleNamespace(ordinal=_ordinal(uuid), uuid=f"GPU-{uuid}")
    return GpuRing(nbytes, device)


def open_tensor(tensor: GpuTensor) -> Opened:
    """Opens the memory in this process.

    Raises:
        UnsupportedError: this process does not see the GPU.
        DeviceError: the driver does not open it.
        ProtocolError: the tensor does not lie inside it.
    """
    memory = Mapped(_ordinal(tensor.uuid), tensor.handle)
    if tensor.offset + tensor.nbytes > memory.nbytes:
        text = f"storage of {tensor.nbytes} bytes at {tensor.offset} of {memory.nbytes} bytes"
        memory.close()
        raise payload.malformed(f"{text}")
    return Opened(tensor, memory)


class Opened:
    """A GpuTensor that is open in this process: `nbytes` from `address` on.  A context manager."""

    def __init__(self, tensor: GpuTensor, memory: Mapped) -> None:
        self._counter: tuple[bytes, int] | None = tensor.counter
        self._memory = memory
        self.address = memory.address + tensor.offset
        self.nbytes = tensor.nbytes

    def close(self) -> None:
        """Closes the memory and says so to its owner.  No work on it may be under way."""
        counter, self._counter = self._counter, None
        self._memory.close()
        if counter is not None:
            count_down(*counter)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_down(file: bytes, counter: int) -> None:
    """Counts a consumer that has closed the memory, unless the owner has ended.  A file that is not
    torch's counters, and a counter of no consumers, stay as they are."""
    try:
        found = os.open(b"/dev/shm" + file, os.O_RDWR)
    except OSError:
        return
    try:
        if os.fstat(found).st_size != _FILE_NBYTES:
            return
        at = _HEADER_NBYTES + counter * _COUNTER_NBYTES
        with (
            mmap.mmap(found, _FILE_NBYTES) as data,
            memoryview(data) as whole,
            whole[at : at + _COUNTER_NBYTES] as word,
        ):
            _core.count_down(word, 0)
    finally:
        os.close(found)


def load(data: bytes) -> object:
    """`payload.load` that takes tensors on a GPU too, as GpuTensor."""
    with mock.patch.dict(
        payload._REPLACED, {(payload.REDUCTIONS, "rebuild_cuda_tensor"): _rebuild}
    ):
        return payload.load(data)


def _rebuild(*arguments: Any) -> GpuTensor:
    """torch.multiprocessing.reductions.rebuild_cuda_tensor, of what wsync sends."""
    if len(arguments) != 15:
        raise payload.malformed("a tensor on a GPU has 15 arguments")
    *_, uuid, handle, nbytes, offset, _, file, counter, _, _ = arguments
    tensor = GpuTensor(uuid, handle[2:], offset, nbytes, (file, counter))
    sent = list(tensor.arguments())
    sent[0], sent[4] = torch.Tensor, torch.storage.TypedStorage  # what a reader makes of names
    if sent != list(arguments):
        raise payload.malformed(f"another call than wsync's: {arguments}")
    return tensor
