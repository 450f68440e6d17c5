"""Names that engines know run-time parameters by: those of checkpoints."""

from __future__ import annotations

from typing import Any

from wsync import _core
from wsync.families.registry import TOGETHER, Family, runtime_family
from wsync.families.rules import Expansion, ShardPlacement
from wsync.fsdp.parts import Part
from wsync.module_tensors.kept_together import group_of

_FUSED = (".experts.gate_up_proj", ".experts.down_proj")


class CheckpointNames:
    """Maps from run-time parameters to the tensors of checkpoints, which engines know."""

    def __init__(self, config: Any) -> None:
        self._family: Family | None
        self._family, self._sizes, self._kind = runtime_family(config)
        self._expansions: dict[int, Expansion] = {}

    def maps(self, part: Part) -> list[_core.Map]:
        """Where a parameter's elements go; only those maps that its regions meet."""
        found = self._family.match(part.name) if self._family is not None else None
        if self._family is None or found is None:
            self._check_fused(part)
            zeros = (0,) * len(part.shape)
            axes = tuple(range(len(part.shape)))
            group = group_of(part.name, TOGETHER)
            return [(part.name, "", part.shape, zeros, zeros, part.shape, axes, group)]
        rule, numbers = found
        if id(rule) not in self._expansions:
            self._expansions[id(rule)] = self._family.expand(rule, part.name, self._sizes)
        expansion = self._expansions[id(rule)]
        if expansion.shape != part.shape:
            raise _core.LayoutError(
                f"{part.name}: shape {part.shape} != {expansion.shape} of the configuration"
            )
        return expansion.maps(ShardPlacement(part.shape, part.regions), numbers, TOGETHER)

    def _check_fused(self, part: Part) -> None:
        """Fused experts pass as they are only where a family is known to save them so."""
        if self._family is None and part.name.endswith(_FUSED):
            known = f"the family {self._kind!r}" if self._kind else "a model without config"
            raise _core.UnsupportedError(
                f"{part.name}: experts are fused, and {known} has no rule for engines' names"
            )
