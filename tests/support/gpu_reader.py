"""What a consumer of wsync's buckets on a GPU does: reads their payloads, opens the memory and
counts itself off.  SGLang leaves that to torch, which needs a GPU for it."""

from __future__ import annotations

import mmap
import os
from typing import Any, Final
from unittest import mock

from wsync import _core
from wsync.messages import gpu_payload, payload, torch_shm_reader
from wsync.messages.gpu_payload import COUNTERS, GpuTensor

_COUNTER_NBYTES: Final = 8
_FILE_NBYTES: Final = torch_shm_reader.HEADER_NBYTES + COUNTERS * _COUNTER_NBYTES


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


class Opened:
    """A GpuTensor that is open in this process: `nbytes` from `address` on.  A context manager."""

    def __init__(self, tensor: GpuTensor, memory: _core.IpcMemory) -> None:
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


def load(data: bytes) -> object:
    """`payload.load` that takes tensors on a GPU too, as GpuTensor."""
    with mock.patch.dict(payload._GLOBALS, {(payload.REDUCTIONS, "rebuild_cuda_tensor"): _rebuild}):
        return payload.load(data)


def _rebuild(*arguments: Any) -> GpuTensor:
    """torch.multiprocessing.reductions.rebuild_cuda_tensor, of what wsync sends."""
    if len(arguments) != 15:
        raise payload.malformed("a tensor on a GPU has 15 arguments")
    *_, uuid, handle, nbytes, offset, _, file, counter, _, _ = arguments
    tensor = GpuTensor(uuid, handle[2:], offset, nbytes, (file, counter))
    sent = list(tensor.arguments())
    sent[0] = sent[4] = payload.refuse_call  # what a reader makes of classes
    if sent != list(arguments):
        raise payload.malformed(f"another call than wsync's: {arguments}")
    return tensor
