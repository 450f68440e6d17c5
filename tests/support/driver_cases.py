"""What wsync takes the CUDA driver to do, by NVIDIA's cuda.h: asked of a GPU's driver and of
tests/fakecuda alike.  Each case returns what differs from that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist
from support.gpu_mapping import Access, Allocation, Location

_PIECE: Final = 2 << 20  # a multiple of every GPU's granularity
_UNKNOWN: Final = {1, 500}  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND
_NOT_READY: Final = 600
_FIELDS: Final = {
    "type": (2, ctypes.c_uint),
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


@contextlib.contextmanager
def _stream() -> Iterator[ctypes.c_void_p]:
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))  # non-blocking
    yield stream
    _call("cuStreamSynchronize", stream)
    _call("cuStreamDestroy", stream)


@contextlib.contextmanager
def _words() -> Iterator[tuple[Any, int]]:
    """Words of the host, 0 at first, and where the device has them."""
    words, at = (ctypes.c_uint64 * 512)(), ctypes.c_uint64()
    _call("cuMemHostRegister", words, ctypes.c_size_t(ctypes.sizeof(words)), ctypes.c_uint(2))
    _call("cuMemHostGetDevicePointer", ctypes.byref(at), words, ctypes.c_uint(0))
    yield words, at.value
    _call("cuMemHostUnregister", words)


@contextlib.contextmanager
def _allocated() -> Iterator[int]:
    at = ctypes.c_uint64()
    _call("cuMemAlloc", ctypes.byref(at), ctypes.c_size_t(_PIECE))
    yield at.value
    _call("cuMemFree", at)


def _fill(at: int, value: int, stream: ctypes.c_void_p) -> None:
    place, size = ctypes.c_uint64(at), ctypes.c_size_t(_PIECE)
    _call("cuMemsetD8Async", place, ctypes.c_ubyte(value), size, stream)


def _read(at: int, stream: ctypes.c_void_p) -> Any:
    """A word, once the stream is through."""
    word, size = ctypes.c_uint64(), ctypes.c_size_t(8)
    _call("cuMemcpyDtoHAsync", ctypes.byref(word), ctypes.c_uint64(at), size, stream)
    return word


def _wait(stream: ctypes.c_void_p, at: int, value: int) -> None:
    """At least the value."""
    _call(
        "cuStreamWaitValue64", stream, ctypes.c_uint64(at), ctypes.c_uint64(value), ctypes.c_uint(0)
    )


def _create(nbytes: int = _PIECE) -> tuple[int, ctypes.c_uint64]:
    """The code, and a handle of memory that can be exported as a descriptor."""
    handle, none = ctypes.c_uint64(), ctypes.c_uint64(0)
    wanted = Allocation(type=1, handle_types=1, location=Location(1, 0))
    size = ctypes.c_size_t(nbytes)
    return _code("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(wanted), none), handle


@contextlib.contextmanager
def _mapped(handle: ctypes.c_uint64) -> Iterator[int]:
    """What a handle stands for, which is let go of."""
    at, none, size = ctypes.c_uint64(), ctypes.c_uint64(0), ctypes.c_size_t(_PIECE)
    access = Access(Location(1, 0), 3)
    _call("cuMemAddressReserve", ctypes.byref(at), size, ctypes.c_size_t(0), none, none)
    _call("cuMemMap", at, size, ctypes.c_size_t(0), handle, none)
    _call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
    _call("cuMemRelease", handle)
    yield at.value
    _call("cuMemUnmap", at, size)
    _call("cuMemAddressFree", at, size)


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


def streams() -> dict[str, Any]:
    """What a stream is given happens in order, behind its caller; an event times what lies before
    it."""
    event, after, begin = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    ms = ctypes.c_float(-1)
    with _context(), _words() as (words, at), _allocated() as memory:
        with _stream() as busy, _stream() as free:
            for each, flags in ((event, 2), (after, 0), (begin, 0)):  # 2: without timing
                _call("cuEventCreate", ctypes.byref(each), ctypes.c_uint(flags))
            _call("cuEventRecord", begin, busy)
            _wait(busy, at, 3)
            for value in (1, 2):
                _fill(memory, value, busy)
            found = _read(memory + 8, busy)
            write = ctypes.c_uint64(at + 8), ctypes.c_uint64(9), ctypes.c_uint(0)
            _call("cuStreamWriteValue64", busy, *write)
            _call("cuEventRecord", event, busy)
            _call("cuEventDestroy", event)
            _wait(free, at + 8, 9)
            _call("cuEventRecord", after, free)
            time.sleep(0.05)  # what waits for nothing is through by then
            before = _code("cuEventQuery", after), _code("cuStreamQuery", busy), words[1]
            words[0] = 4
            _call("cuStreamSynchronize", free)
            _call("cuEventElapsedTime", ctypes.byref(ms), begin, after)
            different = _differences(
                waits=(before, (_NOT_READY, _NOT_READY, 0)),
                goes_on=(_code("cuEventQuery", after), 0),
                settled=((_code("cuCtxSynchronize"), _code("cuStreamQuery", busy)), (0, 0)),
                order=((found.value, words[1]), (0x0202020202020202, 9)),
                timed=(0 < ms.value < 60_000, True),
            )
            for each in (after, begin):
                _call("cuEventDestroy", each)
    return different


def mappings() -> dict[str, Any]:
    """A mapping keeps its memory."""
    with _context(), _stream() as stream:
        odd, (large, _) = _create(_PIECE - 1)[0], _create(1 << 50)
        created, handle = _create()
        with _mapped(handle) as at:
            _fill(at, 5, stream)
            found = _read(at + _PIECE - 8, stream)
            _call("cuStreamSynchronize", stream)
        return _differences(
            sizes=((odd, large, created), (1, 2, 0)),  # INVALID_VALUE, OUT_OF_MEMORY
            bytes=(found.value, 0x0505050505050505),
            gone=(_range(at), None),
        )


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle of cuda.h, which are passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * 64),)


def _pass(descriptor: int) -> int:
    """A descriptor of rank 0's, in both."""
    place = [f"\0wsync-driver-{os.getpid()}"]
    with socket.socket(socket.AF_UNIX) as ours:
        if dist.get_rank() == 0:
            ours.bind(place[0])
            ours.listen()
        dist.broadcast_object_list(place)
        if dist.get_rank() == 0:
            with ours.accept()[0] as theirs:
                socket.send_fds(theirs, [b"x"], [descriptor])
            return descriptor
        ours.connect(place[0])
        return socket.recv_fds(ours, 1, 1)[1][0]


