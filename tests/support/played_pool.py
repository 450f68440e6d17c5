"""torch's pools of GPU memory, played for a torch without CUDA: one pool has the allocations of the
thread that uses it, and asks functions of C for memory, and gives it back, when torch does."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class Pool:
    """torch.cuda.MemPool of GPU 0."""

    def __init__(self, functions: tuple[int, int]) -> None:
        self.alloc, self.free = _ALLOC(functions[0]), _FREE(functions[1])
        self.id = (0, id(self))
        self.cached = dict[int, int]()

    def __del__(self) -> None:
        for address, nbytes in self.cached.items():
            self.free(address, nbytes, 0, None)


class PlayedTorch:
    """torch.cuda as far as wsync.exportable() asks it, in a context."""

    def __init__(self, *, initialized: bool = True, current: int = 0) -> None:
        self.initialized, self.current = initialized, current
        self._using = list[tuple[int, Pool]]()  # threads and the pools that they use
        self._pools = dict[Any, Pool]()

    def empty(self, nbytes: int) -> tuple[int, Pool] | None:
        """Address and pool of what a tensor would get; None: it is of no pool."""
        self.initialized = True
        pools = [pool for thread, pool in self._using if thread == threading.get_ident()]
        if not pools:
            return None
        address = pools[0].alloc(nbytes, 0, None)
        if address is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return address, pools[0]

    def _pool(self, functions: tuple[int, int]) -> Pool:
        pool = Pool(functions)
        self._pools[pool.id] = pool
        return pool

    def _begin(self, device: int, pool: Any) -> None:
        assert device == 0
        self._using.insert(0, (threading.get_ident(), self._pools[pool]))

    def _end(self, device: int, pool: Any) -> None:
        assert device == 0
        self._using.remove((threading.get_ident(), self._pools.pop(pool)))

    def _release(self, device: int, pool: Any) -> None:
        assert device == 0 and pool not in self._pools

    @contextlib.contextmanager
    def installed(self) -> Iterator[PlayedTorch]:
        memory = torch.cuda.memory
        with (
            mock.patch.object(torch.cuda, "is_initialized", lambda: self.initialized),
            mock.patch.object(torch.cuda, "current_device", lambda: self.current),
            mock.patch.object(torch.cuda, "MemPool", self._pool),
            mock.patch.object(
                torch._C, "_cuda_customAllocator", lambda *functions: functions, create=True
            ),
            mock.patch.object(memory, "_cuda_beginAllocateCurrentThreadToPool", self._begin),
            mock.patch.object(memory, "_cuda_endAllocateToPool", self._end),
            mock.patch.object(memory, "_cuda_releasePool", self._release),
        ):
            yield self
