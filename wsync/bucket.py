"""Many tensors as one flat byte tensor: SGLang's FlattenedTensorBucket, filled in C.

The interface and the byte layout are those of `sglang.srt.weight_sync.tensor_bucket` (0.5.6 and
newer): each tensor's contiguous bytes at `start_idx:end_idx` of one uint8 tensor, beside a list
of metadata.  Buckets and metadata of either side can be read by the other.
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
    """Where one tensor lies in a bucket; `start_idx`, `end_idx` and `numel` count bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def metadata_at(
    start: int, name: str, dtype_name: str, shape: Sequence[int]
) -> FlattenedTensorMetadata:
    """That of a tensor whose bytes begin at `start`; its dtype by torch's name."""
    dtype = dtype_of(dtype_name)
    nbytes = math.prod(shape) * dtype.itemsize  # numel() wraps around
    return FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, start + nbytes, nbytes)


class FlattenedTensorBucket:
    """Named tensors in one flat uint8 tensor.

    Either `named_tensors` (CPU tensors, strided as they like; their bytes are copied) or a
    `flattened_tensor` with its `metadata` (nothing is copied).

    alignment: every tensor starts at a multiple of so many bytes, a power of two.  With 1 the
        bytes are exactly those of SGLang's class, which cannot read a tensor back whose start is
        not a multiple of its item size.
    out: a contiguous one-dimensional uint8 CPU tensor to fill, so that a bucket of which the
        memory is warm costs one copy.  The flattened tensor is its first bytes; gaps between
        tensors keep what was there.

    Raises InvalidArgumentError (a ValueError) for no tensors or a buffer that is too small,
    UnsupportedError for tensors whose bytes cannot be read, by name.
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
            raise InvalidArgumentError("a bucket of no tensors cannot be made")
        self._names = [name for name, _ in named_tensors]
        table = describe([tensor for _, tensor in named_tensors], self._names)
        self._starts, end = table.offsets(alignment)
        if out is None:
            out = torch.empty(end, dtype=torch.uint8, device="cpu")
            if end != table.nbytes:  # gaps must not show what the memory held before
                out.zero_()
        else:
            _check_out(out, end, alignment)
        pack(table, out.data_ptr(), end, self._starts)
        self._table = table.form()
        return out[:end]

    @property
    def metadata(self) -> list[Any]:
        """One FlattenedTensorMetadata a tensor, in order; made when first asked for."""
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
        """One entry a tensor, in order."""
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of every entry: views of the bucket, copies only where an entry does
        not start at a multiple of its item size.  Raises LayoutError for metadata that does not
        fit the bucket."""
        flat = self.flattened_tensor
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise LayoutError(
                f"bucket: {flat.dtype} of shape {tuple(flat.shape)} and stride {flat.stride()} "
                "instead of contiguous flat torch.uint8"
            )
        return [(entry.name, _read_entry(flat, entry)) for entry in self.metadata]


def _check_out(out: torch.Tensor, nbytes: int, alignment: int) -> None:
    flat = out.dtype == torch.uint8 and out.dim() == 1 and out.is_contiguous()
    if not flat or out.device.type != "cpu":
        raise InvalidArgumentError(
            f"out: {out.dtype} of shape {tuple(out.shape)} and stride {out.stride()} on "
            f"{out.device} instead of contiguous flat torch.uint8 in CPU memory"
        )
    if out.numel() < nbytes:
        raise InvalidArgumentError(f"out: {out.numel()} bytes, but the tensors need {nbytes}")
    if out.data_ptr() % alignment:
        raise InvalidArgumentError(f"out: starts at no multiple of the alignment {alignment}")


def _read_entry(flat: torch.Tensor, entry: Any) -> torch.Tensor:
    start, end = entry.start_idx, entry.end_idx
    dtype, shape = entry.dtype, torch.Size(entry.shape)
    nbytes = math.prod(shape) * dtype.itemsize  # numel() wraps around
    if not 0 <= start <= end <= flat.numel() or end - start != nbytes:
        raise LayoutError(
            f"{entry.name}: bytes {start}:{end} of a bucket of {flat.numel()} bytes, but "
            f"{dtype} of shape {tuple(shape)} has {nbytes}"
        )
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=flat.device)
    part = flat[start:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).reshape(shape)
