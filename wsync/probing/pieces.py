"""Boxes of sources in targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from wsync.boxes import Box, outside, overlap

# conversions that copies can do on their way (csrc/core/layout/dtype.h)
_CASTS: Final = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
}
UNWRITTEN: Final = "unwritten"
CONSTANT: Final = "constant"
COMPUTED: Final = "computed"


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a source in a target, or, with what is none (`why`), a box of the target.

    start, extent: by the axes of the source.  offset, strides: in elements of the target's storage,
    counted from its first element.
    """

    target: int
    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    why: str = ""

    def view(self, targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where it lies, by the axes of the source."""
        target = targets[self.target].detach()
        place = int(target.storage_offset()) + self.offset
        return target.as_strided(self.extent, self.strides, place)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box of a source."""
        ends = zip(self.start, self.extent, strict=True)
        return tensor[tuple(slice(at, at + count) for at, count in ends)]

    @property
    def box(self) -> Box:
        return self.start, self.extent

    def part(self, box: Box) -> PlacedBox:
        """Where a box that lies in this one lies."""
        moved = zip(box[0], self.start, self.strides, strict=True)
        offset = self.offset + sum((at - start) * stride for at, start, stride in moved)
        return replace(self, start=box[0], extent=box[1], offset=offset)


def kept_as(source: torch.dtype, target: torch.dtype) -> torch.dtype | None:
    """The dtype in which copies bring a source to a target; None: they cannot.  Codes of one byte
    stay as they are, by whatever name."""
    if source == target or source.itemsize == target.itemsize == 1:
        return source
    return target if (source, target) in _CASTS else None


def as_kept(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a copy of a tensor is in a target of a dtype."""
    return tensor.view(dtype) if tensor.element_size() == dtype.itemsize == 1 else tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A further place of elements that are delivered once."""

    source: PlacedBox
    target: PlacedBox

    def run(self, targets: Sequence[torch.Tensor]) -> None:
        target = self.target.view(targets)
        target.copy_(as_kept(self.source.view(targets), target.dtype))


def by_name(pieces: Iterable[PlacedBox]) -> dict[str, list[PlacedBox]]:
    found: dict[str, list[PlacedBox]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def once(
    pieces: Iterable[PlacedBox], targets: Sequence[torch.Tensor]
) -> tuple[list[PlacedBox], list[LocalCopy]]:
    """Every element of a source in one place, where it is kept most exactly, and copies of it."""
    found: list[PlacedBox] = []
    copies: list[LocalCopy] = []
    for mine in by_name(pieces).values():
        mine.sort(key=lambda piece: -targets[piece.target].element_size())
        first: list[PlacedBox] = []
        for piece in mine:
            rest = [piece.box]
            for other in first:
                shared = (overlap(box, other.box) for box in rest)
                copies += [LocalCopy(other.part(b), piece.part(b)) for b in shared if b is not None]
                rest = list(itertools.chain.from_iterable(outside(b, other.box) for b in rest))
            first += [piece.part(box) for box in rest]
        found += first
    return found, copies
