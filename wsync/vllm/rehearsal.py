"""A load of tensors without values, to see what vLLM's layerwise reload would not take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wsync._core import Layout
from wsync.engine.learn.mismatch import (
    NotTakenError,
    converting,
    meaningless,
    refusing,
)
from wsync.machine.error_text import error_text
from wsync.module_tensors import dtype_of
from wsync.module_tensors.quantised_names import is_note

_WRITES: Final = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
_View = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, strides


def _refuse_names(module: torch.nn.Module, error: Exception) -> None:
    """Raises NotTakenError for a ValueError of a loader that had no tensor at work: vLLM's
    AutoWeightsLoader looks for a name among the module's before it takes the tensor."""
    if isinstance(error, ValueError):
        raise NotTakenError(
            f"{type(module).__name__} does not take what the trainer delivers: {error_text(error)}"
        ) from error


def _at_work(
    trace: TracebackType | None,
    source: Callable[[torch.Tensor], str],
    target: Callable[[torch.Tensor], str],
) -> tuple[str, str]:
    """The tensor of the model that was being loaded when an error was raised, and the module's
    that it was loaded to: what the innermost functions have in their variables; "" where none.
    source, target: the name of a tensor, or of a part of it."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    name = path = ""
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
                name, path = name or source(value), path or target(value)
        if name:
            break
    return name, path


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _view(tensor: torch.Tensor) -> _View:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _wants_values(error: Exception) -> bool:
    """Whether an error is torch's about tensors without values."""
    said = ("meta", "storage", "data pointer")
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in said)


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Loads tensors that have no values, of a model's shapes, to parameters that have none, and
    writes to no others.

    Raises NotTakenError where codes are converted, or where the loader raises over a tensor or over
    names; errors that come of the want of values are no errors.
    """

    def __init__(self, model: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}
        self._pairs: list[tuple[str, torch.Tensor]] = []
        self._texts: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._converted: dict[str, str] = {}
        # by storage: what of it has been written, and from which parts of which tensors
        self._written: dict[int, dict[_View, list[tuple[str, torch.Size, _View]]]] = {}
        for index in range(model.tensor_count):
            name, dtype, shape, _ = model.tensor(index)
            tensor = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
            self._names[tensor.untyped_storage()._cdata] = name
            self._texts[name] = f"{name} ({dtype} {shape})"
            self._shapes[name] = tensor.shape
            self._pairs.append((name, tensor))

    def run(
        self, module: torch.nn.Module, load: Callable[[list[tuple[str, torch.Tensor]]], Any]
    ) -> bool:
        """Whether the loader has come to its end."""
        ended = True
        targets = {
            parameter.untyped_storage()._cdata: f"{path} ({_dtype(parameter)} {_shape(parameter)})"
            for path, parameter in module.named_parameters()
        }
        try:
            with torch.no_grad(), self:
                load(list(self._pairs))
        except Exception as error:
            ended = False
            name, target = _at_work(
                error.__traceback__,
                self._name,
                lambda tensor: targets.get(tensor.untyped_storage()._cdata, ""),
            )
            if not self._converted and name and not _wants_values(error):
                unknown = isinstance(error, KeyError | AttributeError)
                into = f" to {target}" if target and not unknown else ""
                raise refusing(module, f"{self._texts[name]}{into}", error) from error
            if not name and not _wants_values(error):
                _refuse_names(module, error)
        if self._converted:
            raise converting(module, self._converted.values())
        return ended

    def written(self, tensor: torch.Tensor) -> int:
        """How many elements of a parameter the loader has written.  What fills all of it before
        parts are loaded does not count."""
        views = self._written.get(tensor.untyped_storage()._cdata, {})
        sizes = {view: math.prod(view[1]) for view in views}
        parts = [n for view, n in sizes.items() if views[view] or n < tensor.numel()]
        return sum(parts) if parts else sum(sizes.values())

    def _name(self, tensor: torch.Tensor) -> str:
        return self._names.get(tensor.untyped_storage()._cdata, "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _WRITES:
            target = args[0]
            views = self._written.setdefault(target.untyped_storage()._cdata, {})
            sources = views.setdefault(_view(target), [])
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            name = self._name(source)
            if name and not is_note(name):
                sources.append((name, self._shapes[name], _view(source)))
            if name and meaningless(source.dtype, target.dtype):
                into = f"{_dtype(target)} {_shape(target)}"
                self._converted[name] = f"{self._texts[name]} to {into}"
            if source.is_meta and not target.is_meta:
                return target
        return func(*args, **(kwargs or {}))
