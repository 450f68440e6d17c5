"""Reads the corners of a tensor's parts, and the lines through them.

A part is a block of the tensor that at most one source is loaded to.  The value in a part's corner
tells which source, and which element of it, was loaded there.  The values along a line through the
corner tell which source axis each tensor axis follows.  A line goes through a whole row of parts.
It also serves other rows, if sources of the same dtypes and shapes are loaded to them in the same
order.  A part may be less regular than its lines show.  Random values refute this later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

_SAMPLE: Final = 61  # to find parts, about this number of elements of each slice is read
_WHOLE: Final = 1 << 16  # a tensor with at most this number of elements is read whole
_RAW: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of each element as an integer."""
    return tensor.detach().view(_RAW[tensor.element_size()])


class Lines:
    """The values in the corners of a tensor's parts, and along lines, after each call of a load.

    The parts form a grid.  All attributes are lists, and all but `corners` and `lines` have one
    item for each axis of the tensor.

    starts: the indices at which parts begin.  part: for each index, the number of its part.
    corners: for each call, the values in the corners; such a tensor has the shape of the grid.
    chosen: for each row of parts along the axis, the number of its line.  first: for each line, the
    number of the first row that it serves.
    lines: for each call after `choose`, and for each axis, the values along lines: (line, index).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if tensor.dim() else tensor.view(1)
        self.shape = tuple(self.tensor.shape)
        self.starts: list[list[int]] = []
        self.part: list[torch.Tensor] = []
        self.corners: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []
        self.first: list[list[int]] = []
        self.lines: list[list[torch.Tensor]] = []
        count = 0 if tensor.numel() <= _WHOLE else _SAMPLE
        self._see([self._cross(self._slices(axis, count)) for axis in range(len(self.shape))])
        self._before = [~each for each in self._look()]

    def after(self) -> None:
        """Reads corners and lines after a call.  All bytes were inverted before each call."""
        if not self.starts:
            for axis, (before, now) in enumerate(zip(self._before, self._look(), strict=True)):
                starts = _changes(before, now, axis)
                places = torch.arange(self.shape[axis], device="cpu")
                at = torch.tensor(starts, device="cpu")
                self.starts.append(starts)
                self.part.append(torch.bucketize(places, at, right=True) - 1)
            self._see([self._cross(self.starts)])
        corners, *lines = (each.view(self.tensor.dtype) for each in self._look())
        self.corners.append(corners)
        if lines:
            self.lines.append(lines)

    def choose(self, forms: torch.Tensor) -> None:
        """Chooses lines.  forms: for each part, a number that is the same for all sources of the
        same dtype and shape."""
        seen = [self._cross(self.starts)]
        for axis, extent in enumerate(self.shape):
            rows = forms.movedim(axis, -1)
            kinds, chosen = torch.unique(
                rows.reshape(-1, rows.shape[-1]), dim=0, return_inverse=True
            )
            first = [int((chosen == kind).nonzero()[0]) for kind in range(len(kinds))]
            others = self._cross([s if n != axis else [0] for n, s in enumerate(self.starts)])
            line = torch.arange(extent, device="cpu") * self.tensor.stride(axis)
            seen.append(others.flatten()[first].view(-1, 1) + line)
            self.first.append(first)
            self.chosen.append(chosen.view(rows.shape[:-1]))
        self._see(seen)

    def _see(self, places: list[torch.Tensor]) -> None:
        """Sets which elements `_look` reads.  places: their offsets from the first element."""
        self._shapes = [each.shape for each in places]
        self._places = torch.cat([each.flatten() for each in places]).to(self.tensor.device)

    def _look(self) -> list[torch.Tensor]:
        flat = raw(self.tensor)
        steps = zip(self.shape, flat.stride(), strict=True)
        flat = flat.as_strided((1 + sum((n - 1) * step for n, step in steps),), (1,))
        found = flat.index_select(0, self._places).cpu()
        sizes = [shape.numel() for shape in self._shapes]
        parts = found.split(sizes)  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _cross(self, chosen: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns the offsets of all combinations of indices.  chosen: the indices on each axis."""
        found = torch.zeros((), dtype=torch.int64, device="cpu")
        for places, step in zip(chosen, self.tensor.stride(), strict=True):
            found = found.unsqueeze(-1) + torch.tensor(places, device="cpu") * step
        return found

    def _slices(self, axis: int, count: int) -> list[Sequence[int]]:
        """Returns the indices to read on each axis: all indices of `axis`, and of the other axes
        evenly spaced ones in about `count` combinations.  If `count` is 0, returns all indices."""
        each = math.ceil(count ** (1 / max(len(self.shape) - 1, 1)))
        return [
            range(extent)
            if other == axis or not count
            else sorted({place * (extent - 1) // max(each - 1, 1) for place in range(each)})
            for other, extent in enumerate(self.shape)
        ]


def _changes(before: torch.Tensor, after: torch.Tensor, axis: int) -> list[int]:
    """Returns the indices on an axis at which parts begin.  before, after: the values before and
    after a call."""
    same = before == after
    seen = torch.stack([after.masked_fill(same, 0), same.to(after.dtype)])
    rows = seen.movedim(axis + 1, 0).reshape(after.shape[axis], -1)
    found = (rows[1:] != rows[:-1]).any(1).nonzero().flatten() + 1
    return [0, *found.tolist()]


class Field:
    """The numbers of all elements of a tensor, computed from the numbers in corners and lines.

    corners: the number in the corner of each part.  lines: for each axis, the numbers along lines:
    (line, index).
    """

    def __init__(self, seen: Lines, corners: torch.Tensor, lines: Sequence[torch.Tensor]) -> None:
        self._seen, self._corners = seen, corners
        self._steps = [
            line - line[:, torch.tensor(starts, device="cpu")][:, part]
            for line, starts, part in zip(lines, seen.starts, seen.part, strict=True)
        ]

    def like(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a key for the slice at leading indices.  If two slices have equal keys, the steps
        in both are equal."""
        parts, found = self._slices(places)
        lines = self._seen.chosen[len(places)][parts].flatten()
        return len(places), *lines.tolist(), *(found[1:] - found[:-1]).flatten().tolist()

    def read(self, places: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        """See wsync.probing.boxes.Read."""
        axis = len(places)
        parts, found = self._slices(places)
        steps = self._steps[axis][:, low:high].t()[:, self._seen.chosen[axis][parts].flatten()]
        return found[self._seen.part[axis][low:high]] + steps

    def _slices(self, places: tuple[int, ...]) -> tuple[tuple[int, ...], torch.Tensor]:
        """Finds the slice at leading indices.  Returns the number of its part on each leading axis,
        and the numbers of the elements with which parts begin in this slice."""
        parts = tuple(
            int(part[place]) for part, place in zip(self._seen.part, places, strict=False)
        )
        found = self._corners[parts]
        for axis, place in enumerate(places):
            if place != self._seen.starts[axis][parts[axis]]:
                line = self._seen.chosen[axis][(*parts[:axis], *parts[axis + 1 :])]
                found = found + self._steps[axis][:, place][line]
        return parts, found.reshape(len(found), -1)
