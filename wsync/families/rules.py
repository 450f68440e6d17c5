"""Rules: where the elements of an unsharded Megatron parameter lie in Hugging Face tensors.

A rule names a parameter, writes its axes down, and writes the axes of each target tensor down in
that tensor's own order:

    Rule("decoder.layers.{layer}.self_attention.linear_qkv.weight",
         "*(g (n | k:1 | v:1) d) h",
         Target("model.layers.{layer}.self_attn.q_proj.weight", "(g n d) h"),
         Target("model.layers.{layer}.self_attn.k_proj.weight", "(g k d) h"),
         Target("model.layers.{layer}.self_attn.v_proj.weight", "(g v d) h"))

Grammar of a view:
    view    dimensions, separated by spaces, outermost first
    item    `name` or `name:size` or a group; `size` is a number, the name of a size (default:
            the axis's own name), a sum of those, or `?`: inferred from the parameter (at most
            one in a view)
    group   `(a b)` is one dimension that counts through a and b, b fastest;
            `(a b | c)` is the elements of (a b) followed by those of c
    *item   tensor-parallel ranks (expert-tensor-parallel ones for experts) hold equal parts of
            it; inside a group each item may be cut, in each alternative
    ~item   the same, but the local shape says into how many parts it is cut, from one for each
            rank down to one for all; ranks next to each other then hold the same part
    @item   expert-parallel ranks hold equal parts of it

An axis may be in several alternatives of a group, once in each: `(key q | key k)`.

A target's view repeats names of the rule's view, without sizes and marks.  There `expert` is also
an axis where the parameter's name holds {expert}: the parameter fills that index of it, and the
axis is as long as there are experts.  Each alternative of the
parameter must go to some target; only an alternative that contains an axis called `pad` may stay
behind.  An axis of the rule that a target's *name* mentions in braces gives one tensor for each
of its indices.  `{layer}`, `{expert}`, `{mtp}`, `{inner}` and `{vision}` (a vision tower's layer)
stand for numbers that the parameter's name holds.  In the targets of a rule with {mtp}, {layer}
counts on from the model's last layer; where an MTP layer is a block of `block` layers, {inner}
counts those of all MTP layers, and {first} and {last} are the ends of this one.

A rule expands to boxes, which may take every so many-th index of a target's dimension.  Their
elements are copied; where a target has an offset, each element is x + offset, computed in
float32.  What a rank holds of the unsharded parameter (its regions) is composed with these boxes
later: a local shard is never reshaped.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from wsync import _core
from wsync.module_tensors.kept_together import group_of

PAD = "pad"
INFERRED = "?"
MAX_DIMENSIONS = 6

_TOKEN = re.compile(r"\w+|\S")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NUMBERED = ("layer", "expert", "mtp", "inner", "vision")
_ENDS = ("first", "last")  # more of them, which the number of a block of MTP layers tells
_COUNTS = {"expert": "experts"}  # numbers that may be axes of targets, and their sizes
_Shape = tuple[int, ...]
# Sets of modules, by the last part of their names, whose tensors engines take in one call only.
Together = Sequence[tuple[str, ...]]


class RuleError(_core.InvalidArgumentError):
    """A rule that cannot mean anything: wrong grammar, axes that go nowhere or come twice."""


@dataclass(frozen=True)
class _Axis:
    name: str
    size: str
    mark: str = ""


@dataclass(frozen=True)
class _Group:
    alternatives: tuple[tuple[_Item, ...], ...]
    mark: str = ""


_Item = _Axis | _Group


class _Parser:
    """Turns the text of one view into items, one per dimension."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: deque[str] = deque([*_TOKEN.findall(text), ""])

    def error(self, what: str) -> RuleError:
        return RuleError(f"view {self.text!r}: {what}")

    def take(self, *wanted: str) -> str:
        """The next token, if it is one of these (none given: whatever it is), else ""."""
        token = self.tokens[0]
        if token and (not wanted or token in wanted):
            return self.tokens.popleft()
        return ""

    def view(self) -> tuple[_Item, ...]:
        items = self.items()
        if self.tokens[0]:
            raise self.error(f"unexpected {self.tokens[0]!r}")
        return items

    def items(self) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while self.tokens[0] not in ("", ")", "|"):
            items.append(self.item())
        return tuple(items)

    def item(self) -> _Item:
        mark = self.take("*", "~", "@")
        if self.take("("):
            alternatives = [self.items()]
            while self.take("|"):
                alternatives.append(self.items())
            if not self.take(")"):
                raise self.error("a group is not closed")
            if not all(alternatives):
                raise self.error("an alternative is empty")
            return _Group(tuple(alternatives), mark)
        name = self.take()
        if not re.fullmatch(r"[a-z_]\w*", name):
            raise self.error(f"{name!r} is not the name of an axis")
        return _Axis(name, self.size() if self.take(":") else name, mark)

    def size(self) -> str:
        parts = [self.take()]
        while self.take("+"):
            parts.append(self.take())
        if not all(re.fullmatch(r"\w+", part) for part in parts) and parts != [INFERRED]:
            raise self.error(f"{'+'.join(parts)!r} is not a size")
        return "+".join(parts)


