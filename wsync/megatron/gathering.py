"""Checks that Megatron has gathered the parameters that an optimizer step has changed.

With overlap_param_gather, a step changes only a data-parallel rank's own share.  The other shares
are gathered later: by hooks in the next forward pass, or by start_param_sync().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core

if TYPE_CHECKING:
    from torch.nn import Module

_GATHERING = "DistributedDataParallel._make_forward_pre_hook."


def check_gathered(chunks: Sequence[Module]) -> None:
    """Raises StateError if parameters may have old values outside this data-parallel rank's share,
    or if they are being gathered."""
    for number, chunk in enumerate(chunks):
        for module in _wrapped(chunk):  # the model and all of its parts have the hooks
            if any(map(_gathers, module._forward_pre_hooks.values())):
                raise _core.StateError(
                    f"model chunk {number}: its parameters may be old until the next forward pass "
                    "gathers them (overlap_param_gather): call disable_forward_pre_hook() of "
                    "Megatron's DistributedDataParallel before an update, and "
                    "enable_forward_pre_hook() after it"
                )
            if any(map(_is_behind, _bucket_groups(module))):
                raise _core.StateError(
                    f"model chunk {number}: its parameters may be old, because they have not "
                    "been gathered since gradients were reduced (overlap_param_gather). Before an "
                    "update, call start_param_sync(force_sync=True) of Megatron's "
                    "DistributedDataParallel, or disable_forward_pre_hook(), which calls it"
                )


def _wrapped(chunk: Module) -> Iterator[Any]:
    """The wrappers of a model, from the outermost one inwards, then the model."""
    module: Any = chunk
    while module is not None:
        yield module
        module = module._modules.get("module")


def _gathers(hook: object) -> bool:
    return getattr(hook, "__qualname__", "").startswith(_GATHERING)


def _bucket_groups(module: Any) -> Iterator[Any]:
    """The bucket groups of Megatron's DistributedDataParallel with overlap_param_gather."""
    settings = getattr(module, "ddp_config", None)
    if getattr(settings, "overlap_param_gather", False):
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            yield from getattr(module, name, ())


def _is_behind(group: Any) -> bool:
    """Whether a step may have changed a group's parameters since they were gathered, or whether a
    gathering has not ended.  A model that was not trained yet needs no gathering."""
    if getattr(group, "param_gather_handle", None) is not None:
        return True
    trained = not getattr(group, "is_first_batch", True)
    trained = trained or bool(getattr(group, "per_param_grad_ready_counts", None))
    return trained and getattr(group, "param_gather_dispatched", True) is False
