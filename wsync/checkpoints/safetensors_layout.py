"""Hugging Face checkpoints as layouts: every tensor is a byte range of a safetensors file.

A file is eight bytes that give the length of the header, the header (JSON: name -> dtype, shape,
data_offsets), and the tensors' bytes without gaps; `model.safetensors.index.json` says which file
holds which tensor.  Format: https://huggingface.co/docs/safetensors, transformers' sharding.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from wsync import _core
from wsync.boxes import Box, outside
from wsync.module_tensors.quantised_names import group_of_parts

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SHARD_NBYTES: Final = 5_000_000_000
_FACTS: Final = "__metadata__"  # of a header: the file's own entry among the tensors'
_MARK: Final = "wsync_version"  # of that entry, and of the index's metadata
MARK_LENGTH: Final = 16
_NO_MARK: Final = "0" * MARK_LENGTH
MAX_HEADER_NBYTES: Final = 100_000_000  # what the safetensors library accepts

# torch's names of the dtypes that safetensors can store
_STORED: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_TORCH: Final = {stored: name for name, stored in _STORED.items()}
_ITEM_NBYTES: Final = {
    stored: 1 if stored == "BOOL" else int(re.sub(r"^[A-Z]+|_.*", "", stored)) // 8
    for stored in _TORCH
}


# A tensor, a box of it, and in what steps the box goes along each dimension.
Owned = tuple[str, Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: torch's dtype name, shape, index of its file, offset in it."""

    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int

    @property
    def item_nbytes(self) -> int:
        return _ITEM_NBYTES[_STORED[self.dtype]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_nbytes

    def strides(self) -> tuple[int, ...]:
        """Bytes, outermost first."""
        inner = (math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return tuple(self.item_nbytes * count for count in inner)


@dataclass(frozen=True)
class Arrangement:
    """The files of a checkpoint that is to be written: what is where, and their headers."""

    places: Mapping[str, Place]
    names: tuple[str, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def header(self, number: int, mark: str) -> bytes:
        """The first bytes of a file.  mark: what tells the files of one version from all others,
        MARK_LENGTH letters."""
        return self.headers[number].replace(_NO_MARK.encode(), mark.encode(), 1)

    def index(self, version: str, mark: str) -> bytes:
        """The contents of the index file; carries the weight version, and the files' mark."""
        total = sum(place.nbytes for place in self.places.values())
        return json.dumps(
            {
                "metadata": {"total_size": total, "weight_version": version, _MARK: mark},
                "weight_map": {name: self.names[p.file] for name, p in self.places.items()},
            },
            indent=2,
        ).encode()

    def layout(self, boxes: Iterable[Owned]) -> _core.Layout:
        """The file ranges of some boxes of tensors; buffer i is file i."""
        builder = _core.LayoutBuilder()
        for name, (start, extent), steps in boxes:
            place = self.places[name]
            whole = place.strides()
            offset = place.offset + sum(a * b for a, b in zip(start, whole, strict=True))
            strides = [a * b for a, b in zip(whole, steps, strict=True)]
            fact = (name, place.dtype, place.shape, start, extent)
            builder.add_shard(*fact, place.file, offset, strides, steps=steps)
        return builder.build()


def arrange(
    model: _core.Layout, *, dtype: str | None = None, shard_nbytes: int = SHARD_NBYTES
) -> Arrangement:
    """Puts a model's tensors into files of at most shard_nbytes of data, in order of their names.

    dtype: what floating-point tensors are stored as, but for codes and their scales; None keeps
    the trainer's.  A tensor that is larger than a file gets one of its own.

    Raises UnsupportedError for a dtype or a name that safetensors does not have.
    """
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = []
    left = 0
    facts = [model.tensor(index)[:3] for index in range(model.tensor_count)]
    for name, *_ in facts:
        if not _can_name(name):
            raise _core.UnsupportedError(
                f"{_brief(name)} cannot name a tensor in a file: 1 to {_MAX_NAME} bytes can"
            )
    for name, own, shape in sorted(facts, key=lambda fact: _natural(fact[0])):
        converted = dtype is not None and "float" in own and not group_of_parts(name, own)
        kind = dtype if dtype is not None and converted else own
        if kind not in _STORED:
            raise _core.UnsupportedError(f"{name}: safetensors does not store {kind}")
        if name == _FACTS:
            raise _core.UnsupportedError(f"{name}: safetensors keeps this name for itself")
        nbytes = math.prod(shape) * _ITEM_NBYTES[_STORED[kind]]
        if not shards or nbytes > left:
            shards.append([])
            left = shard_nbytes
        shards[-1].append((name, kind, shape, nbytes))
        left -= nbytes
    places: dict[str, Place] = {}
    headers, sizes = [], []
    for number, shard in enumerate(shards):
        # wide elements first: then every tensor is aligned to its elements
        shard.sort(key=lambda fact: -_ITEM_NBYTES[_STORED[fact[1]]])
        header, offsets, nbytes = _header(shard)
        headers.append(header)
        sizes.append(len(header) + nbytes)
        for (name, kind, shape, _), offset in zip(shard, offsets, strict=True):
            places[name] = Place(kind, shape, number, len(header) + offset)
    count = len(shards)
    names = tuple(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
    return Arrangement(places, names, tuple(headers), tuple(sizes))


def _header(shard: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, list[int], int]:
    """(the file's first bytes, where each tensor begins after them, bytes of all tensors)"""
    entries: dict[str, Any] = {_FACTS: {"format": "pt", _MARK: _NO_MARK}}
    offsets, at = [], 0
    for name, kind, shape, nbytes in shard:
        offsets.append(at)
        entries[name] = {
            "dtype": _STORED[kind],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, at


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = re.split(r"([0-9]+)", name)  # no other digits: int() takes some of them
    return [(int(part), "") if number % 2 else (-1, part) for number, part in enumerate(parts)]


# --- who writes what --------------------------------------------------------------------------


def owners(model: _core.Layout, ranks: int) -> list[list[Owned]]:
    """Deals every element of a model out to one rank that holds it; boxes by rank.

    Of a box's holders the one with the fewest bytes so far gets it, so that replicas share the
    work; all ranks find the same answer.  Raises LayoutError for elements that no rank holds.
    """
    loads = [0] * ranks
    dealt: list[list[Owned]] = [[] for _ in range(ranks)]
    for index in range(model.tensor_count):
        name, _, shape, _ = model.tensor(index)
        shards = model.shards(index)
        steps = tuple(map(math.lcm, *(shard.steps for shard in shards))) if shards else ()
        # by where in a step boxes start: those of two places share nothing, and those of one are
        # dense in their own coordinates
        places: dict[tuple[int, ...], dict[Box, list[int]]] = {}
        for shard in shards:
            for rest, box in _with_steps(shard, steps):
                places.setdefault(rest, {}).setdefault(box, []).append(shard.rank)
        count = 0
        for rest, holders in places.items():
            for (start, extent), candidates in _disjoint(sorted(holders)):
                able = holders[candidates]
                rank = min(able, key=lambda rank: (loads[rank], rank))
                size = math.prod(extent)
                loads[rank] += size
                count += size
                first = tuple(a * n + b for a, n, b in zip(start, steps, rest, strict=True))
                dealt[rank].append((name, (first, extent), steps))
        if count != math.prod(shape):
            raise _core.LayoutError(
                f"{name}: {math.prod(shape) - count} of {math.prod(shape)} elements are on no rank"
            )
    return dealt


def _with_steps(shard: _core.Shard, steps: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The boxes that a shard consists of when it goes through the tensor in other steps, multiples
    of its own: where in a step each one starts, and its start and extent, in steps."""
    axes = map(_cut, shard.start, shard.extent, shard.steps, steps)
    for parts in itertools.product(*axes):
        box = tuple(start for start, _, _ in parts), tuple(extent for _, _, extent in parts)
        yield tuple(rest for _, rest, _ in parts), box


def _cut(start: int, extent: int, own: int, step: int) -> Iterator[tuple[int, int, int]]:
    """The same along one axis: (start, where in a step, extent)."""
    count = step // own
    for k in range(min(count, extent)):
        place, rest = divmod(start + k * own, step)
        yield place, rest, -(-(extent - k) // count)


def _disjoint(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """(part, box that it is of): what each box adds to those before it; boxes are sorted."""
    before: list[Box] = []
    for box in boxes:
        start = box[0]
        if start:
            before = [(a, n) for a, n in before if a[0] + n[0] > start[0]]
        parts = [box]
        for other in before:
            parts = [rest for part in parts for rest in outside(part, other)]
        for part in parts:
            yield part, box
        before.append(box)


# --- reading ----------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint folder to read from.

    Opening reads the index and all headers and checks them against the files' sizes, so that a
    checkpoint that was not written to its end is refused before anything is loaded from it.

    Attributes:
        places: every tensor by name.
        weight_version: what the index carries, or None.  Files that wsync has not written with it
            have none.

    Raises:
        SystemCallError: a file cannot be read.
        LayoutError: a file is cut short or is not what the index says; the text names it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with system_calls(folder):
            try:
                self.folder = Path(folder).resolve()  # a link may come to name another version
            except (ValueError, RuntimeError) as error:
                raise _core.InvalidArgumentError(f"{_brief(folder)}: no folder: {error}") from None
        self.places: dict[str, Place] = {}
        self.weight_version: str | None = None
        self._mark: object = None  # of the index, and so of every file that belongs to it
        self._seen: dict[Path, _Stamp] = {}
        self._files: list[Path] = []
        self._open: dict[Path, int] = {}  # descriptors, within `opened`
        expected = self._read_index()
        for number, path in enumerate(self._files):
            for name, place in self._read_header(number, path):
                if name in self.places:
                    other = self._files[self.places[name].file].name
                    raise _core.LayoutError(f"{path}: {name} is in {other} too")
                self.places[name] = place
        for name, file in expected.items():
            if name not in self.places or self._files[self.places[name].file].name != file:
                raise _core.LayoutError(f"{self.folder / file}: lacks {name}, which is in {INDEX}")

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[int]]:
        """The files' descriptors, until the block ends.

        Raises LayoutError for a file that is not the one whose header was read.
        """
        with contextlib.ExitStack() as stack:
            descriptors = []
            for path in self._files:
                descriptor, stamp = stack.enter_context(_opened(path))
                if stamp != self._seen[path]:
                    raise _core.LayoutError(f"{path}: {_CHANGED}")
                descriptors.append(descriptor)
            self._open.update(zip(self._files, descriptors, strict=True))
            stack.callback(self._open.clear)
            yield descriptors

    @property
    def state(self) -> State:
        """What the files are: equal for two readers of the same."""
        return tuple((path.name, stamp) for path, stamp in self._seen.items())

    def pieces(self, nbytes: int) -> tuple[_core.Layout, list[FilePiece]]:
        """All tensors in pieces of at most `nbytes`, or of one row of one tensor where that is
        more; buffer i is piece i, offsets count from its start."""
        builder = _core.LayoutBuilder()
        pieces: list[FilePiece] = []
        places = sorted(self.places.items(), key=lambda each: (each[1].file, each[1].offset))
        for name, place in places:
            rank, strides = len(place.shape), place.strides()
            rows, *inner = place.shape or (1,)
            row_nbytes = place.nbytes // max(rows, 1)
            step = max(nbytes // row_nbytes, 1) if row_nbytes else max(rows, 1)
            for row in range(0, max(rows, 1), step):
                count = min(step, rows - row)
                start, extent = (row, *(0 for _ in inner))[:rank], (count, *inner)[:rank]
                part = FilePiece(place.file, place.offset + row * row_nbytes, count * row_nbytes)
                last = pieces[-1] if pieces else None
                if last is None or not last.continues(part, nbytes):
                    pieces.append(part)
                else:
                    pieces[-1] = FilePiece(last.file, last.offset, last.nbytes + part.nbytes)
                at = part.offset - pieces[-1].offset
                buffer = len(pieces) - 1
                builder.add_shard(
                    name, place.dtype, place.shape, start, extent, buffer, at, strides
                )
        return builder.build(), pieces

    def read(self, descriptors: Sequence[int], piece: FilePiece, into: memoryview) -> None:
        """A piece's bytes, from what `opened` gave.  LayoutError if the file has become shorter."""
        done = 0
        path = self._files[piece.file]
        with system_calls(path):
            while done < piece.nbytes:
                part = into[done : piece.nbytes]
                found = os.preadv(descriptors[piece.file], [part], piece.offset + done)
                if found == 0:
                    raise _core.LayoutError(f"{path}: {_CHANGED}: it ends at {piece.offset + done}")
                done += found

    def check(self) -> None:
        """Raises LayoutError if a file or the index has been written to, replaced, linked or given
        another mode since it was opened: what was read may be of two checkpoints.  One that was
        removed is read as it was, if nobody has written to it."""
        for path, seen in self._seen.items():
            with system_calls(path):
                try:
                    found = _stamp(os.stat(path))
                except FileNotFoundError:
                    if path not in self._open:
                        continue
                    # it is not there for others, which has changed the second time alone
                    now = _stamp(os.fstat(self._open[path]))
                    found = replace(now, changed=(now.changed[0], seen.changed[1]))
            if found != seen:
                raise _core.LayoutError(f"{path}: {_CHANGED}")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not os.path.lexists(path) and os.path.lexists(self.folder / SINGLE):
            self._files = [self.folder / SINGLE]
            return {}
        index, self._seen[path] = read_index(self.folder)
        expected, metadata = index.get("weight_map"), index.get("metadata", {})
        if not isinstance(expected, dict) or not isinstance(metadata, dict):
            raise _core.LayoutError(f"{path}: not an index: no weight_map, or odd metadata")
        for file in expected.values():
            known = isinstance(file, str) and file not in (".", "..") and "\0" not in file
            if not known or os.path.basename(file) != file or not file:
                raise _core.LayoutError(f"{path}: {_brief(file)} is no file of this folder")
        version = metadata.get("weight_version")
        if version is not None and not isinstance(version, str | int):
            raise _core.LayoutError(f"{path}: not an index: weight_version {_brief(version)}")
        self.weight_version = None if version is None else str(version)
        self._mark = metadata.get(_MARK)
        self._files = [self.folder / name for name in sorted(set(expected.values()))]
        return expected

    def _read_header(self, number: int, path: Path) -> list[tuple[str, Place]]:
        with _opened(path) as (descriptor, stamp):
            size = stamp.nbytes
            length = int.from_bytes(_read(descriptor, 8, 0), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_NBYTES):
                raise _core.LayoutError(f"{path}: {size} bytes cannot hold a header of {length}")
            text = _read(descriptor, length, 8)
        self._seen[path] = stamp
        entries = _parse(text, f"{path}: not a safetensors header")
        facts = entries.pop(_FACTS, None)
        if (facts.get(_MARK) if isinstance(facts, dict) else None) != self._mark:
            self.weight_version = None  # written by others since
        found = []
        for name, entry in entries.items():
            stored, shape, begin, end = _facts(f"{path}: {_name(path, name)}", entry)
            place = Place(_TORCH[stored], shape, number, 8 + length + begin)
            if end - begin != place.nbytes:
                raise _core.LayoutError(f"{path}: {name}: {end - begin} bytes for {place.nbytes}")
            if 8 + length + end > size:
                raise _core.LayoutError(
                    f"{path}: {name}: ends at byte {8 + length + end}, the file has {size}: it "
                    "was not written to its end"
                )
            found.append((name, place))
        _check_dense(path, found, 8 + length, size)
        return found


_CHANGED: Final = "was changed while the checkpoint was being read"
_MAX_NAME: Final = 4096
_MAX_DIMENSIONS: Final = 6  # of a layout


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a checkpoint's file that are read at once."""

    file: int
    offset: int
    nbytes: int

    def continues(self, other: FilePiece, most: int) -> bool:
        """Whether another piece begins where this one ends, and both are at most so large."""
        near = self.file == other.file and self.offset + self.nbytes == other.offset
        return near and self.nbytes + other.nbytes <= most


@dataclass(frozen=True)
class _Stamp:
    """What tells one state of a file from another."""

    file: tuple[int, int]  # device and inode
    nbytes: int
    changed: tuple[int, int]


State = tuple[tuple[str, _Stamp], ...]
"""What the files of a checkpoint are, by their names."""


def _stamp(found: os.stat_result) -> _Stamp:
    # anybody can set the time of the last write, and nobody the other
    changed = found.st_mtime_ns, found.st_ctime_ns
    return _Stamp((found.st_dev, found.st_ino), found.st_size, changed)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, _Stamp]]:
    """A descriptor of a regular file; a FIFO or a terminal is not waited for."""
    with system_calls(path):
        try:
            found = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except ValueError as error:  # zero bytes, or characters that are none of a path's
            raise _core.LayoutError(f"{_brief(os.fspath(path))}: no path: {error}") from None
        try:
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode):
                raise _core.LayoutError(f"{path}: is no regular file")
            yield found, _stamp(status)
        finally:
            os.close(found)


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Bytes of a file; fewer at its end."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(offset)
        return file.read(nbytes)


def read_index(folder: Path) -> tuple[dict[str, Any], _Stamp]:
    """The JSON object in the index of a checkpoint, and which state of the file it is.

    Raises SystemCallError if it cannot be read, LayoutError if it is none.
    """
    return _read_json(folder / INDEX, "not an index")


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint that says what the model is.

    Raises SystemCallError if it cannot be read, LayoutError if it is none.
    """
    return _read_json(path, "not a configuration")[0]


def _read_json(path: Path, otherwise: str) -> tuple[dict[str, Any], _Stamp]:
    with _opened(path) as (descriptor, stamp):
        if stamp.nbytes > MAX_HEADER_NBYTES:
            raise _core.LayoutError(f"{path}: {otherwise}: it has {stamp.nbytes} bytes")
        text = _read(descriptor, stamp.nbytes, 0)
    return _parse(text, f"{path}: {otherwise}"), stamp


def _parse(text: bytes, otherwise: str) -> dict[str, Any]:
    """An object in JSON without keys that come twice."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _core.LayoutError(f"{otherwise}: {error!s:.300}") from None
    if not isinstance(found, dict):
        raise _core.LayoutError(f"{otherwise}: {type(found).__name__} instead of an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise ValueError(f"{_brief(twice)} comes twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _can_name(name: str) -> bool:
    """Whether a tensor's name is text that others can hold."""
    try:
        return 0 < len(name.encode()) <= _MAX_NAME and "\0" not in name
    except UnicodeEncodeError:
        return False


def _name(path: Path, name: str) -> str:
    if _can_name(name):
        return name
    raise _core.LayoutError(f"{path}: {_brief(name)} cannot name a tensor")


def _facts(where: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and data_offsets of an entry of a header, which may be anything."""
    if not isinstance(entry, dict):
        raise _core.LayoutError(f"{where}: {_brief(entry)} instead of an object")
    stored, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(stored, str)
        or stored not in _TORCH
        or not isinstance(shape, list)
        or not isinstance(span, list)
        or len(shape) > _MAX_DIMENSIONS
        or len(span) != 2
        or not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, *span))
        or math.prod(max(number, 1) for number in shape) >= 1 << 59  # strides count bytes
    ):
        raise _core.LayoutError(f"{where}: dtype {_brief(stored)}, {_brief(shape)}, {_brief(span)}")
    return stored, tuple(shape), span[0], span[1]


def _check_dense(path: Path, found: list[tuple[str, Place]], begin: int, end: int) -> None:
    """Tensors follow each other from the header to the end of the file, as the format asks."""
    for name, place in sorted(found, key=lambda each: (each[1].offset, each[1].nbytes)):
        if place.offset != begin:
            raise _core.LayoutError(
                f"{path}: {name}: begins at byte {place.offset}, the one before it ends at {begin}"
            )
        begin += place.nbytes
    if begin != end:
        raise _core.LayoutError(f"{path}: {end - begin} bytes after the last tensor")


def _brief(value: object) -> str:
    """What JSON has held, in a few words."""
    return _BRIEF.repr(value)[:200]


_BRIEF: Final = reprlib.Repr()
_BRIEF.maxlevel = 2
_BRIEF.maxstring = 100


@contextlib.contextmanager
def system_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes SystemCallErrors that name the file of the block's OSErrors."""
    try:
        yield
    except OSError as error:
        if isinstance(error, _core.WsyncError):
            raise
        where = error.filename or os.fspath(path)
        failure = _core.SystemCallError(f"{where}: {error.strerror or error}")
        failure.native = error.errno or 0
        raise failure from error
