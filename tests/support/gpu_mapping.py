"""Memory of a real GPU whose address stays while it is taken away and brought back, as
torch_memory_saver does with a paused model's; and the descriptor of memory that has one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

_NBYTES = 2 << 20  # a multiple of every GPU's granularity


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Allocation(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Mapping:
    """2 MiB of GPU 0, which torch's context is current for."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._at = ctypes.c_uint64()
        at, nothing = ctypes.byref(self._at), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", at, self._size, ctypes.c_size_t(0), nothing, nothing)
        self.map()

    @property
    def _size(self) -> Any:
        return ctypes.c_size_t(_NBYTES)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def map(self) -> None:
        where = Location(1, 0)  # CU_MEM_LOCATION_TYPE_DEVICE
        wanted = Allocation(type=1, location=where)  # CU_MEM_ALLOCATION_TYPE_PINNED
        handle, nothing = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(wanted), nothing)
        self._call("cuMemMap", self._at, self._size, ctypes.c_size_t(0), handle, nothing)
        self._call("cuMemRelease", handle)
        access = Access(where, 3)  # to read and write
        self._call("cuMemSetAccess", self._at, self._size, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self) -> None:
        torch.cuda.synchronize()
        self._call("cuMemUnmap", self._at, self._size)

    def tensor(self) -> torch.Tensor:
        """All of it, as float32."""
        facts = {
            "shape": (_NBYTES // 4,),
            "typestr": "<f4",
            "data": (self._at.value, False),
            "version": 3,
        }
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=facts), device="cuda:0")


def descriptor(address: int) -> int | None:
    """Of the memory at an address of the GPU whose context is current, for the caller to close;
    None: it was made without."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, fd, nothing = ctypes.c_uint64(), ctypes.c_int(-1), ctypes.c_uint64(0)
    if driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)) != 0:
        return None
    posix = ctypes.c_int(1)  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    status = driver.cuMemExportToShareableHandle(ctypes.byref(fd), handle, posix, nothing)
    assert driver.cuMemRelease(handle) == 0
    return fd.value if status == 0 else None