def _within(items: Iterable[_Item]) -> Iterator[_Item]:
    """All items, also those inside groups."""
    for item in items:
        yield item
        if isinstance(item, _Group):
            yield from _within(itertools.chain.from_iterable(item.alternatives))


def _axes(items: Iterable[_Item]) -> Iterator[_Axis]:
    return (item for item in _within(items) if isinstance(item, _Axis))


@dataclass(frozen=True)
class _Step:
    """One axis in one dimension of a tensor: index i adds i * stride to the coordinate."""

    dimension: int
    stride: int
    size: int


@dataclass(frozen=True)
class _Branch:
    """One choice of alternatives: a dense box of the index space of its axes."""

    origin: tuple[int, ...]  # coordinate of index 0 of every axis
    steps: Mapping[str, _Step]

    def at(self, chosen: Mapping[str, int]) -> _Shape:
        """The coordinate where some axes have these indices, and the others 0."""
        found = list(self.origin)
        for axis in self.steps.keys() & chosen.keys():
            found[self.steps[axis].dimension] += chosen[axis] * self.steps[axis].stride
        return tuple(found)


class _View:
    """A parsed view: sizes, branches and parts once the sizes of its axes are known."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.items = _Parser(text).view()
        sizes: dict[str, str] = {}
        for axis in _axes(self.items):
            if sizes.setdefault(axis.name, axis.size) != axis.size:
                raise RuleError(f"view {text!r}: axis {axis.name!r} has two sizes")
        self.names = frozenset(sizes)

    def size(self, item: _Item, sizes: Mapping[str, int]) -> int:
        if isinstance(item, _Axis):
            return sizes[item.name]
        return sum(self._product(alternative, sizes) for alternative in item.alternatives)

    def _product(self, items: Sequence[_Item], sizes: Mapping[str, int]) -> int:
        return math.prod(self.size(item, sizes) for item in items)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(self.size(item, sizes) for item in self.items)

    def branches(self, sizes: Mapping[str, int]) -> list[_Branch]:
        """All choices of alternatives that hold at least one element."""
        choices = [
            list(self._choices(item, dimension, 1, sizes))
            for dimension, item in enumerate(self.items)
        ]
        found = []
        for choice in itertools.product(*choices):
            steps = self._joined(part for _, part in choice)
            if all(step.size > 0 for step in steps.values()):
                found.append(_Branch(tuple(origin for origin, _ in choice), steps))
        return found

    def _choices(
        self, item: _Item, dimension: int, stride: int, sizes: Mapping[str, int]
    ) -> Iterator[tuple[int, dict[str, _Step]]]:
        """(offset, steps) of every choice of alternatives inside one item, whose elements are
        `stride` apart."""
        if isinstance(item, _Axis):
            yield 0, {item.name: _Step(dimension, stride, sizes[item.name])}
            return
        base = 0
        for alternative in item.alternatives:
            inner, options = stride, []
            for part in reversed(alternative):
                options.append(list(self._choices(part, dimension, inner, sizes)))
                inner *= self.size(part, sizes)
            for choice in itertools.product(*options):
                steps = self._joined(part for _, part in choice)
                yield base + sum(offset for offset, _ in choice), steps
            base += inner

    def _joined(self, parts: Iterable[dict[str, _Step]]) -> dict[str, _Step]:
        found: dict[str, _Step] = {}
        for part in parts:
            if twice := found.keys() & part.keys():
                raise RuleError(f"view {self.text!r}: axis {min(twice)!r} occurs twice")
            found |= part
        return found

    def parts(
        self, item: _Item, sizes: Mapping[str, int], cuts: Mapping[str, Cut]
    ) -> list[tuple[int, int]]:
        """(start, extent) of what a rank holds of one dimension, in the rank's own order."""
        size = self.size(item, sizes)
        if item.mark:
            cut = cuts[item.mark]
            if size % cut.ranks:
                raise _core.LayoutError(
                    f"an axis of {size} elements cannot be cut over {cut.ranks} ranks "
                    f"(view {self.text!r})"
                )
            share = size // cut.ranks
            return [(share * cut.rank, share)]
        if isinstance(item, _Axis):
            return [(0, size)]
        found: list[tuple[int, int]] = []
        base = 0
        for alternative in item.alternatives:
            held = [(0, 1)]
            for part in alternative:
                held = self._inside(held, part, sizes, cuts)
            found += [(base + start, extent) for start, extent in held]
            base += self._product(alternative, sizes)
        return found

    def _inside(
        self,
        outer: Sequence[tuple[int, int]],
        item: _Item,
        sizes: Mapping[str, int],
        cuts: Mapping[str, Cut],
    ) -> list[tuple[int, int]]:
        """What a rank holds of the elements that an item has in each of these outer ones."""
        size, parts = self.size(item, sizes), self.parts(item, sizes, cuts)
        if parts == [(0, size)]:
            return [(start * size, extent * size) for start, extent in outer]
        return [
            (index * size + first, count)
            for start, extent in outer
            for index in range(start, start + extent)
            for first, count in parts
        ]


