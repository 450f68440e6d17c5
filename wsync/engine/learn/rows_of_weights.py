"""What forward has made of a module's weights once and keeps: an update does not make it anew."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch

from wsync.engine.learn.module_memory import slots, usable
from wsync.machine.device import has_memory

_KINDS: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))
_LEAST: Final = 8  # elements of a row: fewer may be the same by chance
_AT_ONCE: Final = 1 << 24  # elements that are compared at a time


def made_of_rows(
    module: torch.nn.Module, only: Collection[str] | None = None
) -> Iterator[tuple[str, bool | None]]:
    """Paths of a module's tensors that are no parameters, and whether their rows or columns are
    rows of the parameters of the same part or of parts of it, perhaps converted: of one, of several
    one after another, of a piece of one.  Some rows stand for all.  None: they cannot be
    compared.

    Looked at are buffers and plain attributes of one or two dimensions, and those in tuples and
    lists.  only: no others than these.
    """
    for prefix, part in module.named_modules():
        for path, tensor in _kept(prefix, part):
            if only is None or path in only:
                made = None
                with contextlib.suppress(Exception):  # want of memory, classes that refuse it
                    made = _is_made_of(tensor, part)
                yield path, made


def _kept(prefix: str, part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in itertools.chain.from_iterable(slot.items() for slot in slots(part)):
        path = f"{prefix}.{name}".lstrip(".")
        inside = enumerate(value) if type(value) in (tuple, list) else ()
        found: list[tuple[str, Any]] = [(path, value), *((f"{path}[{n}]", v) for n, v in inside)]
        for where, tensor in found:
            if _is_comparable(tensor) and not isinstance(tensor, torch.nn.Parameter):
                yield where, tensor


def _is_comparable(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _KINDS:
        return False
    return usable(tensor) and tensor.dim() in (1, 2) and tensor.numel() >= _LEAST


def _is_made_of(tensor: torch.Tensor, part: torch.nn.Module) -> bool:
    parameters = [
        _as_rows(each.detach())
        for each in part.parameters()
        if _is_comparable(each) and each.device == tensor.device
        if each.dim() == tensor.dim()
    ]
    return any(
        _are_rows(rows, [each for each in parameters if each.shape[1] == rows.shape[1]])
        for rows in (_as_rows(tensor.detach()), tensor.detach().t())
        if rows.dim() == 2 and rows.shape[1] >= _LEAST
    )


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(0)


def _are_rows(rows: torch.Tensor, parameters: list[torch.Tensor]) -> bool:
    if not parameters or not all(map(has_memory, (rows, *parameters))):
        return False
    found = [rows[number] for number in {0, len(rows) // 2, len(rows) - 1}]
    found = [row for row in found if bool((row != row[0]).any())]  # others say nothing: padding
    return bool(found) and all(any(_has_row(each, row) for each in parameters) for row in found)


def _has_row(parameter: torch.Tensor, row: torch.Tensor) -> bool:
    pieces = torch.split(parameter, max(_AT_ONCE // len(row), 1))
    return any(bool((piece.to(row.dtype) == row).all(-1).any()) for piece in pieces)
