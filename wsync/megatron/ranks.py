"""This rank's place in the groups that cut parameters, by what modules and Megatron say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.rules import Cut
from wsync.layout import global_name

if TYPE_CHECKING:
    from torch.nn import Module

_EXPERTS = re.compile(r"\.experts(?=\.|$)")
# fields of Ranks, and the groups of a pg_collection that they are of
_GROUPS = {"tensor": "tp", "expert_tensor": "expt_tp", "expert": "ep"}
ALONE = Cut()


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the groups that cut parameters."""

    tensor: Cut = ALONE
    expert_tensor: Cut = ALONE
    expert: Cut = ALONE
    stage: int = 0

    @staticmethod
    def current() -> Ranks:
        """As Megatron's parallel_state has them; one of one where it is not initialised."""
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return Ranks()

        def cut(kind: str) -> Cut:
            rank = getattr(state, f"get_{kind}_parallel_rank")()
            return Cut(rank, getattr(state, f"get_{kind}_parallel_world_size")())

        stage = state.get_pipeline_model_parallel_rank()
        return Ranks(cut("tensor_model"), cut("expert_tensor"), cut("expert_model"), stage)

    @staticmethod
    def of(chunks: Sequence[Module]) -> Ranks:
        """As the groups have them that a language model was built with (its pg_collection, by
        Megatron-Core 0.16); those that it does not have are parallel_state's."""
        known = Ranks.current()
        for _, module in _inside_wrappers(chunks):
            if "share_embeddings_and_output_weights" in vars(module):
                groups = vars(module).get("pg_collection")
                stage = _place(groups, "pp")
                own = {field: _place(groups, key) for field, key in _GROUPS.items()}
                return replace(
                    known,
                    **{field: cut for field, cut in own.items() if cut is not None},
                    stage=known.stage if stage is None else stage.rank,
                )
        return known

    def check(self, chunks: Sequence[Module]) -> None:
        """Raises LayoutError where a module says that this rank has another place in its groups."""
        for path, module in _inside_wrappers(chunks):
            kind = "expert_tensor" if _EXPERTS.search(path) else "tensor"
            said: list[tuple[str, object, str]] = [
                (kind, module, key) for key in ("tp_group", "_tp_group")
            ]
            said.append(("expert", module, "ep_group"))
            for home in ("pg_collection", "_pg_collection"):
                if (groups := vars(module).get(home)) is not None:
                    said += [(field, groups, key) for field, key in _GROUPS.items()]
            for field, holder, key in said:
                found, known = _place(holder, key), getattr(self, field)
                if found in (None, known) or _is_whole(path, module, found):
                    continue
                raise _core.LayoutError(
                    f"{path or 'model'}: its {field.replace('_', '-')}-parallel group ({key}) has "
                    f"this rank as (rank, size) {found.rank, found.ranks}, but the language "
                    "model's pg_collection, or else Megatron's parallel_state, as "
                    f"{known.rank, known.ranks}: build all modules with one pg_collection, or "
                    "with parallel_state's groups, and have those as long as layouts are made"
                )


def _place(home: object, key: str) -> Cut | None:
    """This rank's place in a group that an object has; None: it has none, or one that is gone."""
    group: Any = getattr(home, "__dict__", {}).get(key)
    try:
        return Cut(group.rank(), group.size())
    except (AttributeError, RuntimeError):
        return None


def _is_whole(path: str, module: Module, place: Cut) -> bool:
    """Whether a module's parameters are not cut, whatever place it says.  The shape of a linear
    layer of a group of one rank agrees, but for a head's: rows that pad the vocabulary may be as
    many as other ranks have."""
    parameters, sizes = module._parameters.values(), vars(module)
    if any(getattr(each, "parallel_mode", None) == "duplicated" for each in parameters):
        return True
    if place != ALONE or path.endswith("output_layer"):
        return False
    sides = [(f"{side}_size", f"{side}_size_per_partition") for side in ("output", "input")]
    return any(part in sizes and sizes[part] == sizes.get(whole) for whole, part in sides)


def _inside_wrappers(chunks: Sequence[Module]) -> Iterator[tuple[str, Module]]:
    """(path, module) of all modules of all chunks but those that wrap a model."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if "module" not in module._modules:
                yield global_name(path), module
