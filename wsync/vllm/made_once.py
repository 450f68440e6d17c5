"""What a model's own hook after loading makes, in some only where it is not there yet (DotS3's)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from wsync.engine.post_load import in_place, run_in_place
from wsync.module_tensors.held import bound_tensors

_log = logging.getLogger(__name__)


class BoundTensor(NamedTuple):
    """Where a tensor is bound, and under which name."""

    values: dict[str, Any]
    name: str


def made_by_hook(model: torch.nn.Module) -> list[BoundTensor]:
    """Tensors that the hook makes where they are not there.  All is bound as before."""
    hook = getattr(model, "process_weights_after_loading", None)
    if hook is None:
        return []
    others = list(_not_constructed(model))
    try:
        with in_place(model), removed(others):
            hook()
            return [slot for slot in others if slot.name in slot.values]
    except Exception as error:
        _log.info("what the model's own hook makes is not known: %s", repr(error))
        return []


def run_anew(
    model: torch.nn.Module, made: Sequence[BoundTensor], hook: Callable[[], object]
) -> None:
    """As run_in_place, without what the hook makes: it is made anew."""

    def run() -> None:
        with removed(made):
            hook()

    run_in_place(model, run)


@contextlib.contextmanager
def removed(found: Sequence[BoundTensor]) -> Iterator[None]:
    """Within it they are not there; in the end what nobody has made is so again."""
    held = [(slot, slot.values.pop(slot.name)) for slot in found if slot.name in slot.values]
    try:
        yield
    finally:
        for slot, tensor in held:
            slot.values.setdefault(slot.name, tensor)


def _not_constructed(model: torch.nn.Module) -> Iterator[BoundTensor]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    constructed = {
        (id(slot), name)
        for layer in model.modules()
        for slot, made in zip(
            (layer._parameters, layer._buffers),
            get_layerwise_info(layer).restore_metadata,
            strict=True,
        )
        for name in made
    }
    for _, slot, name, tensor in bound_tensors(model):
        if tensor.numel() and (id(slot), name) not in constructed:
            yield BoundTensor(slot, name)
