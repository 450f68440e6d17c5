"""The items of a mapping that may make its tensors when it is asked for them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import Any, Final, TypeVar

from wsync import _core
from wsync.module_tensors import checksum_of
from wsync.module_tensors.places import MemoryPlace, are_apart, parts_of, places_of

_STAY: Final = "tensors have to stay as they are until the update is done"
_SMALL_NBYTES: Final = 1 << 20  # of a tensor in host memory that is compared as a whole
_RUNS, _RUN = 32, 8  # of elements that are compared of others
_INTEGERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by their bytes

_T = TypeVar("_T")

# of what holds its tensors; a subclass with one of its own may make them
_STORED: Final = (dict.items, OrderedDict.items)


def items_of(tensors: Mapping[str, _T]) -> list[tuple[str, _T]]:
    """All items at once: another thread may change the mapping.

    Raises LayoutError where a mapping that makes its tensors writes to one that it has given
    before, or moves it.
    """
    items = getattr(type(tensors), "items", None)
    if items in _STORED:
        return list(tensors.items())
    if items is None:  # only registered as a Mapping
        return kept(lambda: ((name, tensors[name]) for name in tensors))
    return kept(lambda: tensors.items())


def kept(make: Callable[[], Iterable[tuple[str, _T]]]) -> list[tuple[str, _T]]:
    """Names and tensors, which may be made one after another.

    Raises LayoutError where one was moved or written to when it had been given.  torch does
    not count all that is written, and not by tensor.  So where tensors share memory,
    `make` is gone through a second time: a tensor that has been written over since differs from
    what it is when made anew.  If that takes collectives, memory has to be shared alike on all
    ranks.  All are compared in the end with what they were, large ones by some of their elements:
    they may have been read into one buffer with all that lies around them, or parameters be lent
    other values while they are given.
    """
    given, places = list[tuple[str, _T]](), list[list[MemoryPlace]]()
    looks = list[list[int]]()
    for name, tensor in make():
        given.append((name, tensor))
        places.append(places_of(tensor))
        looks.append(_look(tensor, places[-1]))
    meeting = _meeting(places)
    for number, (name, tensor) in enumerate(given):
        if places_of(tensor) != places[number]:
            if number in meeting:
                raise _shared(given, number, meeting[number])
            raise _core.LayoutError(
                f"{name}: the mapping has moved or freed it since it gave it: {_STAY}"
            )
    if meeting:
        _compare_again(make, given, places, meeting)
    for (name, tensor), place, look in zip(given, places, looks, strict=True):
        if _look(tensor, place) != look:
            raise _core.LayoutError(
                f"{name}: the mapping has written to it since it gave it: {_STAY}"
            )
    return given


def _compare_again(
    make: Callable[[], Iterable[tuple[str, _T]]],
    given: Sequence[tuple[str, _T]],
    places: Sequence[Sequence[MemoryPlace]],
    meeting: dict[int, set[int]],
) -> None:
    """Raises LayoutError where one of the tensors that share memory is another when it is made
    anew."""
    # what is made last of those in one memory is not written over
    early = {number: others for number, others in meeting.items() if number < max(others)}
    # one number for each memory, to see whether the second time writes there, too
    firsts = {tuple(places[number]): number for number in reversed(meeting)}
    sums = {number: _sums(given[number][1]) for number in {*early, *firsts.values()}}
    again, by_address = iter(make()), _ByAddress(places)
    for number in range(max(early) + 1):
        pair = next(again, None)
        written = [] if pair is None else places_of(pair[1])
        # another's memory, as that of buffers that serve in turn?
        if written != places[number]:
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


def _shared(
    given: Sequence[tuple[str, object]],
    number: int,
    others: set[int],
    what: str = "has written to it since, and",
) -> Exception:
    name = given[number][0]
    other = next((o for n in sorted(others) if (o := given[n][0]) != name), name)
    return _core.LayoutError(
        f"{name}: the mapping {what} gives the same memory as {other}: {_STAY}"
    )


def _look(tensor: object, places: Sequence[MemoryPlace]) -> list[int]:
    """What is compared of a tensor in these places: a checksum of each part, or of a sample."""
    return [checksum_of(_sample(part)) for part in _readable(tensor)] if places else []


def _sample(tensor: Any) -> Any:
    """Some elements of a tensor, all over it; in host memory a small tensor itself."""
    import torch

    whole = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_NBYTES
    integers = _INTEGERS.get(tensor.element_size())
    if whole or integers is None:
        return tensor
    count, run = tensor.numel(), torch.arange(_RUN, device=tensor.device)
    step = max(count // _RUNS, 1) | 1  # not always the first column
    index = run[:, None] + torch.arange(0, count, step, device=tensor.device)
    return torch.take(tensor.detach().view(getattr(torch, integers)), index.clamp(max=count - 1))


def _sums(tensor: object) -> list[int]:
    return [checksum_of(part) for part in _readable(tensor)]


def _readable(tensor: object) -> list[Any]:
    """Its parts; none of what cannot be sent, as where a GPU has no memory while an allocator has
    paused: it is refused by name if it is to be."""
    parts = list(parts_of(tensor))
    try:
        _core.BufferTable.of(_core.describe(parts, gpu=True))
    except _core.WsyncError:
        return []
    return parts


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
