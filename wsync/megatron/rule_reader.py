"""Turns parameters into regions and maps by the rules of a family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from wsync import _core
from wsync.families.registry import Model
from wsync.families.rules import Cut, Expansion, Piece, Rule, ShardPlacement, mtp_numbers
from wsync.megatron.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch import Tensor

    # a parameter's regions, maps, and element strides in the order of the rule's view
    Read = tuple[Sequence[_core.Region], list[_core.Map], tuple[int, ...]]

_LIMITS = (  # a number in names, the size that bounds it, the word for what it counts
    ("layer", "layers", "layer"),
    ("expert", "experts", "expert"),
    ("mtp", "mtp", "MTP layer"),
    ("inner", "block", "layer of an MTP block"),
)


class RuleReader:
    """Turns parameters into regions and maps.  Layers share the plans of equal parameters."""

    def __init__(self, spec: Model, ranks: Ranks) -> None:
        self.spec = spec
        self.ranks = ranks
        self._plans: dict[tuple[int, tuple[int, ...], bool], _Plan] = {}

    def read(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Read:
        """The regions, maps and strides of one parameter, for the layout's builder."""
        target = self.spec.family.copy_of(name)
        if target is not None and not self._has_sizes(name):
            return *self._whole(name, target, tensor, shape), strides
        rule, numbers = self.spec.family.find(name)
        for kind, size, what in _LIMITS:
            limit = self.spec.sizes.get(size)
            if kind in numbers and limit is not None and numbers[kind] >= limit:
                raise _core.LayoutError(
                    f"{name}: {what} {numbers[kind]}, but the configuration has {limit} {what}s"
                )
        if "mtp" in numbers:
            sizes = self.spec.sizes
            for size in {"layers", "block"} & {"layers", *rule.sizes}:
                if size not in sizes:
                    raise self.spec.family.lacks(name, size)
            numbers = mtp_numbers(numbers, sizes["layers"], sizes.get("block", 0))
        duplicated = getattr(tensor, "tensor_model_parallel", None) is False
        duplicated |= getattr(tensor, "parallel_mode", None) == "duplicated"
        key = (id(rule), shape, duplicated)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(rule, name, shape, duplicated)
        together = self.spec.family.together
        maps = [piece.map(numbers, together) for piece in plan.pieces]
        return plan.placement.regions, maps, strides

    def _has_sizes(self, name: str) -> bool:
        """Whether a rule matches the name and all sizes that it needs are known."""
        found = self.spec.family.match(name)
        return found is not None and found[0].sizes <= self.spec.sizes.keys()

    def _whole(
        self, name: str, target: str, tensor: Tensor, shape: tuple[int, ...]
    ) -> tuple[Sequence[_core.Region], list[_core.Map]]:
        """Regions and maps of a parameter that is whole on every tensor-parallel rank."""
        if self.ranks.tensor.ranks > 1 and getattr(tensor, "tensor_model_parallel", False):
            raise _core.LayoutError(
                f"{name}: tensor_model_parallel is True, but the family "
                f"{self.spec.family.name!r} needs it whole on every rank"
            )
        start = (0,) * len(shape)
        axes = tuple(range(len(shape)))
        return [(start, shape, start)], [(target, "", shape, start, start, shape, axes, 0)]

    def _cut(self, rule: Rule, name: str, shape: tuple[int, ...]) -> Cut:
        cut = self.ranks.expert_tensor if ".mlp.experts." in rule.name else self.ranks.tensor
        axis = rule.shaped_dimension
        if axis < 0 or len(shape) <= axis or not shape[axis]:
            return cut
        whole = self._expand(rule, name, shape, 1).shape[axis]
        parts, rest = divmod(whole, shape[axis])
        if rest or not parts or cut.ranks % parts:
            return cut
        return Cut(cut.rank * parts // cut.ranks, parts)

    def _plan(self, rule: Rule, name: str, shape: tuple[int, ...], duplicated: bool) -> _Plan:
        cut = self._cut(rule, name, shape)
        expansion = self._expand(rule, name, shape, cut.ranks)
        try:
            for place in (ALONE, cut) if duplicated else (cut,):
                share = expansion.place(place, self.ranks.expert)
                if shape == share.shape:
                    return _Plan(share, [p for p in expansion.pieces if share.meets(p)])
        except _core.LayoutError as error:
            raise _core.LayoutError(f"{name}: shape {expansion.shape}: {error}") from None
        kind = "expert-tensor" if ".mlp.experts." in rule.name else "tensor"
        raise _core.LayoutError(
            f"{name}: local shape {shape} != {share.shape}, the share of the whole "
            f"{expansion.shape} over {cut.ranks} {kind}-parallel ranks "
            f"({self.spec.words(rule.sizes)})"
        )

    def _expand(self, rule: Rule, name: str, shape: tuple[int, ...], ranks: int) -> Expansion:
        """The rule with this model's sizes; an inferred axis gets the rest of its dimension."""
        found = self.spec.family.expand(rule, name, self.spec.sizes)
        dimension = rule.inferred_dimension
        if dimension < 0 or len(shape) <= dimension:
            return found
        ranks = ranks if rule.inferred_cut else 1
        inferred = rule.inferred(self.spec.sizes, shape[dimension] * ranks)
        if inferred is None:
            raise _core.LayoutError(
                f"{name}: local shape {shape} over {ranks} tensor-parallel ranks has "
                f"{shape[dimension] * ranks} rows, which is less than the configuration's "
                f"{found.shape[dimension]}, or not a multiple "
                f"({self.spec.words(rule.sizes)})"
            )
        return rule.expand(self.spec.sizes, inferred)


class _Plan(NamedTuple):
    """The placement and pieces that all parameters with one rule and shape share on this rank."""

    placement: ShardPlacement
    pieces: list[Piece]
