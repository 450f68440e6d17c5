"""What a model's own hook after loading makes only where it is not there yet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from wsync.engine.post_load import run_in_place
from wsync.module_tensors import checksum_of
from wsync.module_tensors.held import seen, slots, usable

_log = logging.getLogger(__name__)


class BoundTensor(NamedTuple):
    """Where a tensor is bound, and under which name."""

    values: dict[str, Any]
    name: str


def made_once(model: torch.nn.Module) -> list[BoundTensor]:
    """Tensors that the hook makes otherwise where they are not there than it has left them: it has
    been called with these weights, and finds its work done.  All is bound as before."""
    hook = getattr(model, "process_weights_after_loading", None)
    if hook is None:
        return []
    before = [(slot, slot.values[slot.name]) for slot in _not_constructed(model)]
    bound = _Bound(model)
    try:
        with torch.no_grad(), _removed([slot for slot, _ in before]):
            hook()
            return [slot for slot, tensor in before if _differs(slot, tensor)]
    except Exception as error:
        _log.info("what the model's own hook makes once is not known: %s", repr(error))
        return []
    finally:
        bound.restore()


def run_anew(
    model: torch.nn.Module, once: Sequence[BoundTensor], hook: Callable[[], object]
) -> None:
    """As run_in_place, without what is made once: it is made anew."""

    def run() -> None:
        with _removed(once):
            hook()

    run_in_place(model, run)


@contextlib.contextmanager
def _removed(found: Sequence[BoundTensor]) -> Iterator[None]:
    """Within it they are not there; in the end what nobody has made is so again."""
    held = [(slot, slot.values.pop(slot.name)) for slot in found if slot.name in slot.values]
    try:
        yield
    finally:
        for slot, tensor in held:
            slot.values.setdefault(slot.name, tensor)


class _Bound:
    """Which tensors a module's attributes are bound to, and to which memory these are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._slots = [(slot, dict(slot)) for part in module.modules() for slot in slots(part)]
        held = (value for _, values in self._slots for value in values.values())
        self._data = [(t, t.detach()) for t in held if isinstance(t, torch.Tensor) and usable(t)]

    def restore(self) -> None:
        for slot, values in self._slots:
            for name in [*slot, *(values.keys() - slot.keys())]:
                old, new = values.get(name), slot.get(name)
                if new is not old and any(isinstance(each, torch.Tensor) for each in (old, new)):
                    if name in values:
                        slot[name] = old
                    else:
                        del slot[name]
        for tensor, data in self._data:
            if seen(tensor) != seen(data):
                tensor.data = data


def _not_constructed(model: torch.nn.Module) -> Iterator[BoundTensor]:
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # before 0.16 nothing is noted
        return
    for layer in model.modules():
        parameters, buffers = get_layerwise_info(layer).restore_metadata
        for values in slots(layer):
            for name, tensor in values.items():
                made = isinstance(tensor, torch.Tensor) and usable(tensor) and tensor.numel()
                if made and name not in parameters and name not in buffers:
                    yield BoundTensor(values, name)


def _differs(slot: BoundTensor, tensor: torch.Tensor) -> bool:
    now = slot.values.get(slot.name)
    if now is tensor or not isinstance(now, torch.Tensor):
        return False
    if (now.dtype, now.shape) != (tensor.dtype, tensor.shape):
        return True
    return checksum_of(now) != checksum_of(tensor)
