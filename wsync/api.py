"""The short form, for notebooks and trainers of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync._core import InvalidArgumentError
from wsync.group import together
from wsync.handles import EngineHandle, handle
from wsync.layout import TrainerLayout, from_tensors
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
        options: deadlines, round size, pause mode.

    Returns:
        A `Sync`; `update(version=...)` replaces every weight of every engine.

    Raises:
        PeerClosedError, DeadlineError: an engine does not answer; the same on every rank.
        LayoutError: the trainer ranks' layouts disagree.
    """
    deadline = (options or Options()).exchange_deadline
    layout = (
        source
        if isinstance(source, TrainerLayout)
        else together(lambda: from_tensors(source), timeout=deadline)
    )

    def handles() -> list[EngineHandle]:
        if isinstance(engines, str):
            raise InvalidArgumentError(f"engines={engines!r}: a list is wanted, [{engines!r}]")
        return [handle(engine, api_key=api_key) for engine in engines]

    return Sync(layout, handles, options=options)
