"""A load of tensors without values, to see what vLLM's layerwise reload would not take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wsync._core import Layout
from wsync.engine.learn.mismatch import converting, meaningless, refusing
from wsync.module_tensors import dtype_of, name_of

_WRITES: Final = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
_View = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, strides


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Loads tensors that have no values, of a model's shapes, to parameters that have none, and
    writes to no others.

    Raises NotTakenError where codes are converted, or where the loader raises over a tensor; errors
    that come of the want of values are no errors.
    """

    def __init__(self, model: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}  # by storage
        self._pairs: list[tuple[str, torch.Tensor]] = []
        self._converted: dict[str, str] = {}
        # by storage: what of it has been written, and whether with the values of a tensor
        self._written: dict[int, dict[_View, bool]] = {}
        for index in range(model.tensor_count):
            name, dtype, shape, _ = model.tensor(index)
            tensor = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
            self._names[_storage(tensor)] = name
            self._pairs.append((name, tensor))

    def run(
        self, module: torch.nn.Module, load: Callable[[list[tuple[str, torch.Tensor]]], Any]
    ) -> bool:
        """Whether the loader has come to its end."""
        ended = True
        try:
            with torch.no_grad(), self:
                load(list(self._pairs))
        except Exception as error:
            ended = False
            if not self._converted and not _wants_values(error):
                if what := self._at_work(error.__traceback__):
                    raise refusing(module, what, error) from error
                if isinstance(error, ValueError):  # vLLM looks for a name before it takes a tensor
                    raise refusing(module, "a tensor", error) from error
        if self._converted:
            raise converting(module, self._converted.values())
        return ended

    def written(self, tensor: torch.Tensor) -> int:
        """How many elements of a parameter the loader has written.  What fills all of it before
        parts are loaded does not count."""
        views = self._written.get(_storage(tensor), {})
        sizes = {view: math.prod(view[1]) for view in views}
        parts = [n for view, n in sizes.items() if views[view] or n < tensor.numel()]
        return sum(parts) if parts else sum(sizes.values())

    def _at_work(self, trace: TracebackType | None) -> str:
        """The tensor that the innermost functions have in their variables, or ""."""
        found = ""
        while trace is not None:
            for value in list(trace.tb_frame.f_locals.values()):
                plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
                if plain and (name := self._names.get(_storage(value))):
                    found = f"{name} ({_form(value)})"
            trace = trace.tb_next
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _WRITES:
            target = args[0]
            view = int(target.storage_offset()), tuple(target.shape), target.stride()
            views = self._written.setdefault(_storage(target), {})
            views.setdefault(view, False)
            if func is torch.ops.aten.copy_.default:
                source = args[1]
                if name := self._names.get(_storage(source), ""):
                    views[view] = True
                    if meaningless(source.dtype, target.dtype):
                        self._converted[name] = f"{name} ({_form(source)}) to {_form(target)}"
                if source.is_meta and not target.is_meta:
                    return target
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _form(tensor: torch.Tensor) -> str:
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)}"


def _wants_values(error: Exception) -> bool:
    """Whether an error is torch's about tensors without values."""
    said = ("meta", "storage", "data pointer")
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in said)
