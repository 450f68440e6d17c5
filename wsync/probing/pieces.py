"""Pieces: boxes of sources and their places in targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from wsync.boxes import Box, outside, overlap

# (from, to): the conversions that a copy can make (csrc/core/layout/dtype.h)
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
    """A piece: a box of a source, and its place in a target.  If nothing is copied to the place,
    `why` gives the reason, and the box is a box of the target instead of a source.

    target: the number of the target.  name: the name of the source; "" if the piece has none.
    start, extent: the box.
    offset, strides: the place, in elements.  `offset` counts from the target's first element.
    why: UNWRITTEN, CONSTANT or COMPUTED; "" if the source is copied.
    """

    target: int
    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    why: str = ""

    def view(self, targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the place as a view of the target, with the shape of the box."""
        target = targets[self.target].detach()
        place = int(target.storage_offset()) + self.offset
        return target.as_strided(self.extent, self.strides, place)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the box as a view of a tensor that has the shape of the source."""
        ends = zip(self.start, self.extent, strict=True)
        return tensor[tuple(slice(at, at + count) for at, count in ends)]

    @property
    def box(self) -> Box:
        return self.start, self.extent

    def part(self, box: Box) -> PlacedBox:
        """Returns the piece for a box that is inside this one."""
        if box == self.box:
            return self
        moved = zip(box[0], self.start, self.strides, strict=True)
        offset = self.offset + sum((at - start) * stride for at, start, stride in moved)
        return replace(self, start=box[0], extent=box[1], offset=offset)


def kept_as(source: torch.dtype, target: torch.dtype) -> torch.dtype | None:
    """Returns the dtype in which copies deliver a source to a target, or None if they cannot.
    Dtypes of one byte hold codes, and copies do not change codes."""
    if source == target or source.itemsize == target.itemsize == 1:
        return source
    return target if (source, target) in _CASTS else None


def as_kept(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values that a target of a dtype holds after a copy of a tensor."""
    return tensor.view(dtype) if tensor.element_size() == dtype.itemsize == 1 else tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A copy within the targets.  The trainer delivers elements to one place, and the targets also
    keep them in a second one."""

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
    """Returns pieces that have every element of a source only once, and the copies to its other
    places.  An element is delivered to the target whose elements have the most bytes."""
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
