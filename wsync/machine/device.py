"""The device of rings and copies: the GPU that holds the weights, or the host."""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from wsync import _core
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import Check, Deadline
from wsync.machine.nvidia_wheels import bundled

if TYPE_CHECKING:
    from collections.abc import Sequence

# Names the GPU to use for weights in host memory: a UUID, or cuda:N.
VARIABLE: Final = "WSYNC_DEVICE"
_NVRTC: Final = "WSYNC_NVRTC_LIB"
_UUID: Final = re.compile("(GPU-)?[0-9a-fA-F-]{32,36}")
_POLL_SECONDS: Final = 1e-4
_MOST_GPU_THREADS: Final = 4  # taken to be as fast as a link to a GPU
_TORCH_SECONDS: Final = 120.0  # for torch's work, unless the caller says otherwise


def of(table: _core.TensorTable) -> str:
    """Returns the UUID of the GPU that holds some of the tensors.  If the host holds all, returns
    ""."""
    return "" if table.gpu is None else uuid(table.gpu)


def wanted() -> str:
    """Returns the UUID of the GPU that serves weights in host memory.  If none does, returns "".

    Raises:
        InvalidArgumentError: WSYNC_DEVICE names no GPU.
        UnsupportedError: the driver cannot be used.
    """
    name = os.environ.get(VARIABLE, "")
    if name in ("", "host", "cpu"):
        return ""
    kind, _, number = name.partition(":")
    if _UUID.fullmatch(name):
        return name
    if kind != "cuda" or not number.isdecimal():
        raise _core.InvalidArgumentError(f"{VARIABLE}={name!r} is neither cuda:N nor a GPU's UUID")
    return uuid(int(number))


def default() -> str:
    """Returns the UUID of the GPU for a process whose weights do not determine one."""
    if not torch.cuda.is_available():
        return wanted()
    return wanted() or uuid(torch.cuda.current_device())


def uuid(ordinal: int) -> str:
    """Returns the UUID of the GPU that has this number in torch."""
    uuids = _uuids(os.getpid())
    if ordinal >= len(uuids):
        raise _core.UnsupportedError(
            f"cuda:{ordinal} does not exist in this process: it sees {len(uuids)} GPUs, "
            "numbered from 0"
        )
    return uuids[ordinal]


@functools.cache
def _uuids(pid: int) -> list[str]:
    _, devices = _core.cuda_devices()
    return [device[0] for device in devices]


def find(uuid: str) -> _core.Device:
    """Returns the GPU with this UUID.  If `uuid` is "", returns the host.

    Raises:
        UnsupportedError: this process cannot use the GPU; the text says why.
    """
    return _gpu(uuid, os.getpid()) if uuid else _core.host()


@functools.cache
def _gpu(uuid: str, pid: int) -> _core.Device:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return _core.gpu(uuid, _nvrtc(), os.path.join(cache, "wsync"))


def _nvrtc() -> Sequence[str]:
    """Returns where pip's packages have NVRTC, which is tried besides the system's folders."""
    named = os.environ.get(_NVRTC)
    if named:
        return [named]
    return bundled("*/lib/libnvrtc.so.*")  # libnvrtc-builtins is not the compiler


