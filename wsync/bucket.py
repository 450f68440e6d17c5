"""Many tensors as one flat byte tensor: SGLang's FlattenedTensorBucket, filled in C.

The interface and the byte layout are those of `sglang.srt.weight_sync.tensor_bucket` (0.5.6 and
newer): each tensor's contiguous bytes at `start_idx:end_idx` of one uint8 tensor, and a list of
metadata.  wsync and SGLang can read each other's buckets and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wsync._core import InvalidArgumentError, LayoutError, describe, pack
from wsync.module_tensors import dtype_of

ALIGNMENT = 16


@dataclass
class FlattenedTensorMetadata:
    """The place of one tensor in a bucket; `start_idx`, `end_idx` and `numel` count bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def metadata_at(
    start: int, name: str, dtype_name: str, shape: Sequence[int]
) -> FlattenedTensorMetadata:
    """The metadata of a tensor whose bytes begin at `start`; `dtype_name` is torch's."""
    dtype = dtype_of(dtype_name)
    nbytes = math.prod(shape) * dtype.itemsize  # numel() wraps around
    return FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, start + nbytes, nbytes)


class FlattenedTensorBucket:
    """Named tensors in one flat uint8 tensor.

    A bucket takes either `named_tensors` (CPU tensors with any strides; their bytes are copied) or
    a `flattened_tensor` with its `metadata` (nothing is copied).

    alignment: every tensor starts at a multiple of this number of bytes, a power of two.  With 1
        the bytes are exactly those of SGLang's class.  That class cannot read a tensor back if its
        start is not a multiple of its item size.
    out: a contiguous one-dimensional uint8 CPU tensor to fill.  With memory that was used before, a
        bucket costs one copy.  The flattened tensor is the first bytes of `out`; gaps between
        tensors keep their old bytes.

    Raises InvalidArgumentError (a ValueError) if there are no tensors or `out` is too small.
    Raises UnsupportedError with a tensor's name if the tensor's bytes cannot be read.
    """

    supports_multi_dtypes = True

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: Sequence[Any] | None = None,
        *,
        alignment: int = ALIGNMENT,
        out: torch.Tensor | None = None,
    ) -> None:
        self._names: list[str] = []
        self._starts: list[int] = []
        self._metadata: list[Any] | None = None
        if named_tensors is not None:
            self.flattened_tensor = self._fill(list(named_tensors), alignment, out)
            return
        if flattened_tensor is None or metadata is None:
            raise InvalidArgumentError(
                "a bucket needs named_tensors, or flattened_tensor and metadata"
            )
        self.flattened_tensor = flattened_tensor
        self._metadata = metadata if isinstance(metadata, list) else list(metadata)

    def _fill(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        alignment: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if not named_tensors:
            raise InvalidArgumentError("a bucket needs at least one tensor")
        self._names = [name for name, _ in named_tensors]
        table = describe([tensor for _, tensor in named_tensors], self._names)
        self._starts, end = table.offsets(alignment)
        if out is None:
            out = torch.empty(end, dtype=torch.uint8, device="cpu")
            if end != table.nbytes:  # gaps must not show old contents of the memory
                out.zero_()
        else:
            _check_out(out, end, alignment)
        pack(table, out.data_ptr(), end, self._starts)
        self._table = table.form()
        return out[:end]

    @property
    def metadata(self) -> list[Any]:
        """One FlattenedTensorMetadata for each tensor, in order; made on first use."""
        if self._metadata is None:
            rows = (self._table[i] for i in range(len(self._table)))
            self._metadata = [
                metadata_at(start, name, row[1], row[2])
                for name, row, start in zip(self._names, rows, self._starts, strict=True)
            ]
        return self._metadata

    def get_flattened_tensor(self) -> torch.Tensor:
        """The uint8 tensor that holds all tensors."""
        return self.flattened_tensor

    def get_metadata(self) -> list[Any]:
        """One entry for each tensor, in order."""
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of every entry: a view of the bucket, or a copy if the entry does not
        start at a multiple of its item size.  Raises LayoutError if the metadata does not fit
        the bucket."""
        flat = self.flattened_tensor
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise LayoutError(
                "bucket: expected a contiguous flat tensor of torch.uint8, but it is "
                f"{flat.dtype} of shape {tuple(flat.shape)} and stride {flat.stride()}"
            )
        return [(entry.name, _read_entry(flat, entry)) for entry in self.metadata]


def _check_out(out: torch.Tensor, nbytes: int, alignment: int) -> None:
    flat = out.dtype == torch.uint8 and out.dim() == 1 and out.is_contiguous()
    if not flat or out.device.type != "cpu":
        raise InvalidArgumentError(
            "out: expected a contiguous flat tensor of torch.uint8 in CPU memory, but it is "
            f"{out.dtype} of shape {tuple(out.shape)} and stride {out.stride()} on {out.device}"
        )
    if out.numel() < nbytes:
        raise InvalidArgumentError(f"out: it has {out.numel()} bytes, the tensors need {nbytes}")
    if out.data_ptr() % alignment:
        raise InvalidArgumentError(f"out: its address is not a multiple of alignment={alignment}")


def _read_entry(flat: torch.Tensor, entry: Any) -> torch.Tensor:
    start, end = entry.start_idx, entry.end_idx
    dtype, shape = entry.dtype, torch.Size(entry.shape)
    nbytes = math.prod(shape) * dtype.itemsize  # numel() wraps around
    if not 0 <= start <= end <= flat.numel() or end - start != nbytes:
        raise LayoutError(
            f"{entry.name}: {dtype} of shape {tuple(shape)} has {nbytes} bytes, but its place is "
            f"{start}:{end} in a bucket of {flat.numel()} bytes"
        )
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=flat.device)
    part = flat[start:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).reshape(shape)
