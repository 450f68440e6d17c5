"""Pickles of weight-update requests: what wsync writes, and the only pickles it reads.

A stock SGLang server unpickles each request with its `SafeUnpickler`
(`sglang.srt.utils.common`), which admits a list of globals.  So wsync writes the opcodes itself
and names only globals that all versions since 0.5.6 admit: no class of wsync's own, and no
sglang on the trainer.  CPU tensors travel in one of two ways, both torch's own:

* by shared file (`torch.multiprocessing.reductions.rebuild_storage_filename`): the receiver maps
  a segment of /dev/shm that torch_shm_manager removes after its last user;
* by value (`torch._utils._rebuild_tensor_v2` or v3 over `torch.storage._load_from_bytes`).

Torch's default, passing file descriptors, fails between processes without a common ancestor.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import math
import os
import pickle
import reprlib
import secrets
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

import torch

from wsync import _core
from wsync.bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from wsync.checkpoints.safetensors_layout import system_calls
from wsync.machine.deadline import Deadline
from wsync.messages import torch_shm_reader
from wsync.messages.control import LOAD_FORMAT, TENSOR_NAME

_METADATA_GLOBAL: Final = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
REDUCTIONS: Final = "torch.multiprocessing.reductions"
_SHM: Final = "/dev/shm"
# On storages of shared_bytes: torch does not tell which kind of shared memory one is, and moves
# those of the other kinds when asked for their file.
_FILE_MARK: Final = "wsync_file"
_SEGMENT_HEADER_NBYTES: Final = 64  # torch counts a segment's users there
_REPEATS: Final = 1 << 14  # more of payloads than gateways make of one segment's
_MANAGER_SECONDS: Final = 30.0

_manager_lock = threading.Lock()
_managers: list[subprocess.Popen[bytes]] = []  # one at most

PEER_SECONDS: Final = 30.0
_MOST_TEXT: Final = 4096
_MOST_DIMENSIONS: Final = 64
_MOST_ELEMENTS: Final = 2**63
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
# the dtypes of layouts (csrc/core/layout/dtype.h): those whose elements are bytes of their own
_DTYPES: Final = {
    ("torch", name): getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "bool", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
    if hasattr(torch, name)
}


# --- writing ---------------------------------------------------------------------------------


class _Writer(pickle._Pickler):
    """Python's own writer, protocol 4, for plain values and what names or calls globals that
    need not be here.  In Python, because in C every global is looked up."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = {
        kind: pickle._Pickler.dispatch[kind]
        for kind in (type(None), bool, int, str, bytes, tuple, list, dict)
    }

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) in self.dispatch or isinstance(value, torch.Size | torch.dtype)
        if plain or value is torch.Size:
            return NotImplemented
        raise _core.InvalidArgumentError(f"payload: {type(value).__name__} cannot be written")


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
    """What calling a global gives; with `state`, an instance of that class, whose attributes these
    are."""

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
    """A global that a payload names."""
    return _Named(module, name)