def threads_for(device: _core.Device) -> int:
    """Returns how many threads copy for one stream.  The threads of a GPU's stream gather memory
    that the GPU cannot reach."""
    if device.ordinal < 0:
        return 1
    _, gpus = _core.cuda_devices()
    return max(1, min(_MOST_GPU_THREADS, len(os.sched_getaffinity(0)) // len(gpus)))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether physical memory is mapped at a tensor's addresses.  While an allocator has paused
    (torch_memory_saver, vLLM's sleep mode), a GPU has none there, and a read would end the GPU's
    context."""
    if tensor.device.type != "cuda":
        return True
    try:
        _core.BufferTable.of(_core.describe([tensor], gpu=True))
    except _core.StateError:
        return False
    return True


def frees(ordinal: int | None) -> int | None:
    """Returns how often torch has given memory of a GPU back to the driver.  Returns None if torch
    does not tell this, or has begun to count anew (torch.cuda.reset_accumulated_memory_stats)."""
    if ordinal is None or not torch.cuda.is_available():
        return None
    if torch.cuda.get_allocator_backend() != "native":
        return None
    stats = torch.cuda.memory_stats_as_nested_dict(ordinal)
    reserved = stats and stats["reserved_bytes"]["all"]
    if not reserved or reserved["allocated"] - reserved["freed"] != reserved["current"]:
        return None
    return int(stats["num_device_free"])


class KnownMemory:
    """Binds the same tensors again and again.  The driver is asked whether GPU memory is there, as
    in BufferTable.of, unless torch has freed none since it was asked about the same addresses, all
    in memory of cudaMalloc, which no allocator can pause."""

    def __init__(self) -> None:
        self._asked: tuple[int, bytes] | None = None

    def bind(self, table: _core.TensorTable) -> _core.BufferTable:
        if (now := frees(table.gpu)) is None:
            return _core.BufferTable.of(table)
        buffers = _core.BufferTable.of(table, ask=False)
        if (now, buffers.spans()) != self._asked:
            buffers = _core.BufferTable.of(table)
            self._asked = (now, buffers.spans()) if buffers.malloced else None
        return buffers


def of_module(module: torch.nn.Module) -> str:
    """Returns the UUID of the GPU of a module's parameters and buffers.  If they are on the host,
    returns ""."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    ordinals = {t.device.index for t in tensors if t.device.type == "cuda"}
    if len(ordinals) > 1:
        names = " and ".join(f"cuda:{ordinal}" for ordinal in sorted(ordinals))
        raise _core.UnsupportedError(
            f"{type(module).__name__} is on {names}, but one worker has only one GPU"
        )
    return uuid(ordinals.pop()) if ordinals else ""


def settle(device: _core.Device, timeout: float, check: Check = lambda: None) -> None:
    """Waits until a GPU has finished all work of this process, on every stream, and calls `check`
    meanwhile.  DeadlineError after `timeout` seconds.

    An update calls it before it uses its own stream.  Work that is enqueued behind a hanging stream
    can be neither given up nor freed.
    """
    if device.ordinal >= 0:
        # the driver's call has no deadline, and signals do not interrupt it
        late = f"{device!r} has not finished its work"
        result(start("wsync-settle", device.settle), Deadline(timeout), check, late)


def await_torch(device: _core.Device, timeout: float = _TORCH_SECONDS) -> None:
    """Waits until a GPU has finished the work that torch gave it in this thread.  DeadlineError
    after `timeout` seconds."""
    if not _torch_uses(device):
        return
    stream: Any = torch.cuda.current_stream(device.ordinal)
    passed, deadline = stream.record_event(), Deadline(timeout)
    while not passed.query():
        deadline.check(f"{device!r}: torch's work has not finished")
        time.sleep(_POLL_SECONDS)


def _torch_uses(device: _core.Device) -> bool:
    """Whether a device is a GPU that torch can use."""
    return device.ordinal >= 0 and torch.cuda.is_available()


def release_cached(device: _core.Device) -> None:
    """Gives back the memory of a GPU that torch keeps for later use."""
    if _torch_uses(device):
        torch.cuda.empty_cache()


def on_gpu(nbytes: int, device: _core.Device) -> torch.Tensor:
    """Allocates bytes on a GPU that torch's groups can send and fill."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device.ordinal))


class GpuBytes:
    """Memory of a GPU with CUDA's array interface, from which torch makes tensors."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self._owner = owner  # kept as long as these tensors
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def has_nccl(device: _core.Device) -> bool:
    """Whether ranks on such devices can form an NCCL group."""
    return _torch_uses(device) and dist.is_nccl_available()


def staging(nbytes: int, device: _core.Device) -> torch.Tensor:
    """Allocates bytes of host memory that the device's streams can write to as long as the tensor
    exists."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=_torch_uses(device), device="cpu")
