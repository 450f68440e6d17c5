"""Versions that hold only what has changed, as slime writes and /pull_weights reads them.

Such a version has the files and the index of a checkpoint, but each of its tensors is a zstd frame
(uint8, named as the tensor) with the new bytes XOR those of the version before.  Tensors without a
change are absent.  A file's metadata has each tensor's checksum: adler32, in hex, of all its new
bytes.  The index's metadata says that the version is one of these, and names the one before.
Format: slime 624b824, docs/en/advanced/delta-weight-sync.md and
docker/patch/latest/sglang-pull_weights.patch.

A rank compares the boxes that it owns with a copy in its memory.  If a tensor consists of several
boxes, one of their ranks makes its frame from the frames of the boxes, which pass through a file.
Readers take one frame for each tensor, so these frames cannot follow one another.  adler32 is a sum
over positions, which ranks compute in parts; of slime's checksums, only this one can be.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import mmap
import os
import queue
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray
from safetensors.numpy import save_file

from wsync import _core
from wsync.boxes import contiguous_strides
from wsync.checkpoints.safetensors_layout import Arrangement, Owned, Place, system_calls

_BATCH_NBYTES: Final = 64 << 20  # that a thread compares at once, except for larger boxes
_MOD: Final = 65521  # of adler32

_T = TypeVar("_T")
_Bytes = NDArray[np.uint8]
Row = Sequence[int]
"""A box: its part of the checksum (two numbers), and the place and the bytes of its frame in the
rank's file of parts.  A box without a change has no frame: 0 bytes."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a tensor to write.  split: whether the tensor has other boxes."""

    owned: Owned
    place: Place
    split: bool

    @property
    def name(self) -> str:
        return self.owned[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.owned[1][1]) * self.place.item_nbytes

    @property
    def start(self) -> int:
        """The box's first byte in the tensor."""
        return sum(a * b for a, b in zip(self.owned[1][0], self.place.strides(), strict=True))

    @property
    def strides(self) -> list[int]:
        """In the tensor, in bytes."""
        return [a * b for a, b in zip(self.place.strides(), self.owned[2], strict=True)]

    def runs(self) -> tuple[int, NDArray[np.int64]]:
        """The bytes of the longest runs that are contiguous in the tensor, and where they begin."""
        extent, steps = self.owned[1][1], self.owned[2]
        axis, nbytes = len(extent), self.place.item_nbytes
        while axis and steps[axis - 1] == 1:
            axis -= 1
            nbytes *= extent[axis]
            if extent[axis] != self.place.shape[axis]:
                break
        starts = np.full(1, self.start, np.int64)
        for count, stride in zip(extent[:axis], self.strides, strict=False):
            starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
        return nbytes, starts

    def add_up(self, data: _Bytes) -> tuple[int, int]:
        """The part of adler32 that the box's bytes contribute: their sum, and the sum of each byte
        times the number of bytes from there to the tensor's end."""
        nbytes, starts = self.runs()
        total = weighted = 0
        view = data.data
        for number, start in enumerate(starts.tolist()):
            value = zlib.adler32(view[number * nbytes : (number + 1) * nbytes])
            part = (value & 0xFFFF) - 1
            total += part
            weighted += (value >> 16) - nbytes + (self.place.nbytes - start - nbytes) * part
        return total % _MOD, weighted % _MOD

    def put(self, data: _Bytes, whole: _Bytes) -> None:
        """Writes the box's bytes to their places among the tensor's."""
        shape = (*self.owned[1][1], self.place.item_nbytes)
        view = np.lib.stride_tricks.as_strided(whole[self.start :], shape, (*self.strides, 1))
        view[...] = data.reshape(shape)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Boxes that are compared together.  offset: of the first one in the rank's copy."""

    boxes: Sequence[_Box]
    route: _core.Route
    offset: int
    nbytes: int


