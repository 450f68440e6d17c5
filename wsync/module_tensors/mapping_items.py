"""The items of a mapping that may make its tensors when it is asked for them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import Final, TypeVar

from wsync import _core
from wsync.module_tensors import checksum_of
from wsync.module_tensors.places import MemoryPlace, are_apart, parts_of, places_of

_SMALL_NBYTES: Final = 1 << 20

_T = TypeVar("_T")

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
