"""Finds where a function puts the elements of tensors: it is given tensors that number them.

load_weights is called a few times.  Each call brings one digit of every tensor's name, or of a
place along one of its axes.  A tensor is one vector or value, expanded, so that a large one takes
no memory.  What lies in a target after all calls says which element of which tensor it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from wsync._core import WsyncError
from wsync.machine.error_text import error_text
from wsync.probing.boxes import LONGEST
from wsync.probing.lines import Lines, raw
from wsync.probing.numbering import Made, Numbering, Source
from wsync.probing.pieces import PlacedBox
from wsync.probing.reading import Reading

# what load_weights is, or a part of it
Load = Callable[[Any], Any]


class RaisedError(Exception):
    """A load failed.  name: of the tensor that it had taken last."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error
        super().__init__(f"it raised {error_text(error)}")


class Overwriting:
    """Loads over targets whose bytes are inverted: what a load does not write differs for certain,
    and is put back without having been kept.

    Tensors that it is given are views of few elements, until it fails: it may have written to one,
    or have asked for its strides.
    """

    def __init__(self, load: Load, targets: Sequence[torch.Tensor]) -> None:
        self.targets = targets
        self._load = load
        self._inverted = self._whole = False

    def invert(self) -> None:
        self._inverted = not self._inverted
        for target in self.targets:
            raw(target).bitwise_not_()

    def load(self, sources: Sequence[Source], make: Callable[[Source], torch.Tensor]) -> None:
        """RaisedError where the load fails."""
        pairs = Made(sources, make, whole=self._whole)
        try:
            with torch.no_grad():
                self._load(pairs)
        except WsyncError:
            raise
        except Exception as error:
            if self._whole:
                raise RaisedError(pairs.last, error) from error
            self._whole = True
            self.load(sources, make)

    def put_back(self, places: Iterable[torch.Tensor] | None = None) -> None:
        """Has places that no load has written be as they were.  None: all of the targets; what a
        load has written is lost."""
        for place in self.targets if places is None else places:
            if self._inverted:
                raw(place).bitwise_not_()
        self._inverted = False


def probe(
    loads: Overwriting,
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    longest: int = LONGEST,
) -> list[PlacedBox]:
    """What a load brings to targets, as boxes that make them up.

    given: tensors whose values matter, brought as they are.  Targets share no elements.
    longest: step in which a box may go through a target.
    """
    device = loads.targets[0].device if loads.targets else "cpu"
    numbering = Numbering(sources, given, device)
    lines = [Lines(target) for target in loads.targets]
    for call in range(numbering.calls):
        loads.invert()
        loads.load(sources, functools.partial(numbering.tensor, call=call))
        for each in lines:
            each.after()
            if call == numbering.naming - 1 and each.written:
                each.choose(numbering.forms(each.corners))
    return [
        piece
        for number, each in enumerate(lines)
        for piece in Reading(number, each, numbering).pieces(longest)
    ]