def called(module: str, name: str, *arguments: object) -> _Called:
    """What calling a global with these arguments gives where the payload is read."""
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
    payload: the receiver drops it when it unpickles, so a payload that is never read leaves its
    segment to `remove`, or to torch_shm_manager, which removes it when the sender ends."""
    storage = tensor.untyped_storage()
    if not hasattr(storage, _FILE_MARK):
        tensor = shared_bytes(tensor.numel()).copy_(tensor)
        storage = tensor.untyped_storage()
    file = storage._share_filename_cpu_()
    storage._shared_incref()  # type: ignore[no-untyped-call]

    cls = named("torch.storage", "UntypedStorage")
    untyped = called(REDUCTIONS, "rebuild_storage_filename", cls, *file)
    typed = called(REDUCTIONS, "rebuild_typed_storage", untyped, tensor.dtype)
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), False)
    return called(REDUCTIONS, "rebuild_tensor", named("torch", "Tensor"), typed, place)


def _entry(entry: Any) -> _Called:
    state = {name: getattr(entry, name) for name in FlattenedTensorMetadata.__dataclass_fields__}
    return _Called(named(*_METADATA_GLOBAL), (), {**state, "shape": torch.Size(entry.shape)})


def _start_manager() -> None:
    """Starts torch_shm_manager, which removes unused segments, once for this process.

    Torch would start it with the files that this process has open: a reader of this process's
    standard error would then wait for the engines that use a segment.  Torch uses a manager that it
    is connected to, and connects where it opens a segment that belongs to one.
    """
    with _manager_lock:
        if _managers:
            return
        program = os.path.join(os.path.dirname(torch.__file__), "bin", "torch_shm_manager")
        # what ends all processes of a job is not for it, which goes with its last user
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        with contextlib.ExitStack() as stack:
            stack.enter_context(system_calls(program))
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, former)
            process = subprocess.Popen(
                [program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it: it cleans up after this process
            )
        assert process.stdout is not None
        with process.stdout as output:  # one line, and then it closes its own end
            ready = select.select([output], [], [], _MANAGER_SECONDS)[0]
            place = output.readline().rstrip(b"\n") if ready else b""
        if not place or place == b"ERROR":
            process.kill()
            process.wait()
            raise _core.SystemCallError(f"{program}: did not start")
        name = f"torch_wsync_{os.getpid()}_{secrets.token_hex(8)}"
        path = os.path.join(_SHM, name)
        with system_calls(path), open(path, "xb") as file:
            file.truncate(_SEGMENT_HEADER_NBYTES + 1)
        # the only user's end removes it
        torch.UntypedStorage._new_shared_filename_cpu(place, f"/{name}".encode(), 1)
        process.returncode = 0  # it outlives this process, which need not be warned of
        _managers.append(process)


def shared_bytes(nbytes: int) -> torch.Tensor:
    """A uint8 tensor of `nbytes` in a file of /dev/shm: a bucket (`out=`) that `bucket` can hand
    to another process without a copy.  The file goes with its last user.  Raises NoMemoryError
    if /dev/shm has less room than that, because a write beyond it would kill the process."""
    room = os.statvfs(_SHM)
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise _core.NoMemoryError(f"{_SHM} has {free} bytes left, but the bucket needs {nbytes}")
    _start_manager()
    storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
    setattr(storage, _FILE_MARK, True)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[:nbytes]


def remove(tensor: torch.Tensor) -> None:
    """Takes the file of `shared_bytes` out of /dev/shm, whatever payloads have not been read: their
    readers will find none.  Whoever has mapped it keeps it."""
    name = tensor.untyped_storage()._share_filename_cpu_()[1]
    # torch's last user removes the file, too, and ends its process where there is none; repeated
    # readings may have dropped the references of others
    keep(tensor)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.fsencode(_SHM) + name)


def keep(tensor: torch.Tensor) -> None:
    """Has the file of `shared_bytes` outlast payloads that are read more than once: each reading
    drops a reference, and the last one takes the file along.  Then it goes with `remove`, or with
    this process."""
    storage = tensor.untyped_storage()
    for _ in range(_REPEATS):
        storage._shared_incref()  # type: ignore[no-untyped-call]


def give_back(tensor: torch.Tensor) -> None:
    """Takes back the references of `keep` that repeated readings have left: the file goes with its
    last user, which this process may be."""
    header = tensor.untyped_storage().data_ptr() - _SEGMENT_HEADER_NBYTES
    count = ctypes.c_int32.from_address(header)
    for _ in range(_REPEATS):
        _core.count_down(count, 1)


def flattened(tensor: object, metadata: Sequence[Any]) -> bytes:
    """The payload of SGLang's load_format "flattened_bucket": the object
    {"flattened_tensor": tensor, "metadata": [FlattenedTensorMetadata, ...]}."""
    entries = [_entry(entry) for entry in metadata]
    return values({"flattened_tensor": tensor, "metadata": entries})


def values(value: object) -> bytes:
    """The payload that a reader turns into `value`: of plain values, `named` and `called`."""
    _Writer(out := io.BytesIO(), 4).dump(value)
    return out.getvalue()


def bucket(bucket: FlattenedTensorBucket, *, by_value: bool = False) -> bytes:
    """The payload of SGLang's load_format "flattened_bucket", for a bucket of the host.

    A bucket filled into `shared_bytes` travels as the name of its file (the receiver sees what
    is written to it later, and each payload is to be read once); any other is first copied to
    such a file.  With by_value its bytes are part of the payload.
    """
    flat = bucket.get_flattened_tensor()
    sent = _by_value(flat) if by_value else _by_file(flat)
    return flattened(sent, bucket.get_metadata())


def named_tensors(pairs: list[tuple[str, torch.Tensor]]) -> bytes:
    """The payload of SGLang's other load formats: [(name, tensor), ...], by value."""
    return values([(name, _by_value(tensor)) for name, tensor in pairs])


