"""A load of tensors without values, which shows what vLLM's layerwise reload would refuse."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wsync._core import Layout
from wsync.engine.not_taken import converting, meaningless, refusing, text_of
from wsync.module_tensors import dtype_of
from wsync.probing.numbering import Made, Source

_COPIES: Final = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor)
_FILLS: Final = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
_View = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, strides


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Loads tensors of a model's shapes, but without values, to parameters without values, and
    writes to no other parameters.

    Raises NotTakenError if codes would be converted, or if the loader raises for a tensor.  Errors
    that come only from the missing values are ignored.
    """

    def __init__(self, model: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        facts = map(model.tensor, range(model.tensor_count))
        self._sources = [Source(name, dtype_of(dtype), shape) for name, dtype, shape, _ in facts]
        self._by_storage: dict[int, Source] = {}
        self._made: list[torch.Tensor] = []  # kept: no other tensor may get the same storage
        self._converted: dict[str, str] = {}
        self._written: dict[int, set[_View]] = defaultdict(set)  # by storage

    def run(self, module: torch.nn.Module, load: Callable[[Any], Any]) -> bool:
        """Calls the loader; returns whether it has come to its end."""
        pairs, ended = Made(self._sources, self._make, whole=False), True
        try:
            with torch.no_grad(), self:
                load(pairs)
        except Exception as error:
            ended = False
            if not self._converted and not _wants_values(error):
                last = "" if pairs.ended else pairs.last
                taken = next((text_of(*s) for s in self._sources if s.name == last), "")
                if taken or isinstance(error, ValueError):
                    raise refusing(module, taken or "a tensor", error) from error
        if self._converted:
            raise converting(module, self._converted.values())
        return ended

    def written(self, tensor: torch.Tensor) -> int:
        """Returns how many elements of a parameter the loader has written.  Filling a whole
        parameter with one number does not count, because a loader may do so before it loads
        parts."""
        return sum(math.prod(shape) for _, shape, _ in self._written[_storage(tensor)])

    def _make(self, source: Source) -> torch.Tensor:
        tensor = torch.empty(source.shape, dtype=source.dtype, device="meta")
        self._by_storage[_storage(tensor)] = source
        self._made.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _COPIES or (func in _FILLS and not _is_whole(args[0])):
            view = int(args[0].storage_offset()), tuple(args[0].shape), args[0].stride()
            self._written[_storage(args[0])].add(view)
        if func in _COPIES:
            target, value = args[:2]
            source = self._by_storage.get(_storage(value))
            if source is not None and meaningless(value.dtype, target.dtype):
                found, place = (text_of("", t.dtype, tuple(t.shape)) for t in (value, target))
                self._converted[source.name] = f"{source.name}{found} to{place}"
            if value.is_meta and not target.is_meta:
                return target
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _wants_values(error: Exception) -> bool:
    """Whether torch has raised an error because a tensor has no values."""
    said = ("meta", "storage", "data pointer")
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in said)
