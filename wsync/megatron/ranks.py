"""This rank's place in the groups that cut parameters, by what modules and Megatron say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wsync.families.rules import Cut

if TYPE_CHECKING:
    from torch.nn import Module

# fields of Ranks, and the groups of a pg_collection that they are of
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
        """As Megatron's parallel_state has them; one of one where it is not initialised."""
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return Ranks()

        def cut(kind: str) -> Cut:
            rank = getattr(state, f"get_{kind}_parallel_rank")()
            return Cut(rank, getattr(state, f"get_{kind}_parallel_world_size")())

        return Ranks(cut("tensor_model"), cut("expert_tensor"), cut("expert_model"))

    @staticmethod
    def of(chunks: Sequence[Module]) -> Ranks:
        """As the groups have them that a language model was built with (its pg_collection, by
        Megatron-Core 0.16); those that it does not have are parallel_state's."""
        known = Ranks.current()
        for module in (module for chunk in chunks for module in chunk.modules()):
            if "share_embeddings_and_output_weights" in vars(module):
                groups = vars(module).get("pg_collection")
                own = {field: _place(groups, key) for field, key in _GROUPS.items()}
                return replace(known, **{field: cut for field, cut in own.items() if cut})
        return known


def _place(home: object, key: str) -> Cut | None:
    """This rank's place in a group that an object has; None: it has none, or one that is gone."""
    group: Any = getattr(home, "__dict__", {}).get(key)
    try:
        return Cut(group.rank(), group.size())
    except (AttributeError, RuntimeError):
        return None
