"""The short form, for notebooks and trainers of one's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync.handles.base import handles_of
from wsync.layout import TrainerLayout
from wsync.options import Options
from wsync.sync import Sync

if TYPE_CHECKING:
    import torch


def connect(
    source: TrainerLayout | Mapping[str, torch.Tensor],
    engines: Sequence[Any],
    *,
    api_key: str | None = None,
    options: Options | None = None,
) -> Sync:
    """Connects a trainer's weights to running engines.

    Args:
        source: this rank's layout (`wsync.megatron.layout`, `wsync.fsdp.layout`), or whole tensors
            by Hugging Face name.
        engines: a list of URLs, Ray actors, local engines or handles; read on rank 0 alone.
        api_key: bearer key of engines that are given as URLs.
        options: deadlines, ways of delivery, round size, pause mode.

    Returns:
        A `Sync`; `update(version=...)` replaces every weight of every engine.

    Raises:
        InvalidArgumentError, UnsupportedError: an engine that is none or is given twice, or a
            tensor that cannot be sent.
        PeerClosedError, DeadlineError: an engine does not answer; the same on every rank.
        LayoutError: the trainer ranks' layouts disagree.
    """
    chosen = Options.of(options)
    handles = functools.partial(handles_of, engines, timeout=chosen.deadline, api_key=api_key)
    return Sync(source, handles, options=chosen)
