"""Hugging Face checkpoints as layouts: every tensor is a byte range of a safetensors file.

A file is eight bytes that give the length of the header, the header (JSON: name -> dtype, shape,
data_offsets), and the tensors' bytes without gaps; `model.safetensors.index.json` says which file
holds which tensor.  Format: https://huggingface.co/docs/safetensors, transformers' sharding.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from wsync import _core
from wsync.boxes import Box
from wsync.module_tensors.names import group_of_parts

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SHARD_NBYTES: Final = 5_000_000_000

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
class Stored:
    """A tensor in a file: torch's name of its dtype ("" if torch has no such), and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place(Stored):
    """Where a tensor is to lie: index of its file, offset in it."""

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

    Raises UnsupportedError for a dtype that safetensors does not have.
    """
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = []
    left = 0
    facts = [model.tensor(index)[:3] for index in range(model.tensor_count)]
    for name, own, shape in sorted(facts, key=lambda fact: _natural(fact[0])):
        converted = dtype is not None and "float" in own and not group_of_parts(name, own)
        kind = dtype if dtype is not None and converted else own
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
    parts = re.split(r"([0-9]+)", name)  # no other digits: int() takes some of them
    return [(int(part), "") if number % 2 else (-1, part) for number, part in enumerate(parts)]


# --- who writes what --------------------------------------------------------------------------


def owners(model: _core.Layout, ranks: int) -> list[list[Owned]]:
    """Deals the boxes of a model out to ranks that hold them; boxes by rank.

    Of equal boxes one rank gets one, so that replicas share the work; all ranks find the same
    answer.  Boxes that only overlap are written by each of their ranks, with the same bytes.
    Raises LayoutError for elements that no rank holds.
    """
    joined = model.join()  # where buffers are numbered through all ranks
    ends = list(itertools.accumulate(model.buffer_count(rank) for rank in range(ranks)))
    dealt: list[list[Owned]] = [[] for _ in range(ranks)]
    for index in range(joined.tensor_count):
        name, _, shape, _ = joined.tensor(index)
        shards = joined.shards(index)
        lacking = math.prod(shape) - sum(math.prod(shard.extent) for shard in shards)
        if lacking > 0:
            raise _core.LayoutError(
                f"{name}: {lacking} of {math.prod(shape)} elements are on no rank"
            )
        for shard in shards:
            rank = bisect.bisect(ends, shard.buffer)
            dealt[rank].append((name, (shard.start, shard.extent), shard.steps))
    return dealt


# --- reading ----------------------------------------------------------------------------------


class Checkpoint:
    """The tensors of a checkpoint folder.

    Attributes:
        files: the paths of what holds them.
        places: what is stored of each, by name.
        weight_version: what the index carries, or None.

    Raises:
        SystemCallError: a file cannot be read.
        LayoutError: a file is cut short or is not what the index says; the text names it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        self.weight_version: str | None = None
        self.files = [path / SINGLE]
        expected: dict[str, str] = {}
        if (path / INDEX).exists() or not self.files[0].exists():
            index = read_index(path)
            expected, metadata = index.get("weight_map", {}), index.get("metadata") or {}
            if not expected or not isinstance(expected, dict) or not isinstance(metadata, dict):
                raise _core.LayoutError(f"{path / INDEX}: has no weight_map, or odd metadata")
            version = metadata.get("weight_version")
            self.weight_version = None if version is None else str(version)
            self.files = [path / name for name in sorted(set(expected.values()))]
        self.places: dict[str, Stored] = {}
        for file in self.files:
            self.places |= _stored(file)
        for name, where in expected.items():
            if name not in self.places:
                raise _core.LayoutError(f"{path / where}: lacks {name}, which is in {INDEX}")


def _stored(path: Path) -> dict[str, Stored]:
    """What a file holds, by the names of tensors."""
    with system_calls(path):
        try:
            with safe_open(path, "pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return {
                    name: Stored(_TORCH.get(part.get_dtype(), ""), tuple(part.get_shape()))
                    for name, part in parts.items()
                }
        except SafetensorError as error:
            raise _core.LayoutError(f"{path}: {error}") from None


def read_index(folder: Path) -> dict[str, Any]:
    """The JSON object in the index of a checkpoint.

    Raises SystemCallError if it cannot be read, LayoutError if it is none.
    """
    return read_config(folder / INDEX)


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint that says what the model is.

    Raises SystemCallError if it cannot be read, LayoutError if it is none.
    """
    try:
        with system_calls(path):
            found = json.loads(path.read_bytes())
    except ValueError as error:
        raise _core.LayoutError(f"{path}: {error!s:.300}") from None
    if not isinstance(found, dict):
        raise _core.LayoutError(f"{path}: {type(found).__name__} instead of an object")
    return found


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
