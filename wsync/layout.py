"""Trainer layouts: which boxes of which tensors one trainer rank holds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import TYPE_CHECKING, Final, TypeVar

from wsync import _core
from wsync.families.registry import TOGETHER
from wsync.module_tensors import checksum_of, two_tensors
from wsync.module_tensors.kept_together import group_of
from wsync.module_tensors.places import MemoryPlace, are_apart, parts_of, places_of
from wsync.module_tensors.quantised_names import group_of_parts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["TrainerLayout", "from_tensors", "global_name", "position"]

_SMALL_NBYTES: Final = 1 << 20

_T = TypeVar("_T")
_Row = tuple[int, str, tuple[int, ...], tuple[int, ...], int]  # of a TensorTable


def global_name(name: str) -> str:
    """A parameter name without the wrappers (`module.`) that Megatron and slime put in front."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


# of what holds its tensors; a subclass with one of its own may make them
_STORED: Final = (dict.items, OrderedDict.items)


def items_of(tensors: Mapping[str, _T]) -> list[tuple[str, _T]]:
    """All items at once: another thread may change the mapping.

    Raises LayoutError where a mapping that makes its tensors writes to one that it has given
    before, and gives that memory, or a part of it, under another name, too; or to a small one.
    """
    items = getattr(type(tensors), "items", None)
    if items in _STORED:
        return list(tensors.items())
    if items is None:  # only registered as a Mapping
        return kept(lambda: ((name, tensors[name]) for name in tensors))
    return kept(lambda: tensors.items())


def kept(make: Callable[[], Iterable[tuple[str, _T]]]) -> list[tuple[str, _T]]:
    """Names and tensors, which may be made one after another.

    Raises LayoutError where one was written to when it had been given, and lies in the memory of
    another.  By .data, numpy, collectives or in inference mode nothing counts what is written.  So
    where tensors share memory, `make` is gone through a second time: a tensor that has been written
    over since differs from what it is when made anew.  If that takes collectives, memory has to be
    shared alike on all ranks.  Small tensors that share none are compared as well, in host memory:
    they may have been read with all that lies around them, into the memory of those before.
    """
    given, places = list[tuple[str, _T]](), list[list[MemoryPlace]]()
    small = dict[int, list[int]]()
    for name, tensor in make():
        given.append((name, tensor))
        places.append(places_of(tensor))
        if _is_small(tensor, places[-1]):
            small[len(given) - 1] = _sums(tensor)
    meeting = _meeting(places)
    for number, others in meeting.items():
        # torch counts what is written to all of a storage, and here only this tensor matters
        if _without_counts(places_of(given[number][1])) != _without_counts(places[number]):
            raise _shared(given, number, others)
    # what is made last of those in one memory is not written over
    early = {number: others for number, others in meeting.items() if number < max(others)}
    # one number for each memory, to see whether the second time writes there, too
    firsts = {tuple(places[number]): number for number in reversed(meeting if early else {})}
    sums = {number: _sums(given[number][1]) for number in {*early, *firsts.values()}}
    again, by_address = iter(make() if early else ()), _ByAddress(places if early else ())
    for number in range(max(early, default=-1) + 1):
        pair = next(again, None)
        written = [] if pair is None else places_of(pair[1])
        # another's memory, as that of buffers that serve in turn?
        if _without_counts(written) != _without_counts(places[number]):
            known = {number, *meeting.get(number, ())}
            if others := by_address.met(written) - known:
                raise _shared(given, min(others), {number})
        if number not in early:
            continue
        if pair is None or pair[0] != given[number][0]:
            raise _shared(given, number, early[number], "does not give it a second time, and")
        if _sums(pair[1]) != sums[number]:
            raise _shared(given, number, early[number])
    for number in firsts.values():
        if _sums(given[number][1]) != sums[number]:
            raise _shared(given, number, meeting[number])
    for number, before in small.items():
        if _sums(given[number][1]) != before:
            raise _core.LayoutError(
                f"{given[number][0]}: the mapping has written to it since it gave it: tensors have "
                "to stay as they are until the update is done"
            )
    return given


def _shared(
    given: Sequence[tuple[str, object]],
    number: int,
    others: set[int],
    what: str = "has written to it since, and",
) -> Exception:
    name = given[number][0]
    other = next((o for n in sorted(others) if (o := given[n][0]) != name), name)
    return _core.LayoutError(
        f"{name}: the mapping {what} gives the same memory as {other}: "
        "tensors have to stay as they are until the update is done"
    )


def _without_counts(places: Sequence[MemoryPlace]) -> list[MemoryPlace]:
    return [place._replace(version=0) for place in places]


def _is_small(tensor: object, places: Sequence[MemoryPlace]) -> bool:
    nbytes = sum(place.end - place.start for place in places)
    return 0 < nbytes <= _SMALL_NBYTES and not any(part.is_cuda for part in parts_of(tensor))


def _sums(tensor: object) -> list[int]:
    return [checksum_of(part) for part in parts_of(tensor)]


