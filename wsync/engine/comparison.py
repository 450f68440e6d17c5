"""Compares what an update brings with what a worker holds, instead of loading it."""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from wsync import _core
from wsync.boxes import contiguous_strides
from wsync.machine.device import GpuBytes, await_torch
from wsync.module_tensors import dtype_of, same_bytes
from wsync.probing.pieces import LocalCopy, as_kept

_BATCH_NBYTES: Final = 64 << 20  # that are copied at once, unless a piece has more
_ALIGNMENT: Final = 16
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Piece(NamedTuple):
    """Elements that one round brings and one tensor holds.  where: their indices in the trainer's
    tensor, by axis.  held: a view of the bits that the worker holds.  brought: a view of the bits
    that come; None if a copy converts them or moves them to another device."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: tuple[range, ...]
    held: torch.Tensor
    brought: torch.Tensor | None


class Comparison:
    """Compares the rounds of an update bit by bit with what its copies would have filled.  If these
    copies convert elements, the same copies are made to scratch memory first.  Nothing else is
    written.

    ring, manifest: what the rounds bring.  lent: the trainer's memory of the manifest's first
    buffers, which are compared with round 0.  layout, tensors: the boxes that the worker holds, by
    buffer.  Boxes of other buffers are not compared.  timeout: seconds for each copy.

    different: the tensors that differ, each with the indices of an element that does.
    """

    def __init__(
        self,
        ring: _core.Memory,
        manifest: _core.Layout,
        lent: _core.BufferTable | None,
        stream: _core.Stream,
        layout: _core.Layout,
        tensors: Sequence[torch.Tensor],
        timeout: float,
    ) -> None:
        self._manifest, self._stream, self._timeout = manifest, stream, timeout
        self._lent = _core.BufferTable([]) if lent is None else lent
        spans = [(ring.address, ring.nbytes)] * manifest.buffer_count()
        self._ring = _core.BufferTable(spans, ring)
        self._pieces = defaultdict[int, list[_Piece]](list)  # by the manifest's buffers
        self._names = set[str]()
        self._nbytes = 0
        self.different: dict[str, list[int]] = {}
        _core.BufferTable.of(_core.describe(tensors, gpu=True))  # StateError while an engine sleeps
        boxes: dict[str, list[tuple[str, _core.Shard, torch.Tensor]]] = {}
        for index in range(layout.tensor_count):
            name, dtype, _, _ = layout.tensor(index)
            mine = [shard for shard in layout.shards(index) if shard.buffer < len(tensors)]
            boxes[name] = [(dtype, box, _bits(tensors[box.buffer], dtype, box)) for box in mine]
        self._wanted = sum(held.nbytes for mine in boxes.values() for _, _, held in mine)
        for index in range(manifest.tensor_count):
            name, sent, shape, _ = manifest.tensor(index)
            for shard in manifest.shards(index):
                for dtype, box, held in boxes.get(name, ()):
                    where = tuple(map(_common, _indices(shard), _indices(box)))
                    if not all(where):
                        continue
                    part, brought = held[tuple(map(_part, where, _indices(box)))], None
                    if sent == dtype and not any(shard.affine) and self._is_near(held):
                        bits = _bits(self._memory(shard.buffer, held), dtype, shard)
                        brought = bits[tuple(map(_part, where, _indices(shard)))]
                    piece = _Piece(name, dtype, shape, where, part, brought)
                    self._pieces[shard.buffer].append(piece)

    def compare(self, round: int) -> None:
        """Compares a round, which is in the ring."""
        lent = len(self._lent)
        if round == 0:
            pieces = [piece for buffer in range(lent) for piece in self._pieces[buffer]]
            self._compare(pieces, _core.ALL_BUFFERS, self._lent)
        self._compare(self._pieces[lent + round], lent + round, self._ring)

    def compare_copies(self, copies: Iterable[LocalCopy], tensors: Sequence[torch.Tensor]) -> None:
        """Compares the second places of elements, which are copied within the tensors."""
        for copy in copies:
            target = copy.target.view(tensors)
            if not same_bytes(as_kept(copy.source.view(tensors), target.dtype), target):
                self.different[copy.target.name] = list(copy.target.start)

    def facts(self) -> dict[str, Any]:
        """Returns the number of tensors that were compared, wholly or in part, their bytes, and the
        tensors that differ.  ProtocolError: the rounds have not brought all bytes."""
        if self._nbytes < self._wanted:
            raise _core.ProtocolError(f"{self._nbytes} bytes came instead of {self._wanted}")
        return {"tensors": len(self._names), "nbytes": self._nbytes, "different": self.different}

    def _is_near(self, tensor: torch.Tensor) -> bool:
        """Whether what comes is on the device of a tensor, for torch."""
        return (tensor.device.index if tensor.is_cuda else -1) == self._stream.device.ordinal

    def _memory(self, buffer: int, like: torch.Tensor) -> torch.Tensor:
        """What comes in a buffer, in whole elements as those of a tensor."""
        lent = buffer < len(self._lent)
        address, nbytes = self._lent[buffer] if lent else self._ring[buffer]
        nbytes -= nbytes % like.element_size()
        if like.is_cuda:
            return torch.as_tensor(GpuBytes(address, nbytes), device=like.device)
        array = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8)

    def _compare(self, pieces: Sequence[_Piece], buffer: int, sources: _core.BufferTable) -> None:
        self._note([(piece, piece.brought) for piece in pieces if piece.brought is not None])
        for batch in _batches([piece for piece in pieces if piece.brought is None]):
            self._note(list(zip(batch, self._copy(batch, buffer, sources), strict=True)))

    def _note(self, found: Sequence[tuple[_Piece, torch.Tensor]]) -> None:
        """Compares the bits of pieces with those that have come."""
        same = _same([(piece.held, brought) for piece, brought in found])
        for (piece, brought), equal in zip(found, same, strict=True):
            self._names.add(piece.name)
            self._nbytes += brought.nbytes
            if not equal and piece.name not in self.different:
                first = int((piece.held != brought).flatten().byte().argmax())
                strides = contiguous_strides(brought.shape)
                self.different[piece.name] = [
                    indices[first // stride % len(indices)]
                    for indices, stride in zip(piece.where, strides, strict=True)
                ]

    def _copy(
        self, pieces: Sequence[_Piece], buffer: int, sources: _core.BufferTable
    ) -> list[torch.Tensor]:
        """Copies pieces to scratch memory; returns the bits of each."""
        builder, places, end = _core.LayoutBuilder(), list[int](), 0
        for name, dtype, shape, where, held, _ in pieces:
            start, extent = [each.start for each in where], held.shape
            strides = [step * held.element_size() for step in contiguous_strides(extent)]
            steps = [each.step for each in where]
            builder.add_shard(name, dtype, shape, start, extent, 0, end, strides, steps=steps)
            places.append(end)
            end += -(-held.nbytes // _ALIGNMENT) * _ALIGNMENT
        flat = torch.empty(end, dtype=torch.uint8, device=pieces[0].held.device)
        await_torch(self._stream.device, self._timeout)  # which may still use this memory
        route = _core.Route(self._manifest, builder.build())
        target = _core.BufferTable([(flat.data_ptr(), end)], flat)
        self._stream.copy(route, buffer, _core.LOCAL, sources, target)
        self._stream.synchronize(self._timeout)
        return [
            flat[at : at + piece.held.nbytes].view(piece.held.dtype).view(piece.held.shape)
            for at, piece in zip(places, pieces, strict=True)
        ]


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    ends = itertools.accumulate(piece.held.nbytes for piece in pieces)
    numbered = [(end // _BATCH_NBYTES, piece) for end, piece in zip(ends, pieces, strict=True)]
    for _, batch in itertools.groupby(numbered, lambda each: each[0]):
        yield [piece for _, piece in batch]


def _same(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether the bits of each pair are equal.  Waits for a GPU once."""
    wide = [_wide(*pair) for pair in pairs]
    if not wide or not wide[0][0].is_cuda:
        return [one.equal(other) for one, other in wide]
    found: list[bool] = torch.stack([(one == other).all() for one, other in wide]).tolist()
    return found


