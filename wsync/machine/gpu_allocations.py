"""Which memory of a GPU lies where, and what of it can be lent to other processes.

The driver is asked, and not who has allocated the memory: torch's allocator, in segments of
cudaMalloc or as expandable ones, or anything else.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from wsync import _core

# (address, bytes, identity, whether it is a piece) of BufferTable.allocations
Allocation = tuple[int, int, int, bool]


def place_of(gpu: str, *, mps: bool) -> str:
    """Where memory of a GPU, by its UUID, can be lent: on it, and in this PID namespace, and among
    clients of MPS or others, beyond which no process opens the IPC handle of an allocation; "" for
    the host's memory."""
    return gpu and f"{gpu}@{os.stat('/proc/self/ns/pid').st_ino}{'@mps' * mps}"


class GpuSegment(NamedTuple):
    """Allocations that are lent together; no other ones have its number."""

    number: int
    descriptors: int


class GpuPlace(NamedTuple):
    """Where memory of this process lies in a segment."""

    segment: GpuSegment
    offset: int


class GpuAllocations:
    """The memory around buffers on a GPU, as it was when `read` was called last."""

    def __init__(self) -> None:
        self._known: dict[tuple[Allocation, ...], GpuSegment] = {}
        self._buffers = _core.BufferTable([])
        self._found: list[Allocation] = []
        self._next = 0

    def close(self) -> None:
        self._known, self._buffers = {}, _core.BufferTable([])

    def read(self, buffers: _core.BufferTable) -> Sequence[object]:
        """Asks the driver what is around these buffers now, and gives that, to be compared."""
        self._buffers, self._found = buffers, buffers.allocations()
        return self._found

    def find(self, spans: Sequence[tuple[int, int]]) -> list[GpuPlace | None]:
        """Where each span (address, bytes) of the buffers lies; None for one that is empty, or that
        no other process can map."""
        found = self._found
        starts = [allocation[0] for allocation in found]
        covers = [_cover(span, found, starts) for span in spans]
        homes = self._segments(found, covers)
        return [
            None if cover is None else GpuPlace(homes[cover[0]][0], address - homes[cover[0]][1])
            for (address, _), cover in zip(spans, covers, strict=True)
        ]

    def borrow(self, segments: Iterable[GpuSegment]) -> dict[GpuSegment, _core.Memory]:
        """The memory of segments that `find` has met, to be lent to another process."""
        parts = {segment: allocations for allocations, segment in self._known.items()}
        return {segment: self._buffers.lend(parts[segment]) for segment in segments}

    def _segments(
        self, found: Sequence[Allocation], covers: Iterable[tuple[int, int] | None]
    ) -> dict[int, tuple[GpuSegment, int]]:
        """By allocation: its segment, and where that begins.  Allocations that a buffer lies across
        are one segment: a worker maps it side by side, too."""
        known, homes = (
            dict[tuple[Allocation, ...], GpuSegment](),
            dict[int, tuple[GpuSegment, int]](),
        )
        runs: list[tuple[int, int]] = []
        for first, last in sorted(set(filter(None, covers))):
            if runs and first <= runs[-1][1]:
                runs[-1] = runs[-1][0], max(last, runs[-1][1])
            else:
                runs.append((first, last))
        for first, last in runs:
            parts = tuple(found[first : last + 1])
            segment = self._known.get(parts)
            if segment is None:
                segment = GpuSegment(self._next, 1 + sum(part[3] for part in parts))
                self._next += 1
            known[parts] = segment
            homes |= {index: (segment, parts[0][0]) for index in range(first, last + 1)}
        self._known = known
        return homes


def _cover(
    span: tuple[int, int], found: Sequence[Allocation], starts: Sequence[int]
) -> tuple[int, int] | None:
    """The first and last of the allocations that a span lies in, if it can be lent."""
    address, nbytes = span
    first = last = bisect_right(starts, address) - 1
    if not nbytes or first < 0:
        return None
    end = found[first][0]
    while last < len(found):
        start, size, identity, piece = found[last]
        if not identity or start != end or (last > first and not piece):
            return None
        end = start + size
        if address + nbytes <= end:
            return (first, last) if last == first or found[first][3] else None
        last += 1
    return None
