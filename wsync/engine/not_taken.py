"""Refusals of tensors that a load_weights does not take as a trainer delivers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from wsync._core import LayoutError
from wsync.machine.error_text import error_text
from wsync.module_tensors import name_of
from wsync.module_tensors.names import listed, unfused

_REMEDY: Final = "Options(quantise=) of the trainer says how weights are delivered"


class NotTakenError(LayoutError):
    """load_weights does not take what the trainer delivers: it is quantised in another way than
    what the engine keeps, or has names that the module has not."""


def converting(module: torch.nn.Module, what: Iterable[str]) -> NotTakenError:
    return NotTakenError(
        f"{type(module).__name__} and the trainer do not quantise alike: its load_weights converts "
        f"{listed(what)} ({_REMEDY})"
    )


def refusing(module: torch.nn.Module, what: str, error: Exception) -> NotTakenError:
    return NotTakenError(
        f"{type(module).__name__} does not take what the trainer delivers: loading {what}: "
        f"{error_text(error)}{unfused([what.partition(' ')[0]])}"
    )


def meaningless(first: torch.dtype, last: torch.dtype) -> bool:
    """Whether a conversion of values makes no weights of weights: formats of one byte are codes,
    or scales without a sign, and integers are no rounded weights."""
    if first == last or torch.bool in (first, last):
        return False
    return 1 in (first.itemsize, last.itemsize) or (
        first.is_floating_point and not last.is_floating_point
    )


def text_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{name} ({name_of(dtype)} {tuple(shape)})"
