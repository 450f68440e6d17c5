"""Rules: where the elements of an unsharded Megatron parameter lie in Hugging Face tensors.

A rule names a parameter and its axes.  For each target tensor it names the same axes, in that
tensor's own order:

    Rule("decoder.layers.{layer}.self_attention.linear_qkv.weight",
         "*(g (n | k:1 | v:1) d) h",
         Target("model.layers.{layer}.self_attn.q_proj.weight", "(g n d) h"),
         Target("model.layers.{layer}.self_attn.k_proj.weight", "(g k d) h"),
         Target("model.layers.{layer}.self_attn.v_proj.weight", "(g v d) h"))

Grammar of a view:
    view    dimensions, separated by spaces, outermost first
    item    `name` or `name:size` or a group; `size` is a number, the name of a size (default:
            the axis's own name), a sum of both, or `?`: inferred from the parameter (at most
            one in a view)
    group   `(a b)` is one dimension that counts through a and b, b fastest;
            `(a b | c)` is the elements of (a b) followed by those of c
    *item   tensor-parallel ranks (for experts: expert-tensor-parallel ranks) hold equal parts of
            the item; in a group, each item of each alternative may be cut
    ~item   like *item, but the local shape tells the number of parts: from one for each rank
            down to one for all; if there are fewer parts than ranks, neighbouring ranks hold
            the same part (at most one ~item in a view)
    @item   expert-parallel ranks hold equal parts of the item

An axis may occur in several alternatives of a group, but only once in each: `(key q | key k)`.

A target's view repeats names of the rule's view, without sizes and marks.  Each dimension of the
target takes elements of one dimension of the parameter.  If the parameter's name holds {expert},
the target may also have a dimension `expert`: its length is the number of experts, and the
parameter fills the index of its expert.  Each alternative of the parameter must go to some target,
unless it contains an axis called `pad`.  If a target's *name* holds a dimension of the rule in
braces, each index of that dimension goes to a tensor of its own.

In a parameter's name `(a|b)` matches a or b.  `{layer}`, `{expert}`, `{mtp}`, `{inner}` and
`{vision}` (a vision tower's layer) match numbers.  In the targets of a rule with {mtp}, {layer}
counts on from the model's last layer.  If an MTP layer is a block of `block` layers, {inner} counts
the layers of all blocks; {first} and {last} are the first and the last layer of this block.

A rule expands to boxes, which may take every n-th index of a target's dimension.  Elements are
copied.  If a target has an offset, each element becomes x + offset, computed in float32.  Later the
boxes are combined with a rank's regions, which are its parts of the unsharded parameter.  A local
shard is never reshaped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from wsync import _core
from wsync.boxes import overlap
from wsync.module_tensors.names import group_of
from wsync.probing.boxes import LONGEST, NumberedBox, boxes

if TYPE_CHECKING:
    from torch import Tensor

PAD = "pad"
INFERRED = "?"
MAX_DIMENSIONS = 6

_TOKEN = re.compile(r"([*~@]?)(?:([a-z_]\w*)(?::(\w+(?:\+\w+)*|\?))?|([(|)]))")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
_EITHER = re.compile(r"\(([^)]*)\)")
_ENDS = ("inner", "first", "last")  # numbers that follow from the size of an MTP block
_COUNTS = {"expert": "experts"}  # numbers that may be axes of targets, and the sizes of these axes
_Shape = tuple[int, ...]
# Sets of sibling modules, by the last part of their names; engines need their tensors in one call.
Together = Sequence[tuple[str, ...]]


class RuleError(_core.InvalidArgumentError):
    """A rule is invalid: its grammar is wrong, or its axes and its targets' axes do not agree."""


@dataclass(frozen=True)
class _Item:
    """An axis, or a group of alternatives."""

    mark: str
    name: str = ""
    size: str = ""
    alternatives: tuple[tuple[_Item, ...], ...] = ()


