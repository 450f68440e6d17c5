"""GPU memory that engine workers can map."""

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
    """Puts tensors that the block makes on a GPU into memory that other processes can map, so that
    engines can read them in place:

        with wsync.exportable():
            model = build_model().cuda()

    The block applies to this thread, and to the device that is current when it begins (call
    torch.cuda.set_device before).  The block uses a torch.cuda.MemPool over wsync's allocator,
    which gets memory with a descriptor from the driver.  With Megatron, put the block around making
    the model and wrapping it in DistributedDataParallel, but not around the optimizer.  With the
    distributed optimizer, all weights are in the wrapper's flat buffers, which are few pieces of
    memory; without it, in the tensors that the model was made with.  The wrapper's gradient buffers
    are included.  Costs:

    * torch_memory_saver does not see this memory, and does not free it in a pause.  torch itself
      cannot send its tensors to other processes (CUDA IPC).  Of this process's GPUs, only the one
      that holds the memory reaches it.
    * A tensor of 10 MiB or more has a piece of its own, in multiples of 2 MiB.  Smaller tensors
      share pieces of 20 MiB, and tensors of up to 1 MiB share pieces of 2 MiB.  A piece takes some
      calls of the driver, and a descriptor in each process that lends or maps it.
    * Other tensors do not use freed parts of this memory.  Parts that are free when the block ends
      go back to the driver.  Parts that are freed later go back when torch.cuda.empty_cache() is
      called, which waits for the stream that they were made on.  An engine that still maps such a
      part keeps it until it unmaps it.

    A model on the host needs no block: its own `share_memory()` moves its parameters in place.

    Raises:
        torch.OutOfMemoryError: as torch raises it; a note says how much the driver had left.
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
        _warn("CUDA was not in use at the start of the block: call torch.cuda.set_device first")


def _pool() -> Any:
    """Makes a torch memory pool for the current GPU.  Returns None, with a warning, if that fails.
    The pool ends with the block: its free parts go back then, the rest when torch frees them."""
    try:
        _core.exportable_check(torch.cuda.current_device())
        return torch.cuda.MemPool(_allocator().allocator())
    except (_core.WsyncError, RuntimeError) as error:  # torch's, if another allocator is in use
        _warn(str(error))
        return None


@functools.cache
def _allocator() -> Any:
    """Makes wsync's allocator.  The allocator is kept, because torch frees memory with it after its
    pool has ended."""
    functions = "wsync_exportable_alloc", "wsync_exportable_free"
    return torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, *functions)


def _warn(reason: str) -> None:
    _log.warning("wsync.exportable: engines cannot map GPU memory made in this block: %s", reason)