def _export(name: _Handle, lent: ctypes.c_uint64) -> tuple[ctypes.c_uint64, int]:
    """Makes memory: (a handle of it, its descriptor); in `name`, what stands for what is lent."""
    handle, descriptor = _create()[1], ctypes.c_int(-1)
    export = ctypes.byref(descriptor), handle, ctypes.c_int(1), ctypes.c_uint64(0)
    _call("cuMemExportToShareableHandle", *export)
    _call("cuIpcGetMemHandle", ctypes.byref(name), lent)
    return handle, descriptor.value


def processes() -> dict[str, Any]:
    """Two see each other's memory by a descriptor and by a handle while they have it open."""
    first, descriptor = dist.get_rank() == 0, -1
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(_context())
        stream, name = enter(_stream()), _Handle()
        mapping = contextlib.ExitStack()
        handle, lent = ctypes.c_uint64(), ctypes.c_uint64()
        if first:
            lent.value = enter(_allocated())
            handle, descriptor = _export(name, lent)
        said = [bytes(name)]
        dist.broadcast_object_list(said)
        got = _pass(descriptor)
        if not first:
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(got), 1)
            memory = _Handle.from_buffer_copy(said[0])
            _call("cuIpcOpenMemHandle", ctypes.byref(lent), memory, ctypes.c_uint(1))
        os.close(got)
        at = mapping.enter_context(_mapped(handle))
        if first:
            _fill(at, 6, stream)
            _fill(lent.value, 7, stream)
            _call("cuStreamSynchronize", stream)
            mapping.close()
        dist.barrier()
        found = [] if first else [_read(place, stream) for place in (at, lent.value)]
        if not first:
            _call("cuStreamSynchronize", stream)
            mapping.close()
            _call("cuIpcCloseMemHandle", lent)
        dist.barrier()  # what is lent is freed when it is closed
        expected = [0x0606060606060606, 0x0707070707070707][: len(found)]
        return _differences(bytes=([word.value for word in found], expected))