class _ByAddress:
    """Finds the tensors in whose memory others lie, by their numbers."""

    def __init__(self, places: Sequence[Sequence[MemoryPlace]]) -> None:
        flat = [(place, number) for number, several in enumerate(places) for place in several]
        self._flat = sorted(flat, key=lambda each: each[0].start)
        self._starts = [place.start for place, _ in self._flat]
        self._ends = list(accumulate((place.end for place, _ in self._flat), max))  # so far

    def met(self, some: Sequence[MemoryPlace]) -> set[int]:
        found = set[int]()
        for one in some:
            at = bisect_left(self._starts, one.end) - 1
            while at >= 0 and self._ends[at] > one.start:
                place, number = self._flat[at]
                if one.meets(place):
                    found.add(number)
                at -= 1
        return found


def _meeting(places: Sequence[Sequence[MemoryPlace]]) -> dict[int, set[int]]:
    """Of the tensors that have elements in common with others: their numbers, and the others'."""
    found: dict[int, set[int]] = {}
    for group in _near(places):
        if len(group) > 1 and not are_apart([place for _, place in group]):
            for (number, place), (other, its) in combinations(group, 2):
                if other != number and place.meets(its):
                    found.setdefault(number, set()).add(other)
                    found.setdefault(other, set()).add(number)
    return dict(sorted(found.items()))


def _near(places: Sequence[Sequence[MemoryPlace]]) -> list[list[tuple[int, MemoryPlace]]]:
    """Groups of places with their tensors' numbers: none lies between the ends of another group."""
    groups, end = list[list[tuple[int, MemoryPlace]]](), 0
    flat = [(number, place) for number, several in enumerate(places) for place in several]
    for number, place in sorted(flat, key=lambda each: each[1][:2]):
        if place.start >= end:
            groups.append([])
        groups[-1].append((number, place))
        end = max(end, place.end)
    return groups


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise _core.InvalidArgumentError(f"{name!r}: names are texts, not {type(name).__name__}")


def by_plain_name(
    tensors: Mapping[str, _T], plain: Callable[[str], str], wanted: Collection[str] | None = None
) -> dict[str, _T]:
    """Tensors by their names without wrappers.

    Raises LayoutError where two of them have one name, of those that are wanted (None: all).
    """
    given = items_of(tensors)
    found: dict[str, _T] = {}
    for name, tensor in given:
        _check_name(name)
        short = plain(name)
        if found.setdefault(short, tensor) is not tensor and (wanted is None or short in wanted):
            other = next(n for n, known in given if known is found[short] and plain(n) == short)
            raise two_tensors(name, other, short)
    return found