class Deltas:
    """One rank's part of such versions.  In each version all ranks call `compare`, `join` and
    `save`, one after another.

    Args:
        layout: this rank's tensors.
        dealt: the boxes that each rank writes.
        rank: this rank's number.
        arrangement: the tensors' dtypes and shapes in files.
        threads: the number of threads that compare.

    Attributes:
        kept: the number of the version whose bytes this rank has kept; None if it has none.
        nbytes: of this rank's boxes, and so of its copy.
        changed: bytes of them that have changed.
        rows: this rank's boxes of split tensors, for the ranks that write these.

    Raises:
        UnsupportedError: boxes of a tensor overlap.
    """

    def __init__(
        self,
        layout: _core.Layout,
        dealt: Sequence[Sequence[Owned]],
        rank: int,
        arrangement: Arrangement,
        threads: int,
    ) -> None:
        self.kept: int | None = None
        self.changed = 0
        self.rows: list[Row] = []
        self._rank, self._count = rank, threads
        places = arrangement.places
        counts = Counter(name for boxes in dealt for name, *_ in boxes)
        held = [[_Box(each, places[each[0]], counts[each[0]] > 1) for each in b] for b in dealt]
        self._joins = _joins(held, rank)
        self._batches = list(_batches(layout, held[rank]))
        self.nbytes = sum(batch.nbytes for batch in self._batches)
        self._copy: _Bytes = np.empty(0, np.uint8)
        self._frames: dict[str, bytes] = {}
        self._checksums: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """The tensors that this rank writes in this version."""
        return sorted(self._frames)

    def keep(self, sources: _core.BufferTable) -> Iterator[int]:
        """Copies this rank's bytes of a whole version; yields the bytes of each part."""
        if not self._copy.size:
            self._copy = np.empty(self.nbytes, np.uint8)

        def keep(batch: _Batch, new: _Bytes) -> int:
            self._copy[batch.offset : batch.offset + batch.nbytes] = new
            return batch.nbytes

        return self._each_batch(keep, sources)

    def compare(self, sources: _core.BufferTable, folder: Path) -> Iterator[int]:
        """Compares this rank's bytes with its copy, and renews the copy; yields the bytes of each
        part."""
        self.changed, self.rows = 0, []
        self._frames, self._checksums = {}, {}
        with system_calls(folder), open(_parts_file(folder, self._rank), "wb") as file:
            for batch, found in self._each_batch(self._compare, sources):
                for box, (changed, frame, *sums) in zip(batch.boxes, found, strict=True):
                    self.changed += changed
                    if box.split:
                        self.rows.append((*sums, file.tell(), file.write(frame)))
                    elif changed:
                        self._add(box.name, frame, [sums], box.place.nbytes)
                yield batch.nbytes

    def join(self, rows: Sequence[Sequence[Row]], folder: Path) -> Iterator[str]:
        """Makes the frames of split tensors; yields their names.  rows: of all ranks."""

        def join(boxes: Sequence[tuple[int, int, _Box]]) -> bytes:
            whole = np.zeros(boxes[0][2].place.nbytes, np.uint8)
            for rank, number, box in boxes:
                *_, offset, nbytes = rows[rank][number]
                if nbytes:
                    with open(_parts_file(folder, rank), "rb") as file:
                        file.seek(offset)
                        change = zstandard.ZstdDecompressor().decompress(file.read(nbytes))
                    box.put(np.frombuffer(change, np.uint8), whole)
            return _packed(whole)

        changed = [each for each in self._joins if any(rows[r][n][3] for r, n, _ in each)]
        with system_calls(folder), ThreadPoolExecutor(self._count, "wsync-join") as threads:
            for boxes, frame in zip(changed, threads.map(join, changed), strict=True):
                box, sums = boxes[0][2], [rows[rank][number][:2] for rank, number, _ in boxes]
                self._add(box.name, frame, sums, box.place.nbytes)
                yield box.name

    def save(self, folder: Path, name: str) -> int:
        """Writes this rank's tensors to a file of this name, and to the disk; returns its bytes.
        All ranks have joined before."""
        path = folder / name
        with system_calls(path):
            _parts_file(folder, self._rank).unlink()
            if not self._frames:
                return 0
            tensors = {name: np.frombuffer(data, np.uint8) for name, data in self._frames.items()}
            save_file(tensors, path, self._checksums)
            self._frames = {}
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            return path.stat().st_size

    def _add(self, name: str, frame: bytes, sums: Sequence[Row], nbytes: int) -> None:
        low, high = (sum(column) for column in zip(*sums, strict=True))
        self._frames[name] = frame
        self._checksums[name] = f"{(nbytes + high) % _MOD << 16 | (1 + low) % _MOD:08x}"

    def _compare(
        self, batch: _Batch, new: _Bytes
    ) -> tuple[_Batch, list[tuple[int, bytes, int, int]]]:
        """For each box its changed bytes, their frame, and the box's part of the checksum."""
        found, begin = [], 0
        for box in batch.boxes:
            old = self._copy[batch.offset + begin :][: box.nbytes]
            change = new[begin : begin + box.nbytes]
            np.bitwise_xor(change, old, out=change)
            count = int(np.count_nonzero(change))
            if count:
                np.bitwise_xor(change, old, out=old)
            sums = box.add_up(old) if count or box.split else (0, 0)
            found.append((count, _packed(change) if count else b"", *sums))
            begin += box.nbytes
        return batch, found

    def _each_batch(
        self, call: Callable[[_Batch, _Bytes], _T], sources: _core.BufferTable
    ) -> Iterator[_T]:
        """Calls a function with every batch and its present bytes, in threads."""
        free = queue.SimpleQueue[tuple[int, _Bytes]]()

        def run(batch: _Batch) -> _T:
            descriptor, memory = free.get()
            try:
                file = ("", descriptor, batch.nbytes)
                _core.write_files(batch.route, 0, batch.route.buffer_count, sources, [file])
                return call(batch, memory[: batch.nbytes])
            finally:
                free.put((descriptor, memory))

        most = max([1, *(batch.nbytes for batch in self._batches)])
        with contextlib.ExitStack() as stack:
            for _ in range(self._count):
                free.put(stack.enter_context(_scratch(most)))
            threads = stack.enter_context(ThreadPoolExecutor(self._count, "wsync-compare"))
            try:
                yield from threads.map(run, self._batches)
            except BaseException:  # nothing further begins
                threads.shutdown(cancel_futures=True)
                raise


