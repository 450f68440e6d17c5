"""Finds where this process's memory is, and which of it can be lent to other processes.

It asks the kernel or the driver, because any code may have made the memory: torch (share_memory_,
segments of cudaMalloc or expandable ones), multiprocessing.shared_memory, or code that maps a file
in memory (tmpfs, memfd).
"""

from __future__ import annotations

import os
import re
import resource
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from wsync import _core

_READ: Final = 1 << 16
# a shared mapping ("s") of proc_pid_maps(5): start, end, offset, device, inode, path
_SHARED: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ...s ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) *(.*)$", re.M
)


class File(NamedTuple):
    """A file whose pages are memory.  Its numbers identify it as long as it is mapped."""

    device: tuple[int, int]
    inode: int

    @property
    def descriptors(self) -> int:
        """The number of descriptors that another process needs to map it."""
        return 1


# (address, bytes, identity, whether it is a piece) of BufferTable.allocations
Allocation = tuple[int, int, int, bool]


class GpuSegment(NamedTuple):
    """Allocations of a GPU that are lent together.  Equal segments have equal identities."""

    parts: tuple[Allocation, ...]

    @property
    def descriptors(self) -> int:
        return 1 + sum(part[3] for part in self.parts)


class LentPlace(NamedTuple):
    """The place of this process's memory in a file or segment that can be lent."""

    source: File | GpuSegment
    offset: int


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    file: File
    path: bytes


class SharedMaps:
    """The shared mappings of this process when this was made, or at the last `read`."""

    def __init__(self) -> None:
        self._maps = open("/proc/self/maps", "rb", buffering=0)  # noqa: SIM115  until `close`
        self._found: Sequence[_Mapping] = ()
        self.read()

    def close(self) -> None:
        self._maps.close()

    def read(self, buffers: _core.BufferTable | None = None) -> Sequence[object]:
        """Reads and returns the current mappings, to be compared; `buffers` has no effect."""
        self._maps.seek(0)
        text = b"".join(iter(lambda: self._maps.read(_READ), b""))
        found = []
        for start, end, offset, major, minor, inode, path in _SHARED.findall(text):
            file = File((int(major, 16), int(minor, 16)), int(inode))
            found.append(_Mapping(int(start, 16), int(end, 16), int(offset, 16), file, path))
        self._found = found
        return found

    def find(self, spans: Iterable[tuple[int, int]]) -> list[LentPlace | None]:
        """Finds the place of each span (address, bytes).  If a span is empty, or if no single
        shared mapping contains it, its place is None."""
        starts = [mapping.start for mapping in self._found]
        places: list[LentPlace | None] = []
        for address, nbytes in spans:
            index = bisect_right(starts, address) - 1
            place = None
            if nbytes and index >= 0 and address + nbytes <= self._found[index].end:
                mapping = self._found[index]
                place = LentPlace(mapping.file, mapping.offset + address - mapping.start)
            places.append(place)
        return places

    def borrow(self, files: Iterable[File]) -> dict[File, _core.Memory]:
        """Opens the memory of files that `find` has found, to lend it to another process.  Leaves
        out files that have neither a descriptor in this process nor a name by which they open."""
        wanted, borrowed = set(files), dict[File, _core.Memory]()
        descriptors = os.listdir("/proc/self/fd") if wanted else ()
        paths = [os.fsencode(f"/proc/self/fd/{name}") for name in descriptors]
        for path in paths + [each.path for each in self._found if each.file in wanted]:
            try:
                if _file_of(os.stat(path)) not in wanted:
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # closed meanwhile, or no longer named
                continue
            try:
                memory = _core.Memory.borrow(fd)
            except (_core.PeerRefusedError, _core.SystemCallError):
                continue  # a file on a disk, or an unusable descriptor; another one may do
            finally:
                os.close(fd)
            # meanwhile the descriptor or the name may have become another file's
            file = _file_of(os.fstat(memory.fileno()))
            if file in wanted:
                borrowed[file] = memory
                wanted.discard(file)
        return borrowed


def most_segments(ranks: int = 1) -> int:
    """Returns how many files each of `ranks` ranks may lend, so that a process with all of them has
    half of its descriptors and mappings left.  Call raise_descriptor_limit first."""
    return _most_descriptors() // (2 * ranks)


def raise_descriptor_limit() -> None:
    """Raises this process's soft descriptor limit to its limit of mappings, or to the hard limit if
    that is lower.  The usual soft limit, 1,024, is enough for the segments of 20 GB.  The limit is
    not raised further, because containers have a hard limit of 2^30, and some programs try all
    numbers up to the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := _most_descriptors()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _most_descriptors() -> int:
    with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
        mappings = int(file.read())
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], mappings)


def _file_of(facts: os.stat_result) -> File:
    return File((os.major(facts.st_dev), os.minor(facts.st_dev)), facts.st_ino)


# --- memory of a GPU ----------------------------------------------------------------------------


def place_of(gpu: str, *, mps: bool) -> str:
    """Names the place in which memory of a GPU can be lent.  If `gpu` is "", returns "".  The name
    consists of the GPU's UUID, the PID namespace, and whether the process is a client of MPS.  A
    process in another place cannot open the IPC handle of an allocation."""
    return gpu and f"{gpu}@{os.stat('/proc/self/ns/pid').st_ino}{'@mps' * mps}"


class GpuAllocations:
    """The allocations around buffers on a GPU at the last `read`."""

    def __init__(self) -> None:
        self._buffers = _core.BufferTable([])
        self._found: list[Allocation] = []

    def close(self) -> None:
        self._buffers = _core.BufferTable([])

    def read(self, buffers: _core.BufferTable) -> Sequence[object]:
        """Asks the driver for the allocations around these buffers, and returns them."""
        self._buffers, self._found = buffers, buffers.allocations()
        return self._found

    def find(self, spans: Sequence[tuple[int, int]]) -> list[LentPlace | None]:
        """Finds the place of each span (address, bytes) of the buffers.  If a span is empty, or if
        no other process can map it, its place is None."""
        starts = [allocation[0] for allocation in self._found]
        covers = [_cover(span, self._found, starts) for span in spans]
        homes = self._segments(covers)
        return [
            cover and LentPlace(homes[cover[0]], address - homes[cover[0]].parts[0][0])
            for (address, _), cover in zip(spans, covers, strict=True)
        ]

    def borrow(self, segments: Iterable[GpuSegment]) -> dict[GpuSegment, _core.Memory]:
        """Opens the memory of segments that `find` has found, to lend it to another process."""
        return {segment: self._buffers.lend(segment.parts) for segment in segments}

    def _segments(self, covers: Iterable[tuple[int, int] | None]) -> dict[int, GpuSegment]:
        """Returns each allocation's segment.  Allocations across which a buffer lies form one
        segment, because a worker must map them side by side, too."""
        runs: list[tuple[int, int]] = []
        for first, last in sorted(set(filter(None, covers))):
            if runs and first <= runs[-1][1]:
                runs[-1] = runs[-1][0], max(last, runs[-1][1])
            else:
                runs.append((first, last))
        homes = dict[int, GpuSegment]()
        for first, last in runs:
            segment = GpuSegment(tuple(self._found[first : last + 1]))
            homes |= dict.fromkeys(range(first, last + 1), segment)
        return homes


def _cover(
    span: tuple[int, int], found: Sequence[Allocation], starts: Sequence[int]
) -> tuple[int, int] | None:
    """Returns the first and last of a span's allocations, or None if it cannot be lent."""
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