def control(data: bytes) -> bytes:
    """A payload that carries only `data`: one uint8 tensor by value named wsync.messages.control's
    TENSOR_NAME.  For the load_format that names wsync's loader."""
    # frombuffer takes no empty buffer
    tensor = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, device="cpu")
    )
    return named_tensors([(TENSOR_NAME, tensor.to(torch.uint8))])


def control_bytes(value: object) -> bytes | None:
    """What `control` was given, from the object that an engine unpickled; None if that is
    another kind of payload."""
    match value:
        case [[str(name), torch.Tensor() as tensor]] if name == TENSOR_NAME:
            if tensor.dtype == torch.uint8 and tensor.dim() == 1:
                return tensor.detach().cpu().numpy().tobytes()
    return None


# --- reading ---------------------------------------------------------------------------------


def named_kind(content: object) -> str:
    """What a payload is that is no control message, for the error of an engine that wants one."""
    match content:
        case {"flattened_tensor": _}:
            kind = "a flattened bucket"
        case [[str(), torch.Tensor()], *_]:
            kind = "named tensors"
        case _:
            return f"a {type(content).__name__}"
    return f"{kind}: does the engine's handle list {LOAD_FORMAT!r} in load_formats?"


class _Brief(reprlib.Repr):
    """Values of a payload in a few words, for errors: repr() of one may be as long as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 1
        self.maxstring = self.maxlong = 60

    def repr_instance(self, value: Any, level: int) -> str:
        if isinstance(value, bytes):
            return repr(value[: self.maxstring])
        if value is None or isinstance(value, bool | float | torch.dtype):
            return repr(value)
        return f"a {type(value).__name__}"


brief: Final = _Brief().repr


def malformed(text: str) -> _core.ProtocolError:
    return _core.ProtocolError(f"payload: {text}")


def load(data: bytes, *, timeout: float = PEER_SECONDS) -> object:
    """Unpickles a payload.

    Anyone who reaches an engine's API can send one, so only these are understood: lists, tuples,
    dicts, strings, numbers, CPU tensors by file, by file descriptor and by value, and bucket
    metadata, which becomes wsync's FlattenedTensorMetadata.  Anything else is a ProtocolError that
    names it.

    timeout: seconds for the processes that pass file descriptors; DeadlineError after that.
    """
    try:
        value = _Reader(data, Deadline(timeout)).load()
    except (_core.ProtocolError, _core.DeadlineError):
        raise
    except Exception as error:  # what a malformed pickle raises is not specified
        raise malformed(f"{type(error).__name__}: {error!s:.200}") from None
    if isinstance(value, dict) and "metadata" in value:
        value["metadata"] = _to_entries(value["metadata"])
    return value


def _to_entries(values: object) -> list[FlattenedTensorMetadata]:
    if not isinstance(values, list):
        raise malformed(f"metadata is a {type(values).__name__} instead of a list")
    entries = [_to_metadata(value) for value in values]
    check_names(entry.name for entry in entries)
    return entries


def check_names(names: Iterable[str]) -> None:
    """ProtocolError for a name that comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise malformed(f"{brief(name)} comes twice")
        seen.add(name)


class _State:
    """Stands for an object that a pickle makes without arguments and fills from a dict."""

    fields: dict[str, object]

    def __new__(cls, *arguments: object) -> _State:
        if arguments:
            raise malformed(f"{cls.__name__} is made with arguments")
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise malformed(f"state is a {type(state).__name__} instead of a dict")
        self.fields = state


class _Opcodes(dict[int, Any]):
    def __missing__(self, opcode: int) -> Any:
        raise malformed(f"pickle opcode {opcode:#x} is not allowed")


