"""Which parts of a module's tensors a loader writes to while it does load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wsync.engine.learn.module_memory import ModuleMemory
from wsync.engine.learn.operators import changed_arguments, parts_written

Part = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # area, offset in bytes, shape, strides


class BeforeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `tell` with each tensor that an operator of this thread is about to write to, or with
    the parts of it that an index says."""

    def __init__(self, tell: Callable[[torch.Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell
        self._ended = False

    def __exit__(self, *raised: Any) -> None:
        self._ended = True  # also in threads that go on
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of Tracer; torch would also import its compiler, of 70 MiB

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in () if self._ended else changed_arguments(func, args, kwargs):
            for part in parts_written(func.overloadpacket, args, tensor):
                self._tell(part)
        return func(*args, **kwargs)


class WatchedWrites(BeforeWrites):  # type: ignore[no-untyped-call]
    """Notes the tensors of `held`, or views of them, that operators of this thread write to."""

    def __init__(self, held: ModuleMemory) -> None:
        super().__init__(self._note)
        self.parts: set[Part] = set()
        self._held = held

    def _note(self, tensor: torch.Tensor) -> None:
        place = tensor.data_ptr()
        area = self._held.find(place)
        if area >= 0:
            offset = place - self._held.areas[area].start
            self.parts.add((area, offset, tuple(tensor.shape), tensor.stride()))
