"""Weights on a GPU that tests/fakecuda plays: tensors as far as wsync asks them where they lie."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from support.gpu_mapping import Access, Allocation, Location

from wsync import _core
from wsync.layout import TrainerLayout
from wsync.machine.device import uuid

PIECE: Final = 2 << 20
Played = dict[str, "PlayedTensor"]


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class View(ctypes.Structure):
    """DLTensor, as far as it is changed here."""

    _fields_ = [("data", ctypes.c_void_p), ("device", Device), ("rest", ctypes.c_uint64 * 4)]


class Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        *((name, ctypes.c_void_p) for name in ("previous", "allocate", "from_object", "to_object")),
        *((name, ctypes.c_void_p) for name in ("view_of_object", "work_stream")),
    ]


_NAME: Final = b"dlpack_exchange_api"
_Read = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))


def _torch_exchange() -> Exchange:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule: Any = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    return Exchange.from_address(pointer(capsule, _NAME))


def _capsule(exchange: Exchange) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return make(ctypes.addressof(exchange), _NAME, None)


_TORCH: Final = _torch_exchange()
_torch_view = _Read(_TORCH.view_of_object)


@_Read
def _view(played: PlayedTensor, view: Any) -> int:
    """What torch says of a tensor of the same form on the host, but for where it is."""
    code = _torch_view(played.like, view)
    view[0].data, view[0].device = played.data_ptr(), Device(2, played.device.index)
    return int(code)


_PLAYED: Final = Exchange(
    version=_TORCH.version, view_of_object=ctypes.cast(_view, ctypes.c_void_p).value
)


class PlayedTensor:
    """A contiguous tensor at an address of a GPU."""

    __dlpack_c_exchange_api__ = _capsule(_PLAYED)

    def __init__(
        self, address: int, like: torch.Tensor, memory: object = None, gpu: int = 0
    ) -> None:
        self._address, self.like, self._memory = address, like, memory
        self.dtype, self.shape = like.dtype, like.shape
        self.device = SimpleNamespace(type="cuda", index=gpu)

    def stride(self) -> tuple[int, ...]:
        return self.like.stride()

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self.like.element_size()

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.like.nbytes)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a contiguous tensor there."""
        ctypes.memmove(reach(self._address), tensor.data_ptr(), tensor.nbytes)

    def move(self, other: PlayedTensor) -> None:
        """Lies where the other one does from now on, as after `self.data = other`."""
        self._address, self._memory = other._address, other._memory


def replace(tensors: Iterable[PlayedTensor]) -> None:
    """Gives tensors of put() other memory at their addresses, as if torch had freed theirs and had
    got some of the driver again."""
    for tensor in tensors:
        ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"]).fakecuda_replace(
            ctypes.c_void_p(tensor.data_ptr())
        )


def reach(address: int) -> int:
    """Where the processor reads and writes what the GPU has at an address."""
    library = ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"])
    library.fakecuda_reach.restype = ctypes.c_void_p
    found: int = library.fakecuda_reach(ctypes.c_void_p(address))
    return found


def driver(name: str, *arguments: Any) -> None:
    """Calls a function of the driver, which has to succeed."""
    library = ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"])
    address, status = ctypes.c_void_p(), ctypes.c_int()
    wanted = (ctypes.byref(address), 13000, ctypes.c_uint64(0), ctypes.byref(status))
    library.cuGetProcAddress_v2(name.encode(), *wanted)
    code = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)(*arguments)
    assert code == 0, f"{name}: {code}"


def put(tensor: torch.Tensor, gpu: int = 0) -> PlayedTensor:
    """A copy of a contiguous tensor in memory of a GPU."""
    memory = _core.IpcMemory(gpu, max(tensor.nbytes, 1))
    copy = PlayedTensor(memory.address, tensor, memory, gpu)
    copy.fill(tensor)
    return copy