def _opcodes(names: str, by: Callable[[Any], Any] = lambda load: load) -> dict[int, Any]:
    """What Python's reader does for these opcodes, wrapped."""
    codes = [getattr(pickle, name)[0] for name in names.split()]
    return {code: by(pickle._Unpickler.dispatch[code]) for code in codes}


def _after(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Has a check of the reader run before an opcode."""

    def by(load: Callable[[Any], None]) -> Callable[[Any], None]:
        def checked(reader: Any) -> None:
            check(reader)
            load(reader)

        return checked

    return by


def _check_target(target: object, kind: type) -> None:
    """An opcode that fills an object would call methods of any kind of it."""
    if not isinstance(target, kind):
        raise malformed(f"fills a {type(target).__name__}")


def _check_items(target: object, keys: list[object]) -> None:
    """Hashing a tuple of tuples may take for ever."""
    for key in keys:
        if not isinstance(key, str):
            raise malformed(f"a {type(key).__name__} is the key of a dict")
    _check_target(target, dict)


def _check_arguments(arguments: object) -> None:
    """Only a tuple: a tensor in its place may have any number of elements."""
    if type(arguments) is not tuple:
        raise malformed(f"a call with a {type(arguments).__name__}")


def _text(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def limited(reader: Any) -> None:
        load(reader)
        if len(reader.stack[-1]) > _MOST_TEXT:
            raise malformed(f"text of {len(reader.stack[-1])} characters")

    return limited


class _Values(pickle._Unpickler):
    """Python's own reader in Python, because in C the opcodes cannot be chosen, and some give a
    few bytes gigabytes of memory.  These suffice for plain values in pickles of protocol 2 to 5;
    nothing is called."""

    dispatch = _Opcodes(
        _opcodes(
            "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BINFLOAT BININT BININT1 BININT2 LONG1 "
            "BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
            "EMPTY_DICT GLOBAL STACK_GLOBAL MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET"
        )
        | _opcodes("BINUNICODE SHORT_BINUNICODE BINUNICODE8", _text)
        | _opcodes("APPEND", _after(lambda r: _check_target(r.stack[-2], list)))
        | _opcodes("APPENDS", _after(lambda r: _check_target(r.metastack[-1][-1], list)))
        | _opcodes("SETITEM", _after(lambda r: _check_items(r.stack[-3], r.stack[-2:-1])))
        | _opcodes("SETITEMS", _after(lambda r: _check_items(r.metastack[-1][-1], r.stack[::2])))
    )

    def find_class(self, module: str, name: str) -> Any:
        raise malformed(f"global {module:.80}.{name:.80} is not allowed")


class _Storages:
    """Reads the storages that a payload of `nbytes` names.

    deadline: of waits for other processes.
    """

    def __init__(self, nbytes: int, deadline: Deadline) -> None:
        self._left = nbytes
        self._deadline = deadline
        self._files: dict[bytes, torch.UntypedStorage] = {}  # that have been copied

    def load(self, data: object) -> torch.TypedStorage:
        """torch.storage._load_from_bytes.  All storages together take no more than the payload,
        which may name the same bytes many times."""
        if not isinstance(data, bytes):
            raise malformed("a storage is not made of bytes")
        self._left -= len(data)
        if self._left < 0:
            raise malformed("its storages are larger than the payload")
        return _read_storage(data)

    def read_file(self, cls: object, manager: object, name: object, nbytes: object) -> object:
        if not isinstance(name, bytes) or type(nbytes) is not int or nbytes < 0:
            raise malformed("a shared storage is not (manager, file, bytes)")
        copy = self._files.get(name)  # tensors of one storage name it each
        if copy is not None and copy.nbytes() != nbytes:
            raise malformed(f"{name[:100]!r} has {copy.nbytes()} bytes, and {nbytes}")
        self._files[name] = torch_shm_reader.read_file(name, nbytes, copy)
        return self._files[name]

    def read_descriptor(self, cls: object, descriptor: object, nbytes: object) -> object:
        """torch's default between related processes: the sender passes a file descriptor."""
        fields = descriptor.fields if isinstance(descriptor, _State) else {}
        if fields.keys() != {"_id"} or type(nbytes) is not int or nbytes < 0:
            raise malformed("a shared storage is not (descriptor, bytes)")
        return torch_shm_reader.read_descriptor(fields["_id"], nbytes, self._deadline)


class _Reader(_Values):
    """Adds the calls that make tensors.

    A reader keeps what it finds in its memo.  It has no methods of its own among that, nor classes
    made for it: such a cycle would keep tensors until Python next collects garbage.
    """

    dispatch = _Opcodes(
        _Values.dispatch
        | _opcodes("REDUCE NEWOBJ", _after(lambda r: _check_arguments(r.stack[-1])))
        | _opcodes("BUILD", _after(lambda r: _check_target(r.stack[-2], _State)))
    )

    def __init__(self, data: bytes, deadline: Deadline) -> None:
        super().__init__(io.BytesIO(data))
        storages = _Storages(len(data), deadline)
        self._known: dict[tuple[str, str], Any] = {
            (REDUCTIONS, "rebuild_storage_filename"): storages.read_file,
            (REDUCTIONS, "rebuild_storage_fd"): storages.read_descriptor,
            ("torch.storage", "_load_from_bytes"): storages.load,
        }

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get((module, name)) or _GLOBALS.get((module, name))
        return known or super().find_class(module, name)


@dataclasses.dataclass(frozen=True)
class _Announced:
    """A storage whose bytes follow."""

    dtype: torch.dtype
    key: str
    count: int


class _StorageReader(_Values):
    """Reads the pickles in torch's legacy format of storages, from torch.serialization's
    _legacy_save."""

    dispatch = _Opcodes(_Values.dispatch | _opcodes("BINPERSID"))

    def find_class(self, module: str, name: str) -> Any:
        kind = _STORAGES.get((module, name))
        return super().find_class(module, name) if kind is None else kind

    def persistent_load(self, pid: object) -> _Announced:
        if not isinstance(pid, tuple) or len(pid) != 6:
            raise malformed("a storage inside is not announced by 6 values")
        what, dtype, key, _, count, view = pid
        if what != "storage" or not isinstance(dtype, torch.dtype) or view is not None:
            raise malformed("not a storage of torch's inside")
        if not isinstance(key, str) or type(count) is not int:
            raise malformed("a storage inside has no key or no size")
        return _Announced(dtype, key, count)


_STORAGES: Final = {
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{
        ("torch", f"{name}Storage"): getattr(torch, dtype)
        for name, dtype in (
            *(("Double", "float64"), ("Float", "float32"), ("Half", "float16")),
            *(("BFloat16", "bfloat16"), ("Long", "int64"), ("Int", "int32"), ("Short", "int16")),
            *(("Char", "int8"), ("Byte", "uint8"), ("Bool", "bool")),
            *(("ComplexFloat", "complex64"), ("ComplexDouble", "complex128")),
        )
    },
}


def _read_storage(data: bytes) -> torch.TypedStorage:
    """A storage from the legacy format: pickles of a magic number, a version, facts about the
    sender, the storage and its key; the number of elements; the elements."""
    file = io.BytesIO(data)
    magic, version, _, found, keys = (_StorageReader(file).load() for _ in range(5))
    if type(magic) is not int or magic != _MAGIC or type(version) is not int or version != _VERSION:
        raise malformed("a storage in another format than torch's of version 1001")
    if not isinstance(found, _Announced):
        raise malformed(f"{type(found).__name__} instead of a storage")
    if not isinstance(keys, list) or len(keys) != 1 or keys[0] != found.key:
        raise malformed("not one storage inside")
    count = int.from_bytes(file.read(8), "little")
    left = len(data) - file.tell()
    nbytes = found.dtype.itemsize
    if count != found.count or count * nbytes != left:
        raise malformed(f"a storage of {brief(found.count)} elements of {nbytes} bytes has {left}")
    flat = torch.empty(left, dtype=torch.uint8, device="cpu")
    flat.numpy()[:] = memoryview(data)[len(data) - left :]
    return _typed(flat.untyped_storage(), found.dtype)


def _to_metadata(entry: object) -> FlattenedTensorMetadata:
    fields = entry.fields if isinstance(entry, _State) else None
    wanted = FlattenedTensorMetadata.__dataclass_fields__.keys()
    if fields is None or fields.keys() != wanted:
        raise malformed("metadata is not a list of FlattenedTensorMetadata")
    values: list[Any] = [fields[field] for field in wanted]
    if not all(map(isinstance, values, (str, torch.Size, torch.dtype, int, int, int))):
        raise malformed(f"metadata of {brief(values[0])} has fields of the wrong types")
    return FlattenedTensorMetadata(*values)


def read_sizes(values: object) -> tuple[int, ...]:
    """A shape or stride.  Few and small numbers: an error may name them all."""
    if (
        not isinstance(values, tuple)
        or len(values) > _MOST_DIMENSIONS
        or not all(type(value) is int and 0 <= value < _MOST_ELEMENTS for value in values)
    ):
        raise malformed(f"{brief(values)} is not a shape")
    return tuple(values)


def _make_size(values: object) -> torch.Size:
    return torch.Size(read_sizes(values))


def _typed(storage: object, dtype: object) -> torch.TypedStorage:
    if not isinstance(storage, torch.UntypedStorage) or not isinstance(dtype, torch.dtype):
        raise malformed("a typed storage needs a storage and a dtype")
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _view(storage: object, offset: object, shape: object, stride: object) -> torch.Tensor:
    """A tensor over a storage that never grows it."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise malformed(f"a tensor over a {type(storage).__name__}")
    if type(offset) is not int or not 0 <= offset < _MOST_ELEMENTS:
        raise malformed(f"storage offset {brief(offset)}")
    sizes, strides = read_sizes(shape), read_sizes(stride)
    if len(sizes) != len(strides):
        raise malformed(f"shape {sizes} with stride {strides}")
    untyped, dtype = storage._untyped_storage, storage.dtype
    last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    end = 0 if 0 in sizes else (offset + last + 1) * dtype.itemsize
    if end > untyped.nbytes():
        raise malformed(
            f"tensor of shape {sizes} and stride {strides} at {offset} needs {end} "
            f"bytes of a storage of {untyped.nbytes()}"
        )
    if math.prod(sizes) * dtype.itemsize > untyped.nbytes():  # a copy would be larger than it
        raise malformed(
            f"tensor of shape {sizes} and stride {strides} has more elements than its "
            f"storage of {untyped.nbytes()} bytes"
        )
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        untyped, 0 if 0 in sizes else offset, sizes, strides
    )


def _tensor(cls: object, storage: object, place: object) -> torch.Tensor:
    if not isinstance(place, tuple) or len(place) != 4:
        raise malformed("a tensor's place is not (offset, shape, stride, grad)")
    return _view(storage, *place[:3])


def _tensor_v2(*arguments: object) -> torch.Tensor:
    return _view(*arguments[:4])


def _tensor_v3(storage: object, *rest: object) -> torch.Tensor:
    untyped = storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage
    return _view(_typed(untyped, rest[5]), *rest[:3])


def _empty_storage(cls: object) -> Any:
    return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]


def _empty_dict() -> dict[str, object]:
    return {}


def _refuse_gpu(*_arguments: object) -> object:
    raise malformed("a tensor on a GPU, where only those of the host are taken")


def refuse_call(*_arguments: object) -> object:
    raise malformed("calls a class that is only named")


_GLOBALS: Final[dict[tuple[str, str], object]] = {
    ("torch", "Size"): _make_size,
    ("torch", "Tensor"): refuse_call,
    ("torch.nn.parameter", "Parameter"): refuse_call,
    ("torch.storage", "UntypedStorage"): refuse_call,
    ("torch.storage", "TypedStorage"): refuse_call,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("collections", "OrderedDict"): _empty_dict,
    (REDUCTIONS, "rebuild_tensor"): _tensor,
    (REDUCTIONS, "rebuild_cuda_tensor"): _refuse_gpu,
    (REDUCTIONS, "rebuild_typed_storage"): _typed,
    (REDUCTIONS, "rebuild_storage_empty"): _empty_storage,
    # classes that no opcode can change
    **{
        kind: type(kind[1], (_State,), {})
        for kind in (_METADATA_GLOBAL, ("multiprocessing.resource_sharer", "DupFd"))
    },
    **_DTYPES,
}
