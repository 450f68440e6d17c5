"""A model's own hook after loading.  vLLM's reload leaves it out, and some hooks make a tensor only
where it is not there yet (DotS3's)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from wsync.engine.post_load import run_in_place

_log = logging.getLogger(__name__)


def run_hook_anew(model: torch.nn.Module) -> None:
    """Runs it, in place, as if it had never run: without the tensors that it or others have made
    after loading.  If it needs one of these, it is run once more with all of them."""
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
            _log.info("the model's own hook does not run as if for the first time: %r", error)
            hook()

    run_in_place(model, run)


def _made_since(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The buffers and plain attributes that a model was constructed without, and where they are."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    for layer in model.modules():
        constructed = get_layerwise_info(layer).restore_metadata[1].keys() | SKIP_TENSORS
        for slot in (layer._buffers, vars(layer)):
            for name, tensor in slot.items():
                if isinstance(tensor, torch.Tensor) and name not in constructed:
                    yield slot, name