class _View:
    """A parsed view: an item for each dimension, and the sizes of axes by their names."""

    def __init__(self, text: str) -> None:
        self.text = text
        tokens = _TOKEN.finditer(text)
        alternatives = _alternatives(tokens)
        known = len(_TOKEN.sub("", text).strip()) == 0 and text.count("?") < 2 > text.count("~")
        known = known and next(tokens, None) is None  # a ")" without its "(" ends a view early
        if len(alternatives) > 1 or not known or text.count("(") != text.count(")"):
            raise RuleError(f"{text!r} is not a valid view: see wsync.families.rules")
        self.items = alternatives[0]
        self.sizes: dict[str, str] = {}
        for axis in axes_of(self.items):
            if self.sizes.setdefault(axis.name, axis.size) != axis.size:
                raise RuleError(f"view {text!r}: axis {axis.name!r} has two sizes")


def _alternatives(tokens: Iterator[re.Match[str]]) -> tuple[tuple[_Item, ...], ...]:
    """The alternatives up to the end of a group."""
    found: list[list[_Item]] = [[]]
    for token in tokens:
        mark, name, size, sign = token.groups()
        if name:
            found[-1].append(_Item(mark, name, size or name))
        elif sign == "(":
            found[-1].append(_Item(mark, alternatives=_alternatives(tokens)))
        elif sign == ")":
            break
        else:
            found.append([])
    return tuple(map(tuple, found))


def _within(items: Iterable[_Item]) -> Iterator[_Item]:
    """All items, including those inside groups."""
    for item in items:
        yield item
        yield from _within(itertools.chain.from_iterable(item.alternatives))


def axes_of(items: Iterable[_Item]) -> Iterator[_Item]:
    return (item for item in _within(items) if item.name)


@dataclass(frozen=True)
class Cut:
    """This rank's place among the ranks that share a parameter."""

    rank: int = 0
    ranks: int = 1


class _Dimension:
    """One dimension of a parameter.  Each element has a number, computed from its indices.

    text: how errors name the parameter.
    """

    def __init__(self, text: str, item: _Item, sizes: Mapping[str, int]) -> None:
        self.item, self._text, self._sizes = item, text, sizes
        self.units: dict[str, int] = {}
        unit = 1
        for axis in axes_of([item]):
            if axis.name not in self.units:
                self.units[axis.name] = unit
                unit *= sizes[axis.name] + 1
        self._numbers = self._of(item, {})
        self.size = len(self._numbers)

    def _of(self, item: _Item, cuts: Mapping[str, Cut]) -> Tensor:
        """The numbers of an item's elements, in order."""
        import torch

        if item.name:
            found = torch.arange(1, self._sizes[item.name] + 1, device="cpu")
            found *= self.units[item.name]
        else:
            found = torch.cat([self._product(each, cuts) for each in item.alternatives])
        cut = cuts.get(item.mark, Cut())
        share, rest = divmod(len(found), cut.ranks)
        if rest:
            raise _core.LayoutError(
                f"an axis of {len(found)} elements cannot be cut over {cut.ranks} ranks "
                f"({self._text})"
            )
        return found[share * cut.rank :][:share]

    def _product(self, items: Iterable[_Item], cuts: Mapping[str, Cut]) -> Tensor:
        import torch

        found = torch.zeros(1, dtype=torch.int64, device="cpu")
        for item in items:
            found = (found[:, None] + self._of(item, cuts)).flatten()
        return found

    def places(self, item: _Item, cuts: Mapping[str, Cut] | None = None) -> Tensor:
        """The places of an item's elements, in order; with cuts, only those that a rank holds."""
        import torch

        numbers = self._of(item, cuts or {})
        ordered, order = self._numbers.sort()
        found = torch.searchsorted(ordered, numbers).clamp(max=max(0, self.size - 1))
        if not torch.equal(ordered[found], numbers):
            axes = sorted({axis.name for axis in axes_of([item])})
            raise RuleError(
                f"{self._text}: a target asks for axes {axes}, which no alternative has"
            )
        return order[found]

    def left(self, taken: Iterable[Tensor]) -> bool:
        """Whether any elements remain besides the taken places and padding."""
        import torch

        left = torch.ones(self.size, dtype=torch.bool, device="cpu")
        if PAD in self.units:
            left = self._numbers // self.units[PAD] % (self._sizes[PAD] + 1) == 0
        for places in taken:
            left[places] = False
        return bool(left.any())


