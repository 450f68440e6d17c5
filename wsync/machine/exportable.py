"""Memory of GPUs that engine workers can map."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from wsync import _core

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Has tensors that are made on a GPU in the block lie in memory that other processes can map,
    from which engines can read in place:

        with wsync.exportable():
            model = build_model().cuda()

    What this thread allocates in the block on the device that is current when it begins (call
    torch.cuda.set_device before) is memory of the driver's that has a descriptor, by a
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

    A model on the host needs no block: its own `share_memory()` moves its parameters, in place.

    Raises:
        torch.OutOfMemoryError: as torch raises it; a note says what the driver had left.
    """
    is_initialized: Any = torch.cuda.is_initialized
    used = is_initialized()  # never in a fork, where CUDA cannot be used
    pool = _pool() if used else None
    try:
        with contextlib.nullcontext() if pool is None else torch.cuda.use_mem_pool(pool):
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
