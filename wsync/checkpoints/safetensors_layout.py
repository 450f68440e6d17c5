"""Hugging Face checkpoints as layouts: every tensor is a byte range of a safetensors file.

A file consists of eight bytes with the length of the header, the header (JSON: name -> dtype,
shape, data_offsets), and the tensors' bytes without gaps.  `model.safetensors.index.json` says
which file holds which tensor.  Format: https://huggingface.co/docs/safetensors, and transformers'
sharding.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from wsync import _core
from wsync.boxes import Box, contiguous_strides
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import group_of_parts

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SHARD_NBYTES: Final = 5_000_000_000

# torch's names of the dtypes that checkpoints have, and safetensors' names
_STORED: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_TORCH: Final = {stored: name for name, stored in _STORED.items()}


# A tensor's name, a box of the tensor, and the box's step along each dimension.
Owned = tuple[str, Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: torch's name of its dtype ("" if torch lacks it), and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place(Stored):
    """A tensor's place in files to write: the index of a file, and the offset in this file."""

    file: int
    offset: int

    @property
    def item_nbytes(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_nbytes

    def strides(self) -> tuple[int, ...]:
        """Strides in bytes, outermost first."""
        return tuple(self.item_nbytes * count for count in contiguous_strides(self.shape))


@dataclass(frozen=True)
class Arrangement:
    """The files of a checkpoint to write: tensors' places, and files' names, headers and sizes."""

    places: Mapping[str, Place]
    names: tuple[str, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.nbytes for place in self.places.values())

    def index(self, version: str, number: int | None = None) -> bytes:
        """The contents of the index file, with the weight version.  number: see `Versions`."""
        more = {} if number is None else {"version": f"{number:06d}"}
        return json.dumps(
            {
                "metadata": {"total_size": self.nbytes, "weight_version": version, **more},
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
    """Puts a model's tensors into files of at most shard_nbytes of data, in the model's order.

    dtype: the dtype of stored floating-point tensors, except codes and their scales; None keeps the
    trainer's dtypes.  A tensor larger than shard_nbytes gets a file of its own.

    Raises UnsupportedError for a dtype that safetensors does not have.
    """
    shards: list[list[tuple[str, Place]]] = []
    left = 0
    for index in range(model.tensor_count):
        name, own, shape, _ = model.tensor(index)
        converted = dtype is not None and "float" in own and not group_of_parts(name, own)
        kind = dtype if dtype is not None and converted else own
        if kind not in _STORED:
            raise _core.UnsupportedError(f"{name}: safetensors files cannot hold {kind}")
        nbytes = math.prod(shape) * dtype_of(kind).itemsize
        if not shards or nbytes > left:
            shards.append([])
            left = shard_nbytes
        shards[-1].append((name, Place(kind, shape, len(shards) - 1, 0)))
        left -= nbytes
    places: dict[str, Place] = {}
    headers, sizes = [], []
    for shard in shards:
        # wide elements first: then every tensor is aligned to its elements
        shard.sort(key=lambda item: -item[1].item_nbytes)
        offsets = list(itertools.accumulate((place.nbytes for _, place in shard), initial=0))
        header = _header(shard, offsets)
        headers.append(header)
        sizes.append(len(header) + offsets[-1])
        for (name, place), offset in zip(shard, offsets, strict=False):
            places[name] = replace(place, offset=len(header) + offset)
    count = len(shards)
    names = tuple(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
    return Arrangement(places, names, tuple(headers), tuple(sizes))


def _header(shard: Sequence[tuple[str, Place]], offsets: Sequence[int]) -> bytes:
    """A file's bytes before the tensors.  offsets: the tensors' starts, then the last one's end."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, place), span in zip(shard, itertools.pairwise(offsets), strict=True):
        dtype = _STORED[place.dtype]
        entries[name] = {"dtype": dtype, "shape": place.shape, "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- who writes what --------------------------------------------------------------------------


def owners(model: _core.Layout, ranks: int) -> list[list[Owned]]:
    """Deals out a model's boxes to the ranks that hold them; returns the boxes of each rank.

    If several ranks hold the same box, only one of them gets it, so that replicas share the work.
    All ranks compute the same result.  If boxes only overlap, each of their ranks writes its own
    box, with the same bytes.  Raises LayoutError for elements that no rank holds.
    """
    joined = model.join()  # numbers the buffers of all ranks consecutively
    ends = list(itertools.accumulate(model.buffer_count(rank) for rank in range(ranks)))
    dealt: list[list[Owned]] = [[] for _ in range(ranks)]
    for index in range(joined.tensor_count):
        name, _, shape, _ = joined.tensor(index)
        shards = joined.shards(index)
        lacking = math.prod(shape) - sum(math.prod(shard.extent) for shard in shards)
        if lacking > 0:
            raise _core.LayoutError(
                f"{name}: no trainer rank holds {lacking} of its {math.prod(shape)} elements"
            )
        for shard in shards:
            rank = bisect.bisect(ends, shard.buffer)
            dealt[rank].append((name, (shard.start, shard.extent), shard.steps))
    return dealt


# --- reading ----------------------------------------------------------------------------------


class Checkpoint:
    """The tensors of a checkpoint folder.

    Attributes:
        files: the paths of the files that hold the tensors.
        places: the dtype and shape of each tensor, by name.
        weight_version: the weight version in the index; None if the index has none.

    Raises:
        SystemCallError: a file cannot be read.
        LayoutError: a file is cut short or does not agree with the index; the text names it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        self.weight_version: str | None = None
        self.files = [path / SINGLE]
        expected: dict[str, str] = {}
        if (path / INDEX).exists() or not self.files[0].exists():
            index = read_config(path / INDEX)
            expected, metadata = index.get("weight_map", {}), index.get("metadata") or {}
            if not expected or not isinstance(expected, dict) or not isinstance(metadata, dict):
                raise _core.LayoutError(
                    f"{path / INDEX}: it has no weight_map, or its metadata is not a mapping"
                )
            version = metadata.get("weight_version")
            self.weight_version = None if version is None else str(version)
            self.files = [path / name for name in sorted(set(expected.values()))]
        self.places: dict[str, Stored] = {}
        for file in self.files:
            self.places |= _stored(file)
        for name, where in expected.items():
            if name not in self.places:
                raise _core.LayoutError(f"{path / where}: it lacks {name}, which {INDEX} lists")


def _stored(path: Path) -> dict[str, Stored]:
    """The tensors in a file, by name."""
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


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint, for example in config.json.

    Raises SystemCallError if the file cannot be read, LayoutError if it is not a JSON object.
    """
    try:
        with system_calls(path):
            found = json.loads(path.read_bytes())
    except ValueError as error:
        raise _core.LayoutError(f"{path}: {error!s:.300}") from None
    if not isinstance(found, dict):
        raise _core.LayoutError(f"{path}: expected a JSON object, not a {type(found).__name__}")
    return found


@contextlib.contextmanager
def system_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError of the block into a SystemCallError that names the file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, _core.WsyncError):
            raise
        where = error.filename or os.fspath(path)
        failure = _core.SystemCallError(f"{where}: {error.strerror or error}")
        failure.native = error.errno or 0
        raise failure from error
