"""Memory of a trainer's that engine workers can map."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from wsync import _core

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Has tensors that are made in the block lie in memory that other processes can map, from which
    engines can read in place:

        with wsync.exportable():
            model = build_model()

    On the host: when the block ends, the CPU storages of tensors that operators of torch have made
    in this thread, and that are still alive, are moved to torch's shared memory (`share_memory_`).
    They are moved in place: parameters, views and flat buffers that share a storage go on sharing
    it.  What else looks at their memory is left behind on memory that is free then, and must not be
    used any more: arrays that `tensor.numpy()` has made in the block, memoryviews, DLPack capsules.
    Gradients and optimizer states that are made in the block move, too; what is made later does
    not.  A tensor that was made before the block, or that no operator has made (`torch.from_numpy`,
    a file that is mapped), can be moved by its own `share_memory_()`.  Each storage takes a
    descriptor of the process (`ulimit -n`) and room in /dev/shm; one that is shared cannot be
    resized (`storage.resize_`), as some ways of offloading do, and FSDP with what it has gathered:
    torch ends the process then.  So no pass of a model under FSDP belongs into the block.

    On a GPU: what this thread allocates in the block on the device that is current when it begins
    (call torch.cuda.set_device before) is memory of the driver's that has a descriptor, by a
    torch.cuda.MemPool over an allocator of wsync's.  With Megatron, put the block around making the
    model and wrapping it in DistributedDataParallel, not around the optimizer: with the distributed
    optimizer all weights lie in the wrapper's flat buffers, which are few pieces of memory, and
    without it in the tensors that the model was made with.  Gradient buffers, which the wrapper
    makes, too, come along.  What that costs:

    * torch_memory_saver does not see this memory and leaves it where it is when it pauses, and
      torch cannot send its tensors to other processes itself (CUDA IPC).  Of the GPUs of this
      process only its own reaches it.
    * A tensor of 10 MiB or more is a piece of its own, in multiples of 2 MiB; smaller ones share
      pieces of 20 MiB, those of up to 1 MiB pieces of 2 MiB.  A piece takes some calls of the
      driver, and a descriptor wherever it is lent or mapped.
    * Other tensors do not use what is freed of it.  What is free when the block ends goes back to
      the driver, and what is freed later when torch.cuda.empty_cache() is called, which waits for
      the stream that it was made on.  Engines that still map it keep it until they let go.

    Raises:
        RuntimeError: torch cannot move a storage of the host; those before it have been moved.
        torch.OutOfMemoryError: as torch raises it; a note says what the driver had left.
    """
    made = _Made()
    with _gpu_memory(), made:
        yield
    made.share()


@contextlib.contextmanager
def _gpu_memory() -> Iterator[None]:
    """What this thread makes on the current GPU comes from wsync's allocator."""
    is_initialized: Any = torch.cuda.is_initialized
    used = is_initialized()  # never in a fork, where CUDA cannot be used
    with contextlib.ExitStack() as stack:
        pool = _pool() if used else None
        if pool is not None:
            stack.enter_context(torch.cuda.use_mem_pool(pool))
        try:
            yield
        except torch.OutOfMemoryError as error:
            if pool is not None and (reason := _core.exportable_refusal()):
                error.add_note(f"wsync.exportable: {reason}")
            raise
    if not used and is_initialized():
        _warn("CUDA was not in use when it began: call torch.cuda.set_device before it")


def _pool() -> Any:
    """Of torch's, for the current GPU; None with a warning where there can be none.  It ends with
    the block: what is free in it goes back then, and the rest as soon as torch is told to."""
    try:
        _core.exportable_check(torch.cuda.current_device())
        return torch.cuda.MemPool(_allocator().allocator())
    except (_core.WsyncError, RuntimeError) as error:  # torch's: of another allocator of its own
        _warn(str(error))
        return None


@functools.cache
def _allocator() -> Any:
    """torch gives memory back by it after its pool has ended, so it is kept."""
    functions = "wsync_exportable_alloc", "wsync_exportable_free"
    return torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, *functions)


def _warn(reason: str) -> None:
    _log.warning("wsync.exportable: memory of GPUs made in this block is torch's own, %s", reason)


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators make; keeps none of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = dict[int, Any]()  # by their address while the reference holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.tensor has just made what it lifts; torch.from_numpy has not: it cannot be resized
        fresh = func is torch.ops.aten.lift_fresh.default
        given = {
            storage._cdata
            for storage in _storages((args, kwargs))
            if not (fresh and storage.resizable())
        }
        weak: Any = StorageWeakRef
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given:
                self._storages[storage._cdata] = weak(storage)
        return result

    def share(self) -> None:
        """Moves what is still there."""
        new: Any = torch.UntypedStorage
        for reference in self._storages.values():
            storage = new._new_with_weak_ptr(reference.cdata)
            if storage is not None and _has_memory(storage) and not storage.is_shared():
                storage.share_memory_()


def _has_memory(storage: Any) -> bool:
    """Not that of a fake tensor, which is on "meta", or of a wrapper, which have a size alone."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return False
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # a wrapper's, that one may not ask
        return False


def _storages(values: Any) -> Iterator[Any]:
    """Those of the CPU tensors in some arguments, or a result; of a DTensor, and all else that
    wraps tensors, theirs."""
    for value in tree_leaves(values):
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            yield value
        elif isinstance(value, torch.Tensor):
            yield from _storages_of(value)


def _storages_of(tensor: Any) -> Iterator[Any]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        yield from _storages([getattr(tensor, name) for name in names])
    elif tensor.device.type == "cpu":
        with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none, or several
            yield tensor.untyped_storage()
