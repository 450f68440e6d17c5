"""Which parts of a module's tensors a loader writes to while it does load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from wsync.engine.learn.module_memory import ModuleMemory
from wsync.engine.learn.tracer import changed_arguments

Part = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # area, offset in bytes, shape, strides


class WatchedWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors of `held`, or views of them, that operators of this thread write to."""

    def __init__(self, held: ModuleMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: set[Part] = set()
        self._held = held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in changed_arguments(func, args, kwargs):
            place = tensor.data_ptr()
            area = self._held.find(place)
            if area >= 0:
                offset = place - self._held.areas[area].start
                self.parts.add((area, offset, tuple(tensor.shape), tensor.stride()))
        return func(*args, **kwargs)
