"""Pickles of weight-update requests: wsync writes them, and reads no other pickles.

A stock SGLang server unpickles each request with its `SafeUnpickler` (`sglang.srt.utils.common`),
which only admits globals on a list.  So wsync writes the opcodes itself, and names only globals
that all versions since 0.5.6 admit.  The trainer needs no sglang, and the server no class of
wsync.  CPU tensors travel in one of two ways, both torch's own:

* by shared file (`torch.multiprocessing.reductions.rebuild_storage_filename`): the receiver maps
  a segment of /dev/shm, which torch_shm_manager removes after its last user;
* by value: `torch._utils._rebuild_tensor_v2` or `_v3` makes the tensor from bytes that
  `torch.storage._load_from_bytes` restores.

Torch's default, passing file descriptors, fails between processes without a common ancestor.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch

from wsync import _core
from wsync.bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from wsync.messages.control import TENSOR_NAME

_METADATA_GLOBAL: Final = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
REDUCTIONS: Final = "torch.multiprocessing.reductions"
_SHM: Final = "/dev/shm"
_SEGMENT_HEADER_NBYTES: Final = 64  # torch counts a segment's users there
# more readings than any segment gets: every pipeline stage reads its own payload
_REPEATS: Final = 1 << 14

# --- writing ---------------------------------------------------------------------------------


class _Writer(pickle._Pickler):
    """Python's own pickler, which can also write globals that do not exist here.  The pickler in C
    looks every global up."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = {**pickle._Pickler.dispatch}


@dataclasses.dataclass(frozen=True, eq=False)
class _Named:
    """A global, written by its name."""

    module: str
    name: str

    def save(self, writer: Any) -> None:
        writer.save(self.module)
        writer.save(self.name)
        writer.write(pickle.STACK_GLOBAL)
        writer.memoize(self)


@dataclasses.dataclass(frozen=True, eq=False)
class _Called:
    """The result of calling a global.  With `state`, it is an instance of that class with these
    attributes."""

    function: _Named
    arguments: tuple[object, ...]
    state: dict[str, object] | None = None

    def save(self, writer: Any) -> None:
        writer.save(self.function)
        writer.save(self.arguments)
        writer.write(pickle.REDUCE if self.state is None else pickle.NEWOBJ)
        writer.memoize(self)
        if self.state is not None:
            writer.save(self.state)
            writer.write(pickle.BUILD)


for _kind in (_Named, _Called):
    _Writer.dispatch[_kind] = lambda writer, value: value.save(writer)


@functools.cache
def named(module: str, name: str) -> _Named:
    """Makes a global that a payload names."""
    return _Named(module, name)


def called(module: str, name: str, *arguments: object) -> _Called:
    """Makes the result of calling a global; the reader of the payload calls it."""
    return _Called(named(module, name), arguments)


def _by_value(tensor: torch.Tensor) -> _Called:
    """A tensor with its bytes in the pickle.  The storage is written as bytes, because torch has
    storage types for some dtypes only."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    data = io.BytesIO()
    storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=own.untyped_storage(), dtype=torch.uint8, _internal=True
    )
    torch.save(storage, data, _use_new_zipfile_serialization=False)
    loaded = called("torch.storage", "_load_from_bytes", data.getvalue())
    hooks = called("collections", "OrderedDict")
    arguments = (loaded, 0, tuple(own.shape), own.stride(), False, hooks)
    if own.dtype == torch.uint8:
        return called("torch._utils", "_rebuild_tensor_v2", *arguments)
    return called("torch._utils", "_rebuild_tensor_v3", *arguments, own.dtype)


def _by_file(tensor: torch.Tensor) -> _Called:
    """A flat uint8 tensor whose storage the receiver maps.  One reference travels with each
    payload, and the receiver drops it when it unpickles.  If a payload is never read, `remove`
    removes its segment, or torch_shm_manager when the sender ends."""
    storage = tensor.untyped_storage()
    file = storage._share_filename_cpu_()  # moves other memory than shared_bytes to a file
    storage._shared_incref()  # type: ignore[no-untyped-call]

    cls = named("torch.storage", "UntypedStorage")
    untyped = called(REDUCTIONS, "rebuild_storage_filename", cls, *file)
    typed = called(REDUCTIONS, "rebuild_typed_storage", untyped, tensor.dtype)
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), False)
    return called(REDUCTIONS, "rebuild_tensor", named("torch", "Tensor"), typed, place)


def _entry(entry: Any) -> _Called:
    state = {name: getattr(entry, name) for name in FlattenedTensorMetadata.__dataclass_fields__}
    return _Called(named(*_METADATA_GLOBAL), (), {**state, "shape": torch.Size(entry.shape)})


@functools.cache
def _start_manager(pid: int) -> None:
    """Makes this process's first segment, so that torch starts torch_shm_manager, which removes
    unused segments.  The manager does not inherit standard error, because a reader of that would
    wait for the engines that use a segment.  The manager also blocks the signals that end a whole
    job, and ends after its last user."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        with contextlib.suppress(OSError):  # there is no standard error
            os.set_inheritable(2, False)
        torch.UntypedStorage._new_using_filename_cpu(1)
    finally:
        with contextlib.suppress(OSError):
            os.set_inheritable(2, True)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def shared_bytes(nbytes: int) -> torch.Tensor:
    """Makes a uint8 tensor of `nbytes` in a file of /dev/shm: a bucket (`out=`) that `bucket` can
    give to another process without a copy.  The file is removed after its last user.
    NoMemoryError: /dev/shm has less room than that; a write beyond it would kill the process."""
    room = os.statvfs(_SHM)
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise _core.NoMemoryError(f"{_SHM} has {free} bytes left, but the bucket needs {nbytes}")
    _start_manager(os.getpid())
    storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[:nbytes]


