"""Runs a model's own hook after a load.  vLLM's reload does not, and some hooks (DotS3's) make a
tensor only if it does not exist yet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from wsync.engine.post_load import run_in_place

_log = logging.getLogger(__name__)


def run_hook_anew(model: torch.nn.Module) -> None:
    """Runs the hook in place as if for the first time, without the tensors that it or others have
    made after loading.  If the hook raises without them, it runs once more with all of them."""
    hook = getattr(model, "process_weights_after_loading", None)
    if hook is None:
        return

    def run() -> None:
        try:
            with contextlib.ExitStack() as back:
                for slot, name in list(_made_since(model)):
                    back.callback(slot.setdefault, name, slot.pop(name))
                hook()
        except Exception as error:
            _log.info("the model's own hook runs again, with the tensors that it made: %r", error)
            hook()

    run_in_place(model, run)


def _made_since(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (dict, name) of the buffers and plain attributes that construction did not make."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    for layer in model.modules():
        constructed = get_layerwise_info(layer).restore_metadata[1].keys() | SKIP_TENSORS
        for slot in (layer._buffers, vars(layer)):
            for name, tensor in slot.items():
                if isinstance(tensor, torch.Tensor) and name not in constructed:
                    yield slot, name