def chosen(known: Mapping[str, _T], names: Sequence[str]) -> list[_T]:
    """The tensors of these names; LayoutError where one is missing."""
    missing = [name for name in names if name not in known]
    if missing:
        raise _core.LayoutError(
            f"{missing[0]}: not among the {len(known)} weights given "
            f"({len(missing)} of {len(names)} missing)"
        )
    return [known[name] for name in names]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class TrainerLayout:
    """The layout of one trainer rank and the way to its current tensors.

    Buffer i of `layout` on this rank is the trainer parameter `names[i]`; `tensors()` gives the
    tensors that hold the parameters now, in that order.  `rank` and `ranks` count in `group`
    (None: the default process group, or a process of its own).  `made_from` is the form of the
    tensors that the layout was built from: dtypes, shapes and strides, which must not change.
    `pick` finds the buffers' tensors among weights that the caller has by name; None takes those
    of the same global name, or, where no buffer's is among them that has one, of `other_names`.
    `stage` is the rank's pipeline stage.  `widened`: float32 parameters for which a caller may give
    a 16-bit copy, from before the trainer widened them.
    """

    layout: _core.Layout
    names: tuple[str, ...]
    tensors: Callable[[], Sequence[Tensor]]
    made_from: _core.TensorTable
    rank: int = 0
    ranks: int = 1
    group: ProcessGroup | None = None
    pick: Callable[[Mapping[str, Tensor]], Sequence[Tensor]] | None = None
    stage: int = 0
    other_names: Mapping[str, str] = field(default_factory=dict)
    widened: Collection[str] = ()
    _known: list[_core.TensorTable] = field(  # the form of the last table
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # a description keeps its tensors, a layout must not
        object.__setattr__(self, "made_from", self.made_from.form())
        self._known.append(self.made_from)

    def bind(self, weights: Mapping[str, Tensor] | None = None) -> _core.TensorTable:
        """Describes the tensors that hold the parameters now.

        `weights` ({name: tensor}, names with or without leading `module.`) replaces the model's
        own tensors, as slime's weights_getter does; it may hold more than the layout needs.  A
        given tensor that is contiguous where the layout has other strides is copied for the update.
        The table keeps the tensors and their storages alive.  Raises LayoutError where a parameter
        is missing or differs in dtype, shape or strides from what the layout was built from.
        """
        tensors = self._current(weights)
        table = _core.describe(tensors, self.names, gpu=True, former=self._known[0])
        index = table.differs(self.made_from)
        if index is not None and weights is not None:
            tensors = [
                self._fitted(place, tensor, table[place]) for place, tensor in enumerate(tensors)
            ]
            table = _core.describe(tensors, self.names, gpu=True)
            index = table.differs(self.made_from)
        if index is not None:
            _refuse(self.names[index], self.made_from[index], table[index])
        if not table.known:
            self._known[0] = table.form()
        return table

    def _fitted(self, place: int, tensor: Tensor, row: _Row) -> Tensor:
        """One of the weights given, as a copy in the layout's form where it may have another."""
        form = self.made_from[place]
        narrow = row[1] in ("bfloat16", "float16") and form[1] == "float32"
        if narrow and self.names[place] in self.widened:
            return tensor.detach().float()
        return _laid_out(tensor, row, form)

    def _current(self, weights: Mapping[str, Tensor] | None) -> Sequence[Tensor]:
        if weights is None:
            return self.tensors()
        if isinstance(weights, int | str):
            raise _core.InvalidArgumentError(
                f"weights: {weights!r:.130}, where tensors by global name are wanted; a version is "
                f"given as version={weights!r:.130}"
            )
        if not isinstance(weights, Mapping):
            raise _core.InvalidArgumentError(
                f"weights: a {type(weights).__name__}, where tensors by global name are wanted"
            )
        if self.pick is not None:
            return self.pick(weights)
        wanted = list(by_plain_name({name: name for name in self.names}, global_name))
        others = self.other_names
        known = by_plain_name(weights, global_name, {*wanted, *others.values()})
        if not any(name in known for name in others):
            wanted = [others.get(name, name) for name in wanted]
        return chosen(known, wanted)


def _laid_out(tensor: Tensor, row: _Row, form: _Row) -> Tensor:
    """A contiguous tensor that differs from the layout's only in strides, as a copy with those;
    itself where elements of the layout's overlap."""
    if row[1:3] != form[1:3] or row[3] == form[3] or not tensor.is_contiguous():
        return tensor
    reach = 1  # elements from the first to the last
    for stride, extent in sorted(zip(form[3], form[2], strict=True)):
        if extent > 1 and stride < reach:
            return tensor
        reach += stride * (extent - 1)
    import torch

    copy = torch.empty_strided(form[2], form[3], dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _refuse(name: str, expected: tuple[object, ...], found: tuple[object, ...]) -> None:
    pairs = zip(expected[1:4], found[1:4], strict=True)
    for what, (old, new) in zip(("dtype", "shape", "strides"), pairs, strict=True):
        if old != new:
            raise _core.LayoutError(f"{name}: {what} {new} != {old} of the layout")


def from_tensors(
    tensors: Mapping[str, Tensor], *, group: ProcessGroup | None = None
) -> TrainerLayout:
    """The layout of this rank, which holds whole tensors under their Hugging Face names.

    `group`: the ranks that take part in updates (default: all); each speaks for its own tensors,
    and where several hold one under the same name they hold the same values.  Not collective.

    The mapping is read again at every update, so its tensors may be replaced by others of the
    same names, dtypes, shapes and strides.  A dict is read at once, any other mapping by and by:
    what it has given has to stay as it is until the update is done.
    """
    if not isinstance(tensors, Mapping):
        raise _core.InvalidArgumentError(
            f"{type(tensors).__name__}: tensors by name are wanted, as dict(m.named_parameters()) "
            "gives them, or a layout, as wsync.megatron.layout makes one"
        )
    given = items_of(tensors)
    names = tuple(name for name, _ in given)
    seen: set[str] = set()
    for name, tensor in given:
        _check_name(name)
        if name in seen:
            raise _core.LayoutError(f"{name}: the mapping has it twice")
        seen.add(name)
        if is_sharded(tensor):
            raise _core.InvalidArgumentError(
                f"{name}: a {type(tensor).__name__} holds its elements on several ranks: "
                "make the layout with wsync.fsdp.layout"
            )
    table = _core.describe([tensor for _, tensor in given], names, gpu=True)
    rank, count = position(group)
    builder = _core.LayoutBuilder(rank)
    groups = [
        group_of(name, TOGETHER) or group_of_parts(name, table[place][1])
        for place, name in enumerate(names)
    ]
    builder.add_tensors(names, table, groups)

    def current() -> Sequence[Tensor]:
        if type(tensors) is dict and (values := _core.dict_values(tensors, names)) is not None:
            return values
        known = tensors.copy() if type(tensors) is dict else dict(items_of(tensors))
        if tuple(known) == names:
            return list(known.values())
        try:
            found = [known[name] for name in names]
        except KeyError as error:
            raise _core.LayoutError(f"{error.args[0]}: no longer among the tensors") from None
        new = [] if len(known) == len(names) else [name for name in known if name not in seen]
        if new:
            raise _core.LayoutError(f"{new[0]}: not among the layout's tensors: make it anew")
        return found

    return TrainerLayout(builder.build(), names, current, table, rank, count, group)


def is_sharded(tensor: object) -> bool:
    """Whether a tensor holds its elements on several ranks: a DTensor or a ShardedTensor."""
    return hasattr(tensor, "placements") or hasattr(tensor, "local_shards")


def position(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks) of this process; 0 of 1 without torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise _core.InvalidArgumentError("this process is not a member of the group it passed")
    return rank, dist.get_world_size(group)