def remove(tensor: torch.Tensor) -> None:
    """Removes the file of `shared_bytes` from /dev/shm, even if payloads have not been read: their
    readers will not find it.  Processes that have mapped the file keep it."""
    name = tensor.untyped_storage()._share_filename_cpu_()[1]
    # torch's last user removes the file, too, and ends its process if there is none; payloads that
    # were read more than once may have dropped others' references
    keep(tensor)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.fsencode(_SHM) + name)


def keep(tensor: torch.Tensor, readings: int = _REPEATS) -> None:
    """Keeps the file of `shared_bytes` while payloads are read more than once.  Otherwise each
    reading would drop a reference, and the last drop would remove the file.  `remove` or the end of
    this process removes it then."""
    storage = tensor.untyped_storage()
    for _ in range(readings):
        storage._shared_incref()  # type: ignore[no-untyped-call]


def give_back(tensor: torch.Tensor) -> None:
    """Returns the references of `keep` that readings have not dropped.  The file is then removed
    after its last user, which may be this process."""
    header = tensor.untyped_storage().data_ptr() - _SEGMENT_HEADER_NBYTES
    count = ctypes.c_int32.from_address(header)
    for _ in range(_REPEATS):
        _core.count_down(count, 1)


def flattened(tensor: object, metadata: Sequence[Any]) -> bytes:
    """Makes the payload of SGLang's load_format "flattened_bucket": the object
    {"flattened_tensor": tensor, "metadata": [FlattenedTensorMetadata, ...]}."""
    entries = [_entry(entry) for entry in metadata]
    return values({"flattened_tensor": tensor, "metadata": entries})


def values(value: object) -> bytes:
    """Makes a payload that is read as `value`, which may hold results of `named` and `called`."""
    _Writer(out := io.BytesIO(), 4).dump(value)
    return out.getvalue()


def bucket(bucket: FlattenedTensorBucket) -> bytes:
    """Makes the payload of SGLang's load_format "flattened_bucket", for a bucket in host memory.

    The payload has only the name of a file, so the receiver sees later writes, and each payload
    must be read once.  A bucket in other memory than `shared_bytes` is moved to such a file.
    """
    return flattened(_by_file(bucket.get_flattened_tensor()), bucket.get_metadata())


def named_tensors(pairs: list[tuple[str, torch.Tensor]]) -> bytes:
    """Makes the payload of SGLang's other load formats: [(name, tensor), ...], by value."""
    return values([(name, _by_value(tensor)) for name, tensor in pairs])


def control(*data: bytes) -> bytes:
    """Makes a payload with nothing but `data`, which has one message for each pipeline stage: uint8
    tensors by value, under the name wsync.messages.control.TENSOR_NAME.  The payload goes with the
    load_format that names wsync's loader."""
    tensors = [torch.tensor([*each], dtype=torch.uint8, device="cpu") for each in data]
    return named_tensors([(TENSOR_NAME, tensor) for tensor in tensors])


def control_bytes(value: object) -> bytes | None:
    """Returns the `data` of `control` from the object that an engine unpickled, or None if the
    payload is of another kind."""
    match value:
        case [[str(name), torch.Tensor() as tensor]] if name == TENSOR_NAME:
            if tensor.dtype == torch.uint8 and tensor.dim() == 1:
                return tensor.detach().cpu().numpy().tobytes()
    return None


# --- reading ---------------------------------------------------------------------------------


def load(data: bytes) -> object:
    """Unpickles a payload.

    Anyone who reaches an engine's API can send a payload, so only the globals below are called.
    These globals make tensors in host memory and bucket metadata, which becomes wsync's
    FlattenedTensorMetadata.  Anything else is a ProtocolError that names it.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except _core.ProtocolError:
        raise
    except Exception as error:  # what a malformed pickle raises is not specified
        raise malformed(f"{type(error).__name__}: {error!s:.200}") from None


def malformed(text: str) -> _core.ProtocolError:
    return _core.ProtocolError(f"payload: {text}")


class _Reader(pickle.Unpickler):
    """Admits only globals on a list, as SGLang's SafeUnpickler does."""

    def find_class(self, module: str, name: str) -> Any:
        found = _REPLACED.get((module, name))
        if found is not None:
            return found
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ADMITTED:
            return super().find_class(module, name)
        raise malformed(f"global {module:.80}.{name:.80} is not allowed")


def _load_from_bytes(data: bytes) -> object:
    """Admits weights only, unlike torch.storage's function, which admits any pickle inside."""
    return torch.load(io.BytesIO(data), weights_only=True)


_ADMITTED: Final = {
    ("collections", "OrderedDict"),
    ("multiprocessing.resource_sharer", "DupFd"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    (REDUCTIONS, "rebuild_storage_empty"),
    (REDUCTIONS, "rebuild_storage_fd"),
    (REDUCTIONS, "rebuild_storage_filename"),
    (REDUCTIONS, "rebuild_tensor"),
    (REDUCTIONS, "rebuild_typed_storage"),
}
_REPLACED: Final[dict[tuple[str, str], Any]] = {
    _METADATA_GLOBAL: FlattenedTensorMetadata,
    ("torch.storage", "_load_from_bytes"): _load_from_bytes,
}
