"""Types with a DLPack exchange API of their own, which says what a test wants."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

CAPSULE = b"dlpack_exchange_api"


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class View(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Table(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("view_of_object", ctypes.c_void_p),
        ("work_stream", ctypes.c_void_p),
    ]


Read = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))
Make = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


class Posing:
    """Says of itself what its tensor says, but for what goes through DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def numbers(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def type_with(change: Callable[[View], object], **table: int) -> type[Posing]:
    """A type whose exchange describes the tensor and then lets `change` change it; `table` changes
    the exchange's own fields."""

    def read(posing: Posing, view: Any) -> int:
        tensor = posing.tensor
        sizes, steps = numbers(*tensor.shape), numbers(*tensor.stride())
        posing.kept = sizes, steps
        view[0] = View(
            tensor.data_ptr(), Device(1, 0), tensor.dim(), Dtype(2, 32, 1), sizes, steps, 0
        )
        return int(change(view[0]) or 0)

    callback = Read(read)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    api = Table(major=1, minor=3, view_of_object=address)
    for name, value in table.items():
        setattr(api, name, value)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.addressof(api), CAPSULE, None)
    known = {"__dlpack_c_exchange_api__": capsule, "alive": (callback, api)}
    return type("Posed", (Posing,), known)
