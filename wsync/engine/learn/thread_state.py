"""Has other threads run something as the one that asks for it would: with its modes of torch, its
context and stream, and watched as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from wsync.engine.learn.attribute_watch import watched_as_here

_T = TypeVar("_T")
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


def _modes() -> list[_Mode]:
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [*functions, *_get_current_dispatch_mode_stack()]


def of_this_thread() -> Callable[[Callable[[], _T]], _T]:
    """Runs something, once, in the thread that calls it, as this one would now; the stream only
    where that thread has the same GPU: to go back to another one would take memory of that."""
    modes = _modes()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if initialized else None
    context, watched = copy_context(), watched_as_here()

    def run(act: Callable[[], _T]) -> _T:
        with ExitStack() as stack:
            if stream is not None and stream.device_index == torch.cuda.current_device():
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(inference))  # which sets the other one, too
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(watched())
            for mode in modes:
                stack.enter_context(pushed(mode))
            return context.run(act)

    return run


def _drop_modes() -> None:
    """In a forked process nobody records any more."""
    modes = _modes()
    others = [mode for mode in modes if not type(mode).__module__.startswith("wsync.")]
    if len(others) < len(modes):
        for mode in modes:
            _pop(mode)
        for mode in others:
            _push(mode)


os.register_at_fork(after_in_child=_drop_modes)
