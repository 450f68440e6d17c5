"""Errors for tensors that an engine's load_weights does not take as the trainer delivers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from wsync._core import LayoutError
from wsync.machine.error_text import error_text
from wsync.module_tensors import name_of
from wsync.module_tensors.names import listed, unfused

_REMEDY: Final = "the trainer's Options(quantise=) sets how weights are delivered"


class NotTakenError(LayoutError):
    """load_weights does not take what the trainer delivers.  The tensors are quantised in another
    way than the engine's, or they have names that the module does not know."""


def converting(module: torch.nn.Module, what: Iterable[str]) -> NotTakenError:
    return NotTakenError(
        f"{type(module).__name__} and the trainer quantise in different ways: load_weights "
        f"converts {listed(what)} ({_REMEDY})"
    )


def refusing(module: torch.nn.Module, what: str, error: Exception) -> NotTakenError:
    return NotTakenError(
        f"{type(module).__name__} does not take what the trainer delivers: load_weights fails at "
        f"{what}: {error_text(error)}{unfused([what.partition(' ')[0]])}"
    )


def meaningless(first: torch.dtype, last: torch.dtype) -> bool:
    """Whether values that are converted from `first` to `last` are no weights any more.  A format
    of one byte holds codes, or scales without a sign.  Integers are not rounded weights."""
    if first == last or torch.bool in (first, last):
        return False
    return 1 in (first.itemsize, last.itemsize) or (
        first.is_floating_point and not last.is_floating_point
    )


def text_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{name} ({name_of(dtype)} {tuple(shape)})"
