"""What a consumer of wsync's buckets on a GPU does: reads their payloads, opens the memory and
counts itself off.  SGLang and vLLM leave that to torch, which needs a GPU for it."""

from __future__ import annotations

import mmap
import os
import re
from typing import Final

import torch

from wsync import _core
from wsync.messages import gpu_payload, payload, torch_shm_reader
from wsync.messages.gpu_payload import COUNTERS, GpuTensor

_COUNTER_NBYTES: Final = 8
_FILE_NBYTES: Final = torch_shm_reader.HEADER_NBYTES + COUNTERS * _COUNTER_NBYTES
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HANDLE_NBYTES: Final = 64
_VERSIONS: Final = (2, 3)  # of torch's handles; what is in a plain one has not changed
_MOST_NBYTES: Final = 2**63


def open_tensor(tensor: GpuTensor) -> Opened:
    """Opens the memory in this process.

    Raises:
        UnsupportedError: this process does not see the GPU.
        StateError: the memory is this process's own.
        PeerClosedError: it is there no more.
        ProtocolError: the tensor does not lie inside it.
    """
    memory = _core.IpcMemory.open(gpu_payload._ordinal(tensor.uuid), tensor.handle)
    if tensor.offset + tensor.nbytes > memory.nbytes:
        text = f"storage of {tensor.nbytes} bytes at {tensor.offset} of {memory.nbytes} bytes"
        memory.close()
        raise payload.malformed(f"{text}")
    return Opened(tensor, memory)


def spanned(tensor: GpuTensor) -> int:
    """Elements from the tensor's first to its last."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))


class Opened:
    """A GpuTensor that is open in this process: `nbytes` from `address` on.  A context manager."""

    def __init__(self, tensor: GpuTensor, memory: _core.IpcMemory) -> None:
        self._counter: tuple[bytes, int] | None = tensor.counter
        self._memory = memory
        itemsize = tensor.dtype.itemsize
        self.address = memory.address + tensor.offset + tensor.start * itemsize
        self.nbytes = spanned(tensor) * itemsize

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
        found = torch_shm_reader.open_file(file, _FILE_NBYTES)
    except (OSError, _core.ProtocolError):
        return
    try:
        if os.fstat(found).st_size != _FILE_NBYTES:
            return
        at = torch_shm_reader.HEADER_NBYTES + counter * _COUNTER_NBYTES
        with (
            mmap.mmap(found, _FILE_NBYTES) as data,
            memoryview(data) as whole,
            whole[at : at + _COUNTER_NBYTES] as word,
        ):
            _core.count_down(word, 0)
    finally:
        os.close(found)


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
    if not isinstance(file, bytes) or not torch_shm_reader.is_file_name(file):
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
    end = (tensor.start + spanned(tensor)) * dtype.itemsize if spanned(tensor) else 0
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
    if handle[1:2] != b"c" or len(handle) != 2 + _HANDLE_NBYTES:
        raise payload.malformed(
            f"a handle of GPU memory of kind {handle[1:2]!r} and {len(handle)} bytes: "
            "only plain allocations are opened, no expandable segments"
        )
    return handle[2:]