class Pieces:
    """Addresses of a GPU with memory in pieces of 2 MiB, as torch's expandable segments have it;
    kind: 1, it can be exported as descriptors; 0, it cannot, as torch_memory_saver's."""

    def __init__(self, nbytes: int, *, kind: int = 1, gpu: int = 0) -> None:
        self._kind, self._gpu = kind, gpu
        self.count = -(-nbytes // PIECE)
        self._at = ctypes.c_uint64()
        self._mapped = False
        _core.cuda_devices()  # has the driver begin
        size, none = ctypes.c_size_t(self.count * PIECE), ctypes.c_uint64(0)
        driver("cuMemAddressReserve", ctypes.byref(self._at), size, ctypes.c_size_t(0), none, none)
        self.map()

    @property
    def address(self) -> int:
        return self._at.value

    def map(self) -> None:
        where = Location(1, self._gpu)
        wanted = Allocation(type=1, handle_types=self._kind, location=where)
        none, size = ctypes.c_uint64(0), ctypes.c_size_t(PIECE)
        for index in range(self.count):
            handle, at = ctypes.c_uint64(), ctypes.c_uint64(self.address + index * PIECE)
            driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(wanted), none)
            driver("cuMemMap", at, size, ctypes.c_size_t(0), handle, none)
            driver("cuMemRelease", handle)
        access, whole = Access(where, 3), ctypes.c_size_t(self.count * PIECE)
        driver("cuMemSetAccess", self._at, whole, ctypes.byref(access), ctypes.c_size_t(1))
        self._mapped = True

    def unmap(self) -> None:
        for index in range(self.count):
            at = ctypes.c_uint64(self.address + index * PIECE)
            driver("cuMemUnmap", at, ctypes.c_size_t(PIECE))
        self._mapped = False

    def __del__(self) -> None:
        if self._mapped:
            self.unmap()
            driver("cuMemAddressFree", self._at, ctypes.c_size_t(self.count * PIECE))

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, PlayedTensor]:
        """Tensors one after the other there, of these values."""
        found, at = dict[str, PlayedTensor](), self.address
        for name, tensor in tensors.items():
            found[name] = PlayedTensor(at, tensor, self, self._gpu)
            found[name].fill(tensor)
            at += -(-tensor.nbytes // 512) * 512
        assert at <= self.address + self.count * PIECE
        return found


def by_handle(weights: Mapping[str, torch.Tensor], gpu: int = 0) -> Played:
    """Each in an allocation of its own."""
    return {name: put(tensor, gpu) for name, tensor in weights.items()}


def in_pieces(weights: Mapping[str, torch.Tensor], gpu: int = 0, kind: int = 1) -> Played:
    """One after the other in memory of pieces."""
    return Pieces(sum(t.nbytes + 512 for t in weights.values()), kind=kind, gpu=gpu).cut(weights)


PLACES: dict[str, Callable[..., Played]] = {"by handle": by_handle, "in pieces": in_pieces}


def reserve(like: torch.Tensor) -> PlayedTensor:
    """A tensor whose address is reserved on the GPU, where no memory lies."""
    at, none = ctypes.c_uint64(), ctypes.c_uint64(0)
    size = ctypes.c_size_t(PIECE)
    driver("cuMemAddressReserve", ctypes.byref(at), size, ctypes.c_size_t(0), none, none)
    return PlayedTensor(at.value, like)


@contextlib.contextmanager
def hold(nbytes: int) -> Iterator[None]:
    """Around what has so much less of GPU 0's memory; nobody writes there."""
    handle = ctypes.c_uint64()
    # CUmemAllocationProp: pinned memory of device 0
    wanted = (ctypes.c_int * 8)(1, 0, 1, 0)
    if nbytes:
        uuid(0)  # the driver has been started
        size = ctypes.c_size_t(nbytes)
        driver("cuMemCreate", ctypes.byref(handle), size, wanted, ctypes.c_uint64(0))
    try:
        yield
    finally:
        if nbytes:
            driver("cuMemRelease", handle)


def source_of(names: Sequence[str], tensors: Sequence[Any]) -> TrainerLayout:
    """The layout of one rank that holds whole tensors."""
    table = _core.describe(tensors, names, gpu=True)
    builder = _core.LayoutBuilder(0)
    builder.add_tensors(names, table)
    return TrainerLayout(builder.build(), tuple(names), lambda: tensors, table)