def index(version: str, number: int, files: Mapping[str, Sequence[str]]) -> bytes:
    """The index of a version; files: the names in each file."""
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
        "weight_version": version,
    }
    where = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": metadata, "weight_map": where}, indent=2).encode()


def _joins(held: Sequence[Sequence[_Box]], mine: int) -> list[list[tuple[int, int, _Box]]]:
    """The split tensors that rank `mine` writes: for each of their boxes its rank, the number of
    its row there, and the box.  The ranks that hold boxes of a tensor take turns."""
    split: dict[str, list[tuple[int, int, _Box]]] = {}
    for rank, boxes in enumerate(held):
        for number, box in enumerate(box for box in boxes if box.split):
            split.setdefault(box.name, []).append((rank, number, box))
    for name, parts in split.items():
        if sum(box.nbytes for *_, box in parts) != parts[0][2].place.nbytes:
            raise _core.UnsupportedError(f"{name}: delta: trainer ranks hold overlapping parts")
    return [p for turn, p in enumerate(split.values()) if p[turn % len(p)][0] == mine]


def _batches(layout: _core.Layout, boxes: Sequence[_Box]) -> Iterator[_Batch]:
    most = max(_BATCH_NBYTES, sum(box.nbytes for box in boxes) // 256)
    ends = list(itertools.accumulate(box.nbytes for box in boxes))
    first = 0
    while first < len(boxes):
        offset = ends[first] - boxes[first].nbytes
        last = max(first + 1, bisect.bisect(ends, offset + most))
        yield _batch(layout, boxes[first:last], offset)
        first = last


def _batch(layout: _core.Layout, boxes: Sequence[_Box], offset: int) -> _Batch:
    builder, nbytes = _core.LayoutBuilder(), 0
    for box in boxes:
        (name, (start, extent), steps), place = box.owned, box.place
        strides = [place.item_nbytes * count for count in contiguous_strides(extent)]
        fact = (name, place.dtype, place.shape, start, extent)
        builder.add_shard(*fact, 0, nbytes, strides, steps=steps)
        nbytes += box.nbytes
    return _Batch(boxes, _core.Route(layout, builder.build()), offset, nbytes)


def _parts_file(folder: Path, rank: int) -> Path:
    return folder / f"parts-{rank}"


@contextlib.contextmanager
def _scratch(nbytes: int) -> Iterator[tuple[int, _Bytes]]:
    """A file in memory: its descriptor, and its bytes."""
    descriptor = os.memfd_create("wsync-delta")
    try:
        os.truncate(descriptor, nbytes)
        yield descriptor, np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)


def _packed(data: _Bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data.data)
