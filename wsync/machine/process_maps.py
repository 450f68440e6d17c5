"""Which shared memory of this process lies where.

The kernel is asked, and not who has made the memory: tensors may be torch's (share_memory_), views
of a multiprocessing.shared_memory, or anything else that maps a file without a disk.
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
# a mapping of proc_pid_maps(5) that is shared ("s"): start, end, offset, device, inode, path
_SHARED: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ...s ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) *(.*)$", re.M
)


class File(NamedTuple):
    """A file whose pages are memory, by the numbers that no other has while it is mapped."""

    device: tuple[int, int]
    inode: int

    @property
    def descriptors(self) -> int:
        """How many another process needs to map it."""
        return 1


class FilePlace(NamedTuple):
    """Where memory of this process lies in such a file."""

    file: File
    offset: int


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    file: File
    path: bytes


class SharedMaps:
    """The shared mappings of this process, as they were when it was made, or `read` was called."""

    def __init__(self) -> None:
        self._maps = open("/proc/self/maps", "rb", buffering=0)  # noqa: SIM115  until `close`
        self._found: Sequence[_Mapping] = ()
        self.read()

    def close(self) -> None:
        self._maps.close()

    def read(self, buffers: _core.BufferTable | None = None) -> Sequence[object]:
        """Reads which there are now, whatever the buffers, and gives them, to be compared."""
        self._maps.seek(0)
        text = b"".join(iter(lambda: self._maps.read(_READ), b""))
        found = []
        for start, end, offset, major, minor, inode, path in _SHARED.findall(text):
            file = File((int(major, 16), int(minor, 16)), int(inode))
            found.append(_Mapping(int(start, 16), int(end, 16), int(offset, 16), file, path))
        self._found = found
        return found

    def find(self, spans: Iterable[tuple[int, int]]) -> list[FilePlace | None]:
        """Where each span (address, bytes) lies; None for one that is empty, or not within one
        shared mapping."""
        starts = [mapping.start for mapping in self._found]
        places: list[FilePlace | None] = []
        for address, nbytes in spans:
            index = bisect_right(starts, address) - 1
            place = None
            if nbytes and index >= 0 and address + nbytes <= self._found[index].end:
                mapping = self._found[index]
                place = FilePlace(mapping.file, mapping.offset + address - mapping.start)
            places.append(place)
        return places

    def borrow(self, files: Iterable[File]) -> dict[File, _core.Memory]:
        """The memory of files that `find` has met, to be lent to another process: of those that
        this process has a descriptor of, or that can be opened by their name."""
        wanted, borrowed = set(files), dict[File, _core.Memory]()
        descriptors = os.listdir("/proc/self/fd") if wanted else ()
        paths = [os.fsencode(f"/proc/self/fd/{name}") for name in descriptors]
        for path in paths + [each.path for each in self._found if each.file in wanted]:
            try:
                if _file_of(os.stat(path)) not in wanted:
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # closed since, or it has no name any more
                continue
            try:
                memory = _core.Memory.borrow(fd)
            except (_core.PeerRefusedError, _core.SystemCallError):
                continue  # a file on a disk, or a descriptor of no use, where there may be another
            finally:
                os.close(fd)
            # the number or the name may be another file's since it was looked at
            file = _file_of(os.fstat(memory.fileno()))
            if file in wanted:
                borrowed[file] = memory
                wanted.discard(file)
        return borrowed


def most_segments(ranks: int = 1) -> int:
    """How many files each of so many ranks may lend unasked, that processes which hold all of them
    keep most of their descriptors and mappings for other things; after raise_descriptor_limit."""
    return _most_descriptors() // (4 * ranks)


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as it may have mappings, if its hard limit allows
    that: 1,024, the usual soft limit, are the segments of 20 GB.  No more: containers' hard limit
    is 2^30, and there are programs that go through all numbers up to the soft one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := _most_descriptors()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _most_descriptors() -> int:
    with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
        mappings = int(file.read())
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], mappings)


def _file_of(facts: os.stat_result) -> File:
    return File((os.major(facts.st_dev), os.minor(facts.st_dev)), facts.st_ino)
