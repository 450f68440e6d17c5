"""Hugging Face checkpoints as layouts: every tensor is a byte range of a safetensors file.

A file is eight bytes that give the length of the header, the header (JSON: name -> dtype, shape,
data_offsets), and the tensors' bytes without gaps; `model.safetensors.index.json` says which file
holds which tensor.  Format: https://huggingface.co/docs/safetensors, transformers' sharding.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from wsync import _core

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SHARD_NBYTES: Final = 5_000_000_000
MAX_HEADER_NBYTES: Final = 100_000_000  # what the safetensors library accepts

# torch's names of the dtypes that safetensors can store
_STORED: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
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

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, extent


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
        strides, step = [0] * len(self.shape), self.item_nbytes
        for i in reversed(range(len(self.shape))):
            strides[i] = step
            step *= self.shape[i]
        return tuple(strides)


@dataclass(frozen=True)
class Arrangement:
    """The files of a checkpoint that is to be written: what is where, and their headers."""

    places: Mapping[str, Place]
    names: tuple[str, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def index(self, version: str) -> bytes:
        """The contents of the index file; carries the weight version."""
        total = sum(place.nbytes for place in self.places.values())
        return json.dumps(
            {
                "metadata": {"total_size": total, "weight_version": version},
                "weight_map": {name: self.names[p.file] for name, p in self.places.items()},
            },
            indent=2,
        ).encode()

    def layout(self, boxes: Iterable[tuple[str, Box]]) -> _core.Layout:
        """The file ranges of some boxes of tensors; buffer i is file i."""
        builder = _core.LayoutBuilder()
        for name, (start, extent) in boxes:
            place = self.places[name]
            strides = place.strides()
            offset = place.offset + sum(a * b for a, b in zip(start, strides, strict=True))
            builder.add_shard(
                name, place.dtype, place.shape, start, extent, place.file, offset, strides
            )
        return builder.build()


def arrange(
    model: _core.Layout, *, dtype: str | None = None, shard_nbytes: int = SHARD_NBYTES
) -> Arrangement:
    """Puts a model's tensors into files of at most shard_nbytes of data, in order of their names.

    dtype: what floating-point tensors are stored as; None keeps the trainer's.  A tensor that is
    larger than a file gets one of its own.

    Raises UnsupportedError for a dtype that safetensors does not have.
    """
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = []
    left = 0
    facts = [model.tensor(index)[:3] for index in range(model.tensor_count)]
    for name, own, shape in sorted(facts, key=lambda fact: _natural(fact[0])):
        kind = dtype if dtype is not None and "float" in own else own
        if kind not in _STORED:
            raise _core.UnsupportedError(f"{name}: safetensors does not store {kind}")
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
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# --- who writes what --------------------------------------------------------------------------


def owners(model: _core.Layout, ranks: int) -> list[list[tuple[str, Box]]]:
    """Deals every element of a model out to one rank that holds it; boxes by rank.

    Of a box's holders the one with the fewest bytes so far gets it, so that replicas share the
    work; all ranks find the same answer.  Raises LayoutError for elements that no rank holds.
    """
    loads = [0] * ranks
    dealt: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for index in range(model.tensor_count):
        name, _, shape, _ = model.tensor(index)
        holders: dict[Box, list[int]] = {}
        for rank, _, _, start, extent, _, _ in model.shards(index):
            if math.prod(extent):
                holders.setdefault((start, extent), []).append(rank)
        count = 0
        for box, candidates in _disjoint(sorted(holders)):
            able = holders[candidates]
            rank = min(able, key=lambda rank: (loads[rank], rank))
            size = math.prod(box[1])
            loads[rank] += size
            count += size
            dealt[rank].append((name, box))
        if count != math.prod(shape):
            raise _core.LayoutError(
                f"{name}: {math.prod(shape) - count} of {math.prod(shape)} elements are on no rank"
            )
    return dealt


def _disjoint(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """(part, box that it is of): what each box adds to those before it; boxes are sorted."""
    before: list[Box] = []
    for box in boxes:
        start = box[0]
        if start:
            before = [(a, n) for a, n in before if a[0] + n[0] > start[0]]
        parts = [box]
        for other in before:
            parts = [rest for part in parts for rest in _subtract(part, other)]
        for part in parts:
            yield part, box
        before.append(box)


def _subtract(box: Box, other: Box) -> Iterator[Box]:
    """The parts of a box that are outside another one."""
    start, extent = list(box[0]), list(box[1])
    overlap = [
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(start, extent, other[0], other[1], strict=True)
    ]
    if any(low >= high for low, high in overlap):
        yield box
        return
    for i, (low, high) in enumerate(overlap):
        for begin, end in ((start[i], low), (high, start[i] + extent[i])):
            if begin < end:
                yield (
                    (*start[:i], begin, *start[i + 1 :]),
                    (*extent[:i], end - begin, *extent[i + 1 :]),
                )
        start[i], extent[i] = low, high - low


# --- reading ----------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint folder to read from; use as a context manager.

    Opening reads the index and all headers and checks them against the files' sizes, so that a
    checkpoint that was not written to its end is refused before anything is loaded from it.

    Attributes:
        places: every tensor by name.
        weight_version: what the index carries, or None.

    Raises:
        SystemCallError: a file cannot be read.
        LayoutError: a file is cut short or is not what the index says; the text names it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).resolve()  # a link may come to name another version
        self.places: dict[str, Place] = {}
        self.weight_version: str | None = None
        self._sizes: list[int] = []
        self._files: list[Path] = []
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
        self._maps: list[mmap.mmap] = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()

    def layout(self) -> _core.Layout:
        """All tensors; buffer i is file i, offsets count from its start."""
        builder = _core.LayoutBuilder()
        for name, place in self.places.items():
            zeros = [0] * len(place.shape)
            builder.add_shard(
                name,
                place.dtype,
                place.shape,
                zeros,
                place.shape,
                place.file,
                place.offset,
                place.strides(),
            )
        return builder.build()

    def buffers(self) -> _core.BufferTable:
        """The files' contents, mapped; they must not be cut short meanwhile."""
        spans = []
        for path, size in zip(self._files, self._sizes, strict=True):
            with system_calls(path), open(path, "rb") as file:
                # private and never written: writable only because ctypes asks for it
                try:
                    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                except ValueError as error:
                    raise _core.LayoutError(f"{path}: cut short: {error}") from error
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            self._maps.append(mapped)
            spans.append((address, size))
        return _core.BufferTable(spans, owner=list(self._maps))

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.exists() and (self.folder / SINGLE).exists():
            self._files = [self.folder / SINGLE]
            return {}
        with system_calls(path):
            text = path.read_bytes()
        try:
            index = json.loads(text)
            expected = dict(index["weight_map"])
            version = index.get("metadata", {}).get("weight_version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _core.LayoutError(f"{path}: not an index: {error!r}") from None
        for file in expected.values():
            if not isinstance(file, str) or os.path.basename(file) != file or not file:
                raise _core.LayoutError(f"{path}: {file!r} is no file of this folder")
        self.weight_version = None if version is None else str(version)
        self._files = [self.folder / name for name in sorted(set(expected.values()))]
        return expected

    def _read_header(self, number: int, path: Path) -> Iterator[tuple[str, Place]]:
        with system_calls(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_NBYTES):
                raise _core.LayoutError(f"{path}: {size} bytes cannot hold a header of {length}")
            text = file.read(length)
        self._sizes.append(size)
        try:
            entries = json.loads(text)
            found = [
                (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in entries.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _core.LayoutError(f"{path}: not a safetensors header: {error!r}") from None
        for name, stored, shape, begin, end in found:
            where = f"{path}: {name}"
            numbers = (*shape, begin, end)
            if stored not in _TORCH or not all(type(n) is int and n >= 0 for n in numbers):
                raise _core.LayoutError(f"{where}: dtype {stored!r}, {shape}, [{begin}, {end})")
            place = Place(_TORCH[stored], shape, number, 8 + length + begin)
            if end - begin != place.nbytes:
                raise _core.LayoutError(f"{where}: {end - begin} bytes for {place.nbytes}")
            if 8 + length + end > size:
                raise _core.LayoutError(
                    f"{where}: ends at byte {8 + length + end}, the file has {size}: it was not "
                    "written to its end"
                )
            yield name, place


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