@dataclass(frozen=True)
class Cut:
    """This rank's place among the ranks that share a parameter."""

    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Target:
    """A Hugging Face tensor that takes elements of a parameter, plus `offset`."""

    name: str
    view: str
    offset: float = 0.0


@dataclass(frozen=True)
class Piece:
    """A box of the unsharded parameter and the box of a target tensor that it fills.

    `axes`: the parameter's axis of each axis of the target, or -1 where the extent is 1.
    `steps`: of the target's index along each of its axes, from one element of the box to the next.
    `counted`: (number in the parameter's name, axis of the target, stride): what the number adds
    to `target_start`.  `affine`: (scale, offset), or None where elements stay as they are.
    """

    name: str
    shape: tuple[int, ...]
    target_start: tuple[int, ...]
    source_start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...]
    counted: tuple[tuple[str, int, int], ...] = ()
    affine: tuple[float, float] | None = None

    def map(self, numbers: Mapping[str, int], together: Together = ()) -> _core.Map:
        """The piece of one parameter, whose name holds these numbers."""
        start = self.target_start
        for number, axis, stride in self.counted:
            start = (*start[:axis], start[axis] + numbers[number] * stride, *start[axis + 1 :])
        name = self.name.format(**numbers)
        place = (name, "", self.shape, start, self.source_start, self.extent, self.axes)
        group = group_of(name, together)
        affine = self.affine or (0.0, 0.0)
        if max(self.steps, default=1) > 1:
            return (*place, group, *affine, self.steps)
        return (*place, group) if self.affine is None else (*place, group, *affine)

    def stacked(self, index: int, count: int) -> Piece:
        """The same piece where the target is one of so many in a tensor."""
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

    def meets(self, piece: Piece) -> bool:
        start, extent = piece.source_box()
        return any(
            all(
                a < b + n and b < a + m
                for a, m, b, n in zip(start, extent, where, count, strict=True)
            )
            for where, count, _ in self.regions
        )


def regions_of(
    held: Sequence[Sequence[tuple[int, int]]],
) -> tuple[tuple[_Shape, _Shape, _Shape], ...]:
    """The boxes of a parameter that a local tensor consists of.

    held: for each dimension, (start, extent) of what the tensor has of it, in its own order.
    """
    local: list[list[tuple[int, int, int]]] = []
    for parts in held:
        joined: list[tuple[int, int, int]] = []
        for start, extent in parts:
            if joined and sum(joined[-1][:2]) == start:
                first, count, at = joined[-1]
                joined[-1] = (first, count + extent, at)
            elif extent:
                joined.append((start, extent, sum(count for _, count, _ in joined)))
        local.append(joined)
    return tuple(
        (tuple(c[0] for c in choice), tuple(c[1] for c in choice), tuple(c[2] for c in choice))
        for choice in itertools.product(*local)
    )


