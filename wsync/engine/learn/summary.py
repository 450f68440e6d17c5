"""What a recording says, as plain values for people and for JSON."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from wsync.dtypes import dtype_of
from wsync.engine.learn.recorder import Recording

_Model = Sequence[tuple[str, str, tuple[int, ...], int]]


def describe(recording: Recording, model: _Model) -> dict[str, Any]:
    """The fields of wsync.inspection.WorkerReport that a recording knows."""
    places = _Places(recording)
    tensors: list[dict[str, Any]] = []
    model_nbytes = kept = 0
    for name, dtype, shape, _ in model:
        item = dtype_of(dtype).itemsize
        nbytes = math.prod(shape) * item
        model_nbytes += nbytes
        pieces = recording.pieces.get(name, [])
        if pieces:  # narrowing is done before anything is sent, widening afterwards
            sent = min(item, dtype_of(recording.kept[name]).itemsize)
            kept += sum(math.prod(piece.box.extent) for piece in pieces) * sent
        if name in recording.fallback:
            kept += nbytes
        if pieces:
            boxes = [
                {
                    "into": places.name(piece.area, piece.box.address),
                    "start": list(piece.box.start),
                    "extent": list(piece.box.extent),
                }
                for piece in pieces
                if places.known(piece.area)  # others are there to be compared
            ]
            facts = {"name": name, "dtype": dtype, "shape": list(shape), "boxes": boxes}
            tensors.append({**facts, "kept_as": recording.kept[name]})
    return {
        "unlearnt": "",
        "model_tensors": len(model),
        "model_nbytes": model_nbytes,
        "kept_nbytes": kept,
        "fills": len(recording.fills),
        "copies": len(recording.copies),
        "fallbacks": dict(recording.fallback),
        "skipped": list(recording.skipped),
        "twins": [[twin.name, twin.other] for twin in recording.twins],
        "unwritten": [list(pair) for pair in recording.unwritten],
        "tensors": tensors,
    }


class _Places:
    """Names of the tensors that areas consist of."""

    def __init__(self, recording: Recording) -> None:
        self._areas: dict[int, list[tuple[int, str]]] = {}
        for path, _, _, _, area, offset in recording.facts:
            self._areas.setdefault(area, []).append((offset, path))
        for found in self._areas.values():
            # of tensors that begin at one place the first is named
            found.sort(key=lambda place: place[0])

    def known(self, area: int) -> bool:
        return area in self._areas

    def name(self, area: int, offset: int) -> str:
        found = self._areas[area]
        last = bisect.bisect_right(found, offset, key=lambda place: place[0]) - 1
        start = found[last][0]
        return found[bisect.bisect_left(found, start, key=lambda place: place[0])][1]
