"""Finds this rank's place in the groups that cut parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wsync.families.rules import Cut

if TYPE_CHECKING:
    from torch.nn import Module

# fields of Ranks, and the names of their groups in a pg_collection
_GROUPS = {"tensor": "tp", "expert_tensor": "expt_tp", "expert": "ep"}
ALONE = Cut()


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the groups that cut parameters."""

    tensor: Cut = ALONE
    expert_tensor: Cut = ALONE
    expert: Cut = ALONE

    @staticmethod
    def current() -> Ranks:
        """The places in parallel_state's groups; rank 0 of 1 if it is not initialised."""
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return Ranks()

        def cut(kind: str) -> Cut:
            rank = getattr(state, f"get_{kind}_parallel_rank")()
            return Cut(rank, getattr(state, f"get_{kind}_parallel_world_size")())

        return Ranks(cut("tensor_model"), cut("expert_tensor"), cut("expert_model"))

    @staticmethod
    def of(chunks: Sequence[Module]) -> Ranks:
        """The places in the groups of a language model's pg_collection (Megatron-Core 0.16).  If it
        lacks a group, the place is parallel_state's."""
        known = Ranks.current()
        for module in (module for chunk in chunks for module in chunk.modules()):
            if "share_embeddings_and_output_weights" in vars(module):
                groups = vars(module).get("pg_collection")
                own = {field: _place(groups, key) for field, key in _GROUPS.items()}
                return replace(known, **{field: cut for field, cut in own.items() if cut})
        return known


def _place(home: object, key: str) -> Cut | None:
    """This rank's place in an object's group; None if the group is missing or destroyed."""
    group: Any = getattr(home, "__dict__", {}).get(key)
    try:
        return Cut(group.rank(), group.size())
    except (AttributeError, RuntimeError):
        return None
