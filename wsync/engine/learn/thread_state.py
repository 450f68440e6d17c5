"""Modes of torch in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_Mode = TorchDispatchMode | TorchFunctionMode


def _push(mode: _Mode) -> None:
    if isinstance(mode, TorchFunctionMode):
        torch._C._push_on_torch_function_stack(mode)
    else:
        torch._C._push_on_torch_dispatch_stack(mode)


def _pop(mode: _Mode) -> None:
    """The last one of its kind."""
    if isinstance(mode, TorchFunctionMode):
        torch._C._pop_torch_function_stack()
    else:
        torch._C._pop_torch_dispatch_stack(None)


@contextmanager
def pushed(mode: _Mode) -> Iterator[None]:
    """A mode in this thread.  `with mode` sets flags of all threads as well, which stay wrong where
    two do not end in turn."""
    _push(mode)
    try:
        yield
    finally:
        _pop(mode)
