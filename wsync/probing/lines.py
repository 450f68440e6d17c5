"""What lies in the corners of a tensor's parts, and along lines through them.

A part is what one source is loaded to.  Its corner says which source, and which element; lines say
along which axes of the source the axes of the tensor go.  One line serves all parts that sources of
the same forms are loaded to in the same order.  Random values refute that where a part has more
structure than its lines show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

_SAMPLE: Final = 61  # elements of a slice that are looked at to find parts
_WHOLE: Final = 1 << 16  # elements of a tensor that is looked at everywhere
_RAW: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, as an integer."""
    return tensor.detach().view(_RAW[tensor.element_size()])


class Lines:
    """What lies in the corners of a tensor's parts and along its axes, after each of some loads.

    starts: by axis, the first place of each part; part: by axis and place, the part's number.
    corners: by load, shaped by parts.  chosen: by axis, the number of the line that serves a part,
    shaped by parts along the other axes; first: by axis and line, the first part that it serves,
    counted along the other axes.
    lines: by load from `choose` on and axis: (line, place).
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
        """Reads the places after a load.  All bytes were inverted before each load."""
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
        """Chooses lines.  forms: shaped by parts, the same number for sources of one form."""
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
        """From here on, what lies at these places, in elements from the first one, is looked at."""
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
        """All combinations of places on axes."""
        found = torch.zeros((), dtype=torch.int64, device="cpu")
        for places, step in zip(chosen, self.tensor.stride(), strict=True):
            found = found.unsqueeze(-1) + torch.tensor(places, device="cpu") * step
        return found

    def _slices(self, axis: int, count: int) -> list[Sequence[int]]:
        """All places on an axis, and so many combinations, evenly, of those on others; 0: all."""
        each = math.ceil(count ** (1 / max(len(self.shape) - 1, 1)))
        return [
            range(extent)
            if other == axis or not count
            else sorted({place * (extent - 1) // max(each - 1, 1) for place in range(each)})
            for other, extent in enumerate(self.shape)
        ]


def _changes(before: torch.Tensor, after: torch.Tensor, axis: int) -> list[int]:
    """Where on an axis something else begins."""
    same = before == after
    seen = torch.stack([after.masked_fill(same, 0), same.to(after.dtype)])
    rows = seen.movedim(axis + 1, 0).reshape(after.shape[axis], -1)
    found = (rows[1:] != rows[:-1]).any(1).nonzero().flatten() + 1
    return [0, *found.tolist()]


class Field:
    """Numbers of all elements of a tensor, made of those of corners and lines.

    corners: shaped by parts; lines: by axis: (line, place).
    """

    def __init__(self, seen: Lines, corners: torch.Tensor, lines: Sequence[torch.Tensor]) -> None:
        self._seen, self._corners = seen, corners
        self._steps = [
            line - line[:, torch.tensor(starts, device="cpu")][:, part]
            for line, starts, part in zip(lines, seen.starts, seen.part, strict=True)
        ]

    def like(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """The same where the steps from slice to slice are."""
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
        """The parts of leading places, and there the numbers of the first elements of parts."""
        parts = tuple(
            int(part[place]) for part, place in zip(self._seen.part, places, strict=False)
        )
        found = self._corners[parts]
        for axis, place in enumerate(places):
            if place != self._seen.starts[axis][parts[axis]]:
                line = self._seen.chosen[axis][(*parts[:axis], *parts[axis + 1 :])]
                found = found + self._steps[axis][:, place][line]
        return parts, found.reshape(len(found), -1)