def _runs(places: Tensor, longest: int) -> Sequence[NumberedBox]:
    """Boxes along one dimension of a target; a box's number is its first place in the source."""
    return [*boxes(lambda _, low, high: places[low:high, None], places.shape, {1: 0}, longest)]


@dataclass(frozen=True)
class Target:
    """A Hugging Face tensor that takes elements of a parameter and adds `offset`."""

    name: str
    view: str
    offset: float = 0.0


@dataclass(frozen=True)
class Piece:
    """A box of the unsharded parameter and the box of a target tensor that it fills.

    `axes`: for each axis of the target, the parameter's axis, or -1 if the extent is 1.
    `steps`: for each axis of the target, the distance between neighbouring elements of the box.
    `counted`: pairs of a number in the parameter's name and an axis of the target.  The number is
    added to `target_start`.  `affine`: (scale, offset), or None if elements are only copied.
    """

    name: str
    shape: tuple[int, ...]
    target_start: tuple[int, ...]
    source_start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...]
    counted: tuple[tuple[str, int], ...] = ()
    affine: tuple[float, float] | None = None

    def map(self, numbers: Mapping[str, int], together: Together = ()) -> _core.Map:
        """The piece as a map of the parameter whose name holds these numbers."""
        start = list(self.target_start)
        for number, axis in self.counted:
            start[axis] += numbers[number]
        name = self.name.format(**numbers)
        place = (name, "", self.shape, tuple(start), self.source_start, self.extent, self.axes)
        group = group_of(name, together)
        affine = self.affine or (0.0, 0.0)
        if max(self.steps, default=1) > 1:
            return (*place, group, *affine, self.steps)
        return (*place, group) if self.affine is None else (*place, group, *affine)

    def stacked(self, index: int, count: int) -> Piece:
        """The same piece, with the target at `index` of a tensor that stacks `count` targets."""
        return replace(
            self,
            shape=(count, *self.shape),
            target_start=(index, *self.target_start),
            extent=(1, *self.extent),
            axes=(-1, *self.axes),
            steps=(1, *self.steps),
        )

    def source_box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, extent) in the unsharded parameter."""
        extent = [1] * len(self.source_start)
        for axis, count in zip(self.axes, self.extent, strict=True):
            if axis >= 0:
                extent[axis] = count
        return self.source_start, tuple(extent)


@dataclass(frozen=True)
class ShardPlacement:
    """What a rank holds: the shape of its tensor and (start, extent, local start) of each box."""

    shape: tuple[int, ...]
    regions: tuple[_core.Region, ...]

    @staticmethod
    def of(shape: _Shape, held: Sequence[Sequence[_Shape]]) -> ShardPlacement:
        """held: for each dimension, (start, extent, local start) of the parts in the tensor."""
        regions = []
        for choice in itertools.product(*held):
            start, extent, local = (tuple(part[n] for part in choice) for n in range(3))
            regions.append((start, extent, local))
        return ShardPlacement(shape, tuple(regions))

    def meets(self, piece: Piece) -> bool:
        box = piece.source_box()
        regions = ((tuple(start), tuple(extent)) for start, extent, _ in self.regions)
        return any(overlap(box, region) for region in regions)


def may_step(pieces: Iterable[Piece]) -> bool:
    """Whether all boxes along a dimension have the same step, and the step divides the dimension.
    Such a step splits the dimension into two; a tensor may have MAX_DIMENSIONS in all."""
    found: dict[tuple[str, int], int] = {}
    for piece in pieces:
        for axis, (step, extent) in enumerate(zip(piece.steps, piece.extent, strict=True)):
            if step > 1 < extent and found.setdefault((piece.name, axis), step) != step:
                return False
            if step > 1 < extent and piece.shape[axis] % step:
                return False
        if len(piece.shape) + sum(name == piece.name for name, _ in found) > MAX_DIMENSIONS:
            return False
    return True


class Expansion:
    """A rule with all sizes known."""

    def __init__(self, rule: Rule, sizes: Mapping[str, int]) -> None:
        self.rule = rule
        numbers = (_Item("", name) for name in rule.counted)
        text = f"{rule.name}: {rule.parsed.text}"
        self._all = [_Dimension(text, item, sizes) for item in (*rule.parsed.items, *numbers)]
        self._dimensions = self._all[: len(rule.parsed.items)]
        self.shape = tuple(each.size for each in self._dimensions)

    def place(self, tensor: Cut, expert: Cut | None = None) -> ShardPlacement:
        """The share of a rank.  Raises LayoutError if an axis cannot be cut into equal parts."""
        cuts = {"*": tensor, "~": tensor, "@": expert or Cut()}
        shape: list[int] = []
        held: list[list[_Shape]] = []
        for each in self._dimensions:
            places = each.places(each.item, cuts)
            shape.append(len(places))
            held.append([(box.number, *box.extent, *box.start) for box in _runs(places, 1)])
        return ShardPlacement.of(tuple(shape), held)

    def maps(
        self, placement: ShardPlacement, numbers: Mapping[str, int], together: Together = ()
    ) -> list[_core.Map]:
        """The maps of a share's elements.  numbers: the numbers in the parameter's name."""
        return [piece.map(numbers, together) for piece in self.pieces if placement.meets(piece)]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Boxes from the parameter to its targets; names still hold {layer} and {expert}."""
        taken = [self._taken(target) for target in self.rule.targets]
        for number, dimension in enumerate(self._dimensions):
            if dimension.left(each[number] for each in taken if number in each):
                raise RuleError(
                    f"{self.rule.name}: dimension {number} of {self.rule.parsed.text!r} has "
                    "elements that no target takes"
                )
        pieces: tuple[Piece, ...] = ()
        for longest in (LONGEST, 1):
            targets = zip(self.rule.targets, taken, strict=True)
            pieces = tuple(piece for each in targets for piece in self._pieces(*each, longest))
            if may_step(pieces):
                break
        return pieces

    def _taken(self, target: Target) -> dict[int, Tensor]:
        """The places that a target takes in each dimension of the parameter.  A number in the
        parameter's name counts as a further dimension.  The dimensions of the target's view come
        first, then those in the target's name."""
        found: dict[int, Tensor] = {}
        for item in _View(target.view).items:
            names = {axis.name for axis in axes_of([item])}
            known = (n for n, each in enumerate(self._all) if names <= each.units.keys())
            number = next((n for n in known if n not in found), -1)
            if number < 0:
                raise RuleError(
                    f"{self.rule.name}: {target.view!r} asks for axes {sorted(names)}, which no "
                    f"dimension of {self.rule.parsed.text!r} has"
                )
            found[number] = self._all[number].places(item)
        for number, each in enumerate(self._dimensions):
            if f"{{{each.item.name}}}" in target.name:
                found[number] = each.places(each.item)
        return found

    def _pieces(self, target: Target, taken: Mapping[int, Tensor], longest: int) -> Iterator[Piece]:
        """Boxes that go to one target, or to one tensor for each index in the target's name."""
        count, numbers = len(_View(target.view).items), len(self.shape)
        own, named = list(taken)[:count], list(taken)[count:]
        shape = tuple(len(taken[number]) for number in own)
        counted = tuple(
            (self._all[number].item.name, axis)
            for axis, number in enumerate(own)
            if number >= numbers
        )
        runs = [_runs(taken[n] if n < numbers else taken[n][:1], longest) for n in own]
        runs += [[run for place in taken[n] for run in _runs(place[None], 1)] for n in named]
        for choice in itertools.product(*runs):
            source = {number: run.number for number, run in zip(taken, choice, strict=True)}
            name = target.name
            for number in named:
                place = f"{{{self._dimensions[number].item.name}}}"
                name = name.replace(place, str(source[number]))
            boxes = choice[:count]
            yield Piece(
                name,
                shape,
                tuple(run.start[0] for run in boxes),
                tuple(source[number] for number in range(numbers)),
                tuple(run.extent[0] for run in boxes),
                tuple(n if run.axes[0] == 0 else -1 for n, run in zip(own, boxes, strict=True)),
                tuple(run.steps[0] for run in boxes),
                counted,
                (1.0, target.offset) if target.offset else None,
            )


