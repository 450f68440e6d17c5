"""Weights on a GPU that tests/fakecuda plays: tensors as far as wsync asks them where they lie."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from wsync import _core
from wsync.layout import TrainerLayout
from wsync.machine.device import uuid


class PlayedTensor:
    """A contiguous tensor at an address of GPU 0."""

    def __init__(self, address: int, like: torch.Tensor, memory: object = None) -> None:
        self._address, self._like, self._memory = address, like, memory
        self.dtype, self.shape = like.dtype, like.shape
        self.device = SimpleNamespace(type="cuda", index=0)

    def stride(self) -> tuple[int, ...]:
        return self._like.stride()

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._like.element_size()

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self._like.nbytes)

    def is_neg(self) -> bool:
        return False

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a contiguous tensor there."""
        ctypes.memmove(reach(self._address), tensor.data_ptr(), tensor.nbytes)


def reach(address: int) -> int:
    """Where the processor reads and writes what the GPU has at an address."""
    library = ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"])
    library.fakecuda_reach.restype = ctypes.c_void_p
    found: int = library.fakecuda_reach(ctypes.c_void_p(address))
    return found


def put(tensor: torch.Tensor) -> PlayedTensor:
    """A copy of a contiguous tensor in memory of the GPU."""
    memory = _core.IpcMemory(0, max(tensor.nbytes, 1))
    copy = PlayedTensor(memory.address, tensor, memory)
    copy.fill(tensor)
    return copy


def _call(name: str, *arguments: Any) -> None:
    """Has the driver do something that wsync does not ask it for."""
    uuid(0)  # it has been started
    library = ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"])
    function, status = ctypes.c_void_p(), ctypes.c_int()
    wanted = (ctypes.byref(function), 13000, ctypes.c_uint64(0), ctypes.byref(status))
    library.cuGetProcAddress_v2(name.encode(), *wanted)
    assert ctypes.CFUNCTYPE(ctypes.c_int)(function.value)(*arguments) == 0


def reserve(like: torch.Tensor) -> PlayedTensor:
    """A tensor whose address is reserved on the GPU, where no memory lies."""
    at, nbytes, none = ctypes.c_uint64(), ctypes.c_size_t(2 << 20), ctypes.c_uint64(0)
    _call("cuMemAddressReserve", ctypes.byref(at), nbytes, ctypes.c_size_t(0), none, none)
    return PlayedTensor(at.value, like)


@contextlib.contextmanager
def hold(nbytes: int) -> Iterator[None]:
    """Around what has so much less of GPU 0's memory; nobody writes there."""
    handle = ctypes.c_uint64()
    # CUmemAllocationProp: pinned memory of device 0
    wanted = (ctypes.c_int * 8)(1, 0, 1, 0)
    if nbytes:
        size = ctypes.c_size_t(nbytes)
        _call("cuMemCreate", ctypes.byref(handle), size, wanted, ctypes.c_uint64(0))
    try:
        yield
    finally:
        if nbytes:
            _call("cuMemRelease", handle)


def source_of(names: Sequence[str], tensors: Sequence[Any]) -> TrainerLayout:
    """The layout of one rank that holds whole tensors."""
    table = _core.describe(tensors, names, gpu=True)
    builder = _core.LayoutBuilder(0)
    builder.add_tensors(names, table)
    return TrainerLayout(builder.build(), tuple(names), lambda: tensors, table)
