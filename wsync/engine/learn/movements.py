"""Operators that move data, as a tracer follows them: (tracer, operator, arguments) -> result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from wsync.engine.learn.operators import (
    MOST_RUNS,
    arguments_read,
    as_cat,
    index_of_put,
    indices_in,
    parts_of_cat,
    runs_of,
    with_elements,
)
from wsync.engine.learn.regions import UnexpressedError

if TYPE_CHECKING:
    from wsync.engine.learn.tracer import Tracer

_aten = torch.ops.aten


def _copy(
    tracer: Tracer, func: Any, target: torch.Tensor, source: torch.Tensor, *rest: Any
) -> torch.Tensor:
    if not tracer.held(target) and not tracer.moves(source):
        func(target, source, *rest)
        if tracer.forgets(target):
            return target
    tracer.move(target, source)
    return target


def _clone(tracer: Tracer, func: Any, source: torch.Tensor, **options: Any) -> torch.Tensor:
    if not tracer.moves(source):
        return func(source, **options)  # type: ignore[no-any-return]
    if tracer.symbolic(source):
        options.pop("non_blocking", None)
        fresh = torch.empty_like(source, **options)
    else:
        fresh = func(source, **options)
    tracer.move(fresh, source)
    return fresh


def _cat(tracer: Tracer, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    if not any(tracer.moves(t) for t in tensors):
        return func(tensors, dim)  # type: ignore[no-any-return]
    parts = with_elements(tensors)
    shape = list(parts[0].shape)
    shape[dim] = sum(t.shape[dim] for t in parts)
    dtype = parts[0].dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    whole = torch.empty(shape, dtype=dtype, device=parts[0].device)
    for place, part in parts_of_cat(whole, tensors, dim):
        tracer.move(place, part)
    return whole


def _stack(
    tracer: Tracer, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> torch.Tensor:
    if not any(tracer.moves(t) for t in tensors):
        return func(tensors, dim)  # type: ignore[no-any-return]
    return _cat(tracer, _aten.cat, *as_cat(_aten.stack, tensors, dim))


def _select(tracer: Tracer, func: Any, source: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    if not tracer.symbolic(source) or tracer.symbolic(index) or index.dim() > 1:
        raise UnexpressedError("an index of its own")
    tracer.look([index])
    dim = dim % source.dim()
    shape = list(source.shape)
    places = [int(i) % shape[dim] for i in index.reshape(-1).tolist()]
    shape[dim] = len(places)
    fresh = torch.empty(shape, dtype=source.dtype, device=source.device)
    for start, place, count in runs_of(places):
        tracer.move(fresh.narrow(dim, start, count), source.narrow(dim, place, count))
    return fresh


def _index(tracer: Tracer, func: Any, source: torch.Tensor, indices: Any) -> torch.Tensor:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    for _, index in given:
        if index.dtype == torch.bool and tracer.symbolic(index):
            tracer.refuse(tracer.names(index), "index")
    if len(given) != 1 or given[0][1].dim() != 1:
        raise UnexpressedError("an index of more than one axis")
    dim, index = given[0]
    if index.dtype == torch.bool:
        tracer.look([index])
        index = index.nonzero().reshape(-1)
    return _select(tracer, func, source, dim, index)


def _placed(
    tracer: Tracer, packet: Any, args: Sequence[Any]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The parts of a tensor to which an operator puts values by an index of one dimension, and
    the values of each; None for other operators, and for an index that cannot be followed."""
    found = index_of_put(packet, args)
    if found is None:
        return None
    target, dim, index, values = found
    if values.dtype != target.dtype or tracer.symbolic(index):
        return None
    places = indices_in(index, target.shape[dim])
    if not places or (packet is _aten.index_copy_ and int(index.min()) < 0):
        return None  # perhaps the operator says what is wrong
    shape = torch.Size([*target.shape[:dim], len(places), *target.shape[dim + 1 :]])
    if packet is not _aten.index_copy_:
        values = values.expand(shape)
    elif values.shape != shape:
        return None
    runs = list(runs_of(places))
    pieces = len(runs) * math.prod(target.shape[:dim])
    if len({*places}) < len(places) or pieces > MOST_RUNS:
        return None
    return [
        (target.narrow(dim, place, count), values.narrow(dim, start, count))
        for start, place, count in runs
    ]


def _put(tracer: Tracer, func: Any, *args: Any, **options: Any) -> torch.Tensor:
    placed = _placed(tracer, func.overloadpacket, args)
    if placed is None:
        raise UnexpressedError("an index of its own")
    target: torch.Tensor = args[0]
    tracer.look(arguments_read(func.overloadpacket, args, {}))
    if not tracer.held(target) and not any(tracer.moves(values) for _, values in placed):
        func(*args, **options)
        if tracer.forgets(target):
            return target
    for part, values in placed:
        tracer.move(part, values)
    return target


def _fill(tracer: Tracer, func: Any, target: torch.Tensor, value: Any = 0) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and tracer.moves(value):
        tracer.move(target, value)
        return target
    if not tracer.held(target):
        func(target, value) if func.overloadpacket is _aten.fill_ else func(target)
        if tracer.forgets(target):
            return target
    tracer.move(target, torch.as_tensor(value, dtype=target.dtype, device=target.device))
    return target


def _pad(
    tracer: Tracer, func: Any, source: torch.Tensor, pad: Sequence[int], value: Any = 0
) -> torch.Tensor:
    if not tracer.symbolic(source) or any(count < 0 for count in pad):
        raise UnexpressedError("padding of its own")
    ends = [(0, 0)] * source.dim()
    for i in range(len(pad) // 2):
        ends[source.dim() - 1 - i] = (pad[2 * i], pad[2 * i + 1])
    shape = [n + low + high for n, (low, high) in zip(source.shape, ends, strict=True)]
    fresh = torch.full(shape, value, dtype=source.dtype, device=source.device)
    inner = fresh
    for dim, (low, _) in enumerate(ends):
        inner = inner.narrow(dim, low, source.shape[dim])
    tracer.move(inner, source)
    return fresh


HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.copy_: _copy,
    _aten.clone: _clone,
    _aten._to_copy: _clone,
    _aten.contiguous: _clone,
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.index_select: _select,
    _aten.index: _index,
    _aten.index_copy_: _put,
    _aten.index_put_: _put,
    _aten.fill_: _fill,
    _aten.zero_: _fill,
    _aten.constant_pad_nd: _pad,
}