class Expansion:
    """A rule with all sizes known."""

    def __init__(self, rule: Rule, sizes: Mapping[str, int]) -> None:
        self.rule = rule
        self._sizes = sizes
        self._view = rule.parsed
        self.shape = self._view.shape(sizes)

    def place(self, tensor: Cut, expert: Cut | None = None) -> ShardPlacement:
        """The share of a rank; raises LayoutError if an axis does not divide."""
        cuts = {"*": tensor, "~": tensor, "@": expert or Cut()}
        dimensions = [self._view.parts(item, self._sizes, cuts) for item in self._view.items]
        shape = tuple(sum(extent for _, extent in parts) for parts in dimensions)
        return ShardPlacement(shape, regions_of(dimensions))

    def maps(
        self, placement: ShardPlacement, numbers: Mapping[str, int], together: Together = ()
    ) -> list[_core.Map]:
        """Where the elements of a share go; numbers: those in the parameter's name."""
        return [piece.map(numbers, together) for piece in self.pieces if placement.meets(piece)]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Boxes from the parameter to its targets; names still hold {layer} and {expert}."""
        sources = self._view.branches(self._sizes)
        claimed = {i for i, branch in enumerate(sources) if PAD in branch.steps}
        pieces: list[Piece] = []
        for stepping in (True, False):
            pieces = []
            for target in self.rule.targets:
                pieces += self._pieces(target, sources, claimed, stepping)
            if may_step(pieces):
                break
        for index, source in enumerate(sources):
            if index not in claimed:
                raise RuleError(
                    f"{self.rule.name}: no target takes the axes {sorted(source.steps)} of "
                    f"{self._view.text!r}"
                )
        return tuple(pieces)

    def _pieces(
        self, target: Target, sources: Sequence[_Branch], claimed: set[int], stepping: bool
    ) -> Iterator[Piece]:
        """Boxes that go to one target; adds the alternatives that they come from to `claimed`."""
        view = _View(target.view)
        named = _PLACEHOLDER.findall(target.name)
        each = [name for name in named if name not in (*_NUMBERED, *_ENDS)]
        sizes = {name: self._sizes[name] for name in view.names}
        shape = view.shape(sizes)
        for branch in view.branches(sizes):
            wanted = branch.steps.keys() - self.rule.counted | set(each)
            index = next(
                (i for i, source in enumerate(sources) if source.steps.keys() == wanted), None
            )
            if index is None:
                raise RuleError(
                    f"{self.rule.name}: {target.view!r} asks for axes {sorted(wanted)}, "
                    f"which no alternative of {self._view.text!r} has"
                )
            claimed.add(index)
            numbers = self.rule.counted
            yield from _boxes(target, shape, sources[index], branch, each, numbers, stepping)


def may_step(pieces: Iterable[Piece]) -> bool:
    """Whether boxes go through each dimension of a tensor in one step that divides it: that makes
    two dimensions of one, of which there are so many at most."""
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


def _boxes(
    target: Target,
    shape: _Shape,
    source: _Branch,
    branch: _Branch,
    each: Sequence[str],
    numbers: frozenset[str],
    stepping: bool,
) -> Iterator[Piece]:
    """Boxes that carry one source branch to one branch of a target, or to the branch of that kind
    of each tensor that the axes `each` number; `numbers` are axes that the parameter's name counts.

    In each target dimension the longest run of axes that lie dense in one source dimension, and
    in the target in equal steps (of 1 if not `stepping`), becomes the extent of the boxes; every
    other axis is counted through.
    """
    extent = [1] * len(shape)
    steps = [1] * len(shape)
    axes = [-1] * len(shape)
    counted = list(each)
    for dimension in range(len(shape)):
        inside = [item for item in branch.steps.items() if item[1].dimension == dimension]
        inside.sort(key=lambda item: item[1].stride)
        for axis, step in inside:
            if axis in numbers:
                continue
            origin = source.steps[axis]
            if step.size == 1:
                continue
            first = axes[dimension] == -1 and origin.dimension not in axes
            if first and origin.stride == 1 and (stepping or step.stride == 1):
                axes[dimension], steps[dimension] = origin.dimension, step.stride
            dense = step.stride == extent[dimension] * steps[dimension]
            if dense and (axes[dimension], extent[dimension]) == (origin.dimension, origin.stride):
                extent[dimension] *= step.size
            else:
                counted.append(axis)
    named = tuple(
        (axis, step.dimension, step.stride)
        for axis, step in branch.steps.items()
        if axis in numbers
    )
    for indices in itertools.product(*(range(source.steps[axis].size) for axis in counted)):
        chosen = dict(zip(counted, indices, strict=True))
        name = target.name
        for axis in each:
            name = name.replace(f"{{{axis}}}", str(chosen[axis]))
        start, source_start = branch.at(chosen), source.at(chosen)
        place = (name, shape, start, source_start, tuple(extent), tuple(axes), tuple(steps))
        yield Piece(*place, named, (1.0, target.offset) if target.offset else None)


class Rule:
    """How one kind of Megatron parameter maps to Hugging Face tensors.

    `stored`: the shape that Megatron gives the parameter where it is not the view's own: for each
    of its dimensions, the dimensions of the view that it multiplies.  The storage must be
    contiguous in the view's order (legacy grouped experts).  `inferred_dimension`: the dimension of
    the parameter that holds the inferred axis, or -1; `inferred_cut`: whether ranks hold parts of
    it; `shaped_dimension`: the one that is cut as the local shape says, or -1.  `sizes`: the names
    of the sizes that it needs.  `counted`: numbers of the name that are axes of targets.
    """

    def __init__(
        self,
        name: str,
        view: str,
        *targets: Target,
        stored: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.name = name
        self.targets = targets
        self.stored = None if stored is None else tuple(tuple(part) for part in stored)
        try:
            self._read(view)
        except RuleError as error:
            raise RuleError(f"{name}: {error}") from None
        text = re.escape(name)
        for key in _NUMBERED:
            text = text.replace(re.escape("{" + key + "}"), rf"(?P<{key}>\d+)")
        self._pattern = re.compile(text)

    def _read(self, view: str) -> None:
        self.parsed = _View(view)
        inferred = [
            dimension
            for dimension, item in enumerate(self.parsed.items)
            for axis in _axes([item])
            if axis.size == INFERRED
        ]
        if len(inferred) > 1:
            raise RuleError(f"more than one inferred axis in {view!r}")
        self.inferred_dimension = inferred[0] if inferred else -1
        self.inferred_cut = any(
            item.mark in ("*", "~") for item in _within(self.parsed.items[d] for d in inferred)
        )
        shaped = [index for index, item in enumerate(self.parsed.items) if item.mark == "~"]
        if len(shaped) != self.parsed.text.count("~") or len(shaped) > 1:
            raise RuleError(f"{view!r} may have one ~, on a dimension of its own")
        self.shaped_dimension = shaped[0] if shaped else -1
        parts = {part for axis in _axes(self.parsed.items) for part in axis.size.split("+")}
        named = {key for target in self.targets for key in _PLACEHOLDER.findall(target.name)}
        parts |= {"block"} if named.intersection(("inner", *_ENDS)) else set()
        self.sizes = frozenset(part for part in parts if part != INFERRED and not part.isdigit())
        wanted = {axis for target in self.targets for axis in _View(target.view).names}
        numbers = {number for number in _COUNTS if "{" + number + "}" in self.name}
        self.counted = frozenset(numbers & wanted - self.parsed.names)
        for target in self.targets:
            self._check(target)

    def _check(self, target: Target) -> None:
        view = _View(target.view)
        unknown = view.names - self.parsed.names - self.counted
        if unknown:
            raise RuleError(
                f"{target.name}: axes {sorted(unknown)} are not in {self.parsed.text!r}"
            )
        known = {name for name in _NUMBERED if "{" + name + "}" in self.name} | self.parsed.names
        if "mtp" in known:
            known |= {"layer", *_ENDS}
        for name in _PLACEHOLDER.findall(target.name):
            if name not in known or name in view.names:
                raise RuleError(f"{target.name}: nothing tells what {{{name}}} is")

    def __repr__(self) -> str:
        return f"Rule({self.name!r}, {self.parsed.text!r})"

    @property
    def key(self) -> str:
        """The name with every number replaced; names of the same key may match."""
        return key_of(_PLACEHOLDER.sub("0", self.name))

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers that a global parameter name holds, or None."""
        match = self._pattern.fullmatch(name)
        return None if match is None else {k: int(v) for k, v in match.groupdict().items()}

    def inferred(self, sizes: Mapping[str, int], extent: int) -> int | None:
        """What the inferred axis must be for its dimension to have this extent; None: nothing."""
        empty, unit = (self.expand(sizes, n).shape[self.inferred_dimension] for n in (0, 1))
        found, rest = divmod(extent - empty, max(1, unit - empty))
        return found if rest == 0 and found >= 0 else None

    def expand(self, sizes: Mapping[str, int], inferred: int = 0) -> Expansion:
        """Fixes the sizes of all axes; KeyError names a size that `sizes` lacks."""
        known = {number: sizes[_COUNTS[number]] for number in self.counted}
        for axis in _axes(self.parsed.items):
            if axis.size == INFERRED:
                known[axis.name] = inferred
            else:
                parts = axis.size.split("+")
                known[axis.name] = sum(int(p) if p.isdigit() else sizes[p] for p in parts)
        return Expansion(self, known)


def mtp_numbers(numbers: Mapping[str, int], layers: int, block: int) -> dict[str, int]:
    """The numbers in the name of a parameter of MTP, as its targets count them."""
    first = numbers["mtp"] * block
    counted = {"layer": layers + numbers["mtp"], "first": first, "last": first + block - 1}
    return {**numbers, **counted, "inner": first + numbers.get("inner", 0)}


def key_of(name: str) -> str:
    """A parameter name with every number replaced by `#`."""
    return re.sub(r"\d+", "#", name)