class Rule:
    """How one kind of Megatron parameter maps to Hugging Face tensors.

    `inferred_dimension`: the dimension of the parameter that holds the inferred axis; -1 if none
    does.
    `inferred_cut`: whether ranks hold parts of that dimension.  `shaped_dimension`: the dimension
    that is a ~item; -1 if none is.  `sizes`: the names of the sizes that the rule needs.
    `counted`: the numbers in the name that are axes of targets.  `names`: all names that the rule
    matches.
    """

    def __init__(self, name: str, view: str, *targets: Target) -> None:
        self.name = name
        self.targets = targets
        self._read(view)
        parts = [part.split("|") for part in _EITHER.split(name)]
        self.names = tuple(map("".join, itertools.product(*parts)))

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        number = re.compile(r"\\{(\w+)\\}")
        return [re.compile(number.sub(r"(?P<\1>\\d+)", re.escape(each))) for each in self.names]

    def _read(self, view: str) -> None:
        self.parsed = _View(view)
        items = self.parsed.items
        unknown = (any(axis.size == INFERRED for axis in axes_of([item])) for item in items)
        self.inferred_dimension = next((n for n, each in enumerate(unknown) if each), -1)
        inferred = items[self.inferred_dimension :][: self.inferred_dimension >= 0]
        self.inferred_cut = any(item.mark in ("*", "~") for item in _within(inferred))
        self.shaped_dimension = next((n for n, item in enumerate(items) if item.mark == "~"), -1)
        parts = {part for size in self.parsed.sizes.values() for part in size.split("+")}
        named = {key for target in self.targets for key in PLACEHOLDER.findall(target.name)}
        numbers = set(PLACEHOLDER.findall(self.name))
        known = {*numbers, *self.parsed.sizes, *(("layer", *_ENDS) if "mtp" in numbers else ())}
        if strange := sorted(named - known):
            raise RuleError(f"{self.name}: targets' names use {strange}, which the rule lacks")
        parts |= {"block"} if named.intersection(_ENDS) else set()
        self.sizes = frozenset(part for part in parts if part != INFERRED and not part.isdigit())
        wanted = {axis for target in self.targets for axis in _View(target.view).sizes}
        self.counted = sorted(numbers & _COUNTS.keys() & wanted - self.parsed.sizes.keys())

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers that a global parameter name holds; None if the rule does not match it."""
        match = next((m for each in self._patterns if (m := each.fullmatch(name))), None)
        return None if match is None else {k: int(v) for k, v in match.groupdict().items()}

    def inferred(self, sizes: Mapping[str, int], extent: int) -> int | None:
        """The size of the inferred axis that gives its dimension this extent; None if no size
        does."""
        empty, unit = (self.expand(sizes, n).shape[self.inferred_dimension] for n in (0, 1))
        found, rest = divmod(extent - empty, max(1, unit - empty))
        return found if rest == 0 and found >= 0 else None

    def expand(self, sizes: Mapping[str, int], inferred: int = 0) -> Expansion:
        """Fixes the sizes of all axes.  Raises KeyError with the name of a size that is missing."""
        known = {number: sizes[_COUNTS[number]] for number in self.counted}
        for axis, size in self.parsed.sizes.items():
            parts = ("0",) if size == INFERRED else size.split("+")
            known[axis] = sum(int(p) if p.isdigit() else sizes[p] for p in parts)
            known[axis] += inferred if size == INFERRED else 0
        return Expansion(self, known)


def mtp_numbers(numbers: Mapping[str, int], layers: int, block: int) -> dict[str, int]:
    """The numbers in an MTP parameter's name, and those that its targets' names need."""
    first = numbers["mtp"] * block
    counted = {"layer": layers + numbers["mtp"], "first": first, "last": first + block - 1}
    return {**numbers, **counted, "inner": first + numbers.get("inner", 0)}
