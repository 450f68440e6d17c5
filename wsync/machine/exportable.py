"""Memory of a trainer's that engine workers can map."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Has tensors that are made in the block lie in memory that other processes can map, from which
    engines can read in place:

        with wsync.exportable():
            model = build_model()

    When the block ends, the CPU storages of tensors that operators of torch have made in this
    thread, and that are still alive, are moved to torch's shared memory (`share_memory_`).  They
    are moved in place: parameters, views and flat buffers that share a storage go on sharing it.
    What else looks at their memory is left behind on memory that is free then, and must not be used
    any more: arrays that `tensor.numpy()` has made in the block, memoryviews, DLPack capsules.
    Gradients and optimizer states that are made in the block move, too; what is made later does
    not.  A tensor that was made before the block, or that no operator has made (`torch.from_numpy`,
    a file that is mapped), can be moved by its own `share_memory_()`.

    Each storage takes a descriptor of the process (`ulimit -n`) and room in /dev/shm; one that is
    shared cannot be resized (`storage.resize_`), as some ways of offloading do.  Memory of GPUs
    stays where it is: this is where their allocator will be chosen.

    Raises:
        RuntimeError: torch cannot move a storage; those before it have been moved.
    """
    made = _Made()
    with made:
        yield
    made.share()


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators make; keeps none of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = dict[int, Any]()  # by their address while the reference holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set[int]()
        if func is not torch.ops.aten.lift_fresh.default:  # what torch.tensor has just made
            given = {storage._cdata for storage in _storages((args, kwargs))}
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
            if storage is not None and storage.nbytes() and not storage.is_shared():
                storage.share_memory_()


def _storages(values: Any) -> Iterator[Any]:
    """Those of the plain CPU tensors in some arguments, or a result."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none, or several
                yield value.untyped_storage()
