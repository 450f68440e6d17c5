"""What wsync takes the CUDA driver to do, by NVIDIA's cuda.h: asked of a GPU's driver and of
tests/fakecuda alike.  Each case returns what differs from that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any, Final

from support.gpu_mapping import Access, Allocation, Location

_PIECE: Final = 2 << 20  # a multiple of every GPU's granularity
_UNKNOWN: Final = {1, 500}  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND
_NOT_READY: Final = 600
_FIELDS: Final = {
    "type": (2, ctypes.c_uint),
    "start": (11, ctypes.c_uint64),
    "size": (12, ctypes.c_size_t),
    "mapped": (13, ctypes.c_bool),
}


def _code(name: str, *arguments: Any) -> int:
    library = ctypes.CDLL(os.environ.get("WSYNC_CUDA_LIB", "libcuda.so.1"))
    found, status = ctypes.c_void_p(), ctypes.c_int()
    wanted = (ctypes.byref(found), 12060, ctypes.c_uint64(0), ctypes.byref(status))
    assert library.cuGetProcAddress_v2(name.encode(), *wanted) == 0, name
    return ctypes.CFUNCTYPE(ctypes.c_int)(found.value)(*arguments)


def _call(name: str, *arguments: Any) -> None:
    code = _code(name, *arguments)
    assert code == 0, f"{name}: {code}"


@contextlib.contextmanager
def _context() -> Iterator[ctypes.c_void_p]:
    context = ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    _call("cuCtxPushCurrent", context)
    yield context
    _call("cuCtxPopCurrent", ctypes.byref(context))
    _call("cuDevicePrimaryCtxRelease", 0)


def _attributes(address: int) -> dict[str, int]:
    values = {name: kind() for name, (_, kind) in _FIELDS.items()}
    numbers = (ctypes.c_int * len(_FIELDS))(*(number for number, _ in _FIELDS.values()))
    places = (ctypes.c_void_p * len(_FIELDS))(*map(ctypes.addressof, values.values()))
    count, at = ctypes.c_uint(len(_FIELDS)), ctypes.c_uint64(address)
    _call("cuPointerGetAttributes", count, numbers, places, at)
    return {name: int(value.value) for name, value in values.items()}


def _range(address: int) -> tuple[int, int] | None:
    """None: the driver knows of none there."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    at = ctypes.c_uint64(address)
    code = _code("cuMemGetAddressRange", ctypes.byref(base), ctypes.byref(nbytes), at)
    assert code == 0 or code in _UNKNOWN, code
    return None if code else (base.value, nbytes.value)


def _differences(**facts: tuple[object, object]) -> dict[str, tuple[object, object]]:
    return {name: pair for name, pair in facts.items() if pair[0] != pair[1]}


def pointers() -> dict[str, Any]:
    """Of a reservation with a hole between two mappings, and of an allocation."""
    at, none, piece = ctypes.c_uint64(), ctypes.c_uint64(0), ctypes.c_size_t(_PIECE)
    where, handles = Location(1, 0), []
    wanted, access = Allocation(type=1, handle_types=1, location=where), Access(where, 3)
    with _context():
        whole = ctypes.c_size_t(3 * _PIECE)
        _call("cuMemAddressReserve", ctypes.byref(at), whole, ctypes.c_size_t(0), none, none)
        first = at.value
        for begin in (first, first + 2 * _PIECE):
            handle, place = ctypes.c_uint64(), ctypes.c_uint64(begin)
            _call("cuMemCreate", ctypes.byref(handle), piece, ctypes.byref(wanted), none)
            _call("cuMemMap", place, piece, ctypes.c_size_t(0), handle, none)
            _call("cuMemSetAccess", place, piece, ctypes.byref(access), ctypes.c_size_t(1))
            again = ctypes.c_uint64()
            _call("cuMemRetainAllocationHandle", ctypes.byref(again), ctypes.c_void_p(begin + 9))
            handles.append((again.value, handle.value))
            _call("cuMemRelease", again)
            _call("cuMemRelease", handle)
        allocated = ctypes.c_uint64()
        _call("cuMemAlloc", ctypes.byref(allocated), piece)
        inside, hole = _attributes(first + 9), _attributes(first + _PIECE)
        other, host = _attributes(allocated.value + 9), ctypes.create_string_buffer(64)
        unknown = _attributes(ctypes.addressof(host))
        different = _differences(
            # the mappable range, and not what is mapped
            range=((inside["start"], inside["size"]), (first, 3 * _PIECE)),
            mapped=((inside["type"], inside["mapped"], hole["mapped"]), (2, 1, 0)),
            mapping=(_range(first + 9), (first, _PIECE)),
            hole=(_range(first + _PIECE), None),
            behind=(_range(first + 2 * _PIECE), (first + 2 * _PIECE, _PIECE)),
            allocation=(_range(allocated.value + 9), (allocated.value, _PIECE)),
            legacy=((other["type"], other["mapped"]), (2, 1)),
            host=(unknown["mapped"], 0),
            handles=([a for a, _ in handles], [b for _, b in handles]),
        )
        _call("cuMemFree", allocated)
        for begin in (first, first + 2 * _PIECE):
            _call("cuMemUnmap", ctypes.c_uint64(begin), piece)
        _call("cuMemAddressFree", at, whole)
    return different


def contexts() -> dict[str, Any]:
    """An event of a context stands for what its streams were given before, whoever made them."""
    word, at = (ctypes.c_uint64 * 512)(), ctypes.c_uint64()
    busy, free = ctypes.c_void_p(), ctypes.c_void_p()
    event, after = ctypes.c_void_p(), ctypes.c_void_p()
    no_timing = ctypes.c_uint(2)
    with _context() as context:
        _call("cuMemHostRegister", word, ctypes.c_size_t(ctypes.sizeof(word)), ctypes.c_uint(2))
        _call("cuMemHostGetDevicePointer", ctypes.byref(at), word, ctypes.c_uint(0))
        for stream in (busy, free):
            _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))  # non-blocking
        for each in (event, after):
            _call("cuEventCreate", ctypes.byref(each), no_timing)
        _call("cuStreamWaitValue64", busy, at, ctypes.c_uint64(1), ctypes.c_uint(0))
        _call("cuCtxRecordEvent", context, event)
        _call("cuStreamWaitEvent", free, event, ctypes.c_uint(0))
        _call("cuEventDestroy", event)
        _call("cuEventRecord", after, free)
        time.sleep(0.05)  # what waits for nothing is through by then
        before = _code("cuEventQuery", after)
        word[0] = 1
        _call("cuStreamSynchronize", free)
        different = _differences(
            waits=(before, _NOT_READY),
            goes_on=(_code("cuEventQuery", after), 0),
            settled=((_code("cuCtxSynchronize"), _code("cuStreamQuery", busy)), (0, 0)),
        )
        _call("cuEventDestroy", after)
        for stream in (busy, free):
            _call("cuStreamDestroy", stream)
        _call("cuMemHostUnregister", word)
    return different