def _wide(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the same bits with fewer elements, which are compared faster, if there are any."""
    try:
        return one.view(torch.int64), other.view(torch.int64)
    except RuntimeError:
        return one, other


def _bits(tensor: torch.Tensor, dtype: str, box: _core.Shard) -> torch.Tensor:
    """A view of the bits that a tensor holds of a box."""
    bits = tensor.detach().view(_BITS[dtype_of(dtype).itemsize])
    item = bits.element_size()
    strides = [stride // item for stride in box.strides]
    return bits.as_strided(box.extent, strides, int(bits.storage_offset()) + box.offset // item)


def _indices(box: _core.Shard) -> list[range]:
    """The indices of a box, by axis."""
    found = zip(box.start, box.extent, box.steps, strict=True)
    return [range(start, start + count * step, step) for start, count, step in found]


def _common(one: range, other: range) -> range:
    """The indices in both ranges, whose steps are equal, or 1 in one of them."""
    fine, coarse = sorted((one, other), key=lambda each: each.step)
    ends = (max(fine.start, coarse.start), min(fine.stop, coarse.stop))
    first, last = (max(0, -((coarse.start - end) // coarse.step)) for end in ends)
    found = coarse[first:last]
    return found if found and found[0] in fine else range(0)


def _part(indices: range, of: range) -> slice:
    """The place of some indices among others."""
    first = of.index(indices[0])
    return slice(first, of.index(indices[-1]) + 1, indices.step // of.step)
