"""Finds where a function puts the elements of tensors: it is given tensors that number them.

load_weights is called a few times.  Each call brings one digit of every tensor's name, or of a
place along one of its axes; the last brings a digit of the name counted from the end, in the
reverse order.  A tensor is one vector or value, expanded, so that a large one takes no memory.
What lies in a target after all calls says which element of which tensor it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from wsync._core import WsyncError
from wsync.machine.error_text import error_text
from wsync.module_tensors.held import usable
from wsync.probing.lines import Lines, raw
from wsync.probing.numbering import Made, Numbering, Source
from wsync.probing.pieces import PlacedBox
from wsync.probing.reading import Reading

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


class RaisedError(Exception):
    """A load failed.  name: of the tensor that it was at work on."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error
        super().__init__(f"it raised {error_text(error)}")


def _at_work(trace: TracebackType | None, pairs: Any) -> str:
    """The name of a tensor that the innermost functions have in their variables, or that was taken
    last."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            if isinstance(value, torch.Tensor) and usable(value):
                name = pairs.names.get(value.untyped_storage().data_ptr()) if value.numel() else ""
                if name:
                    return str(name)
    return str(pairs.last)


class Overwriting:
    """Loads over targets whose bytes are inverted: what a load does not write differs for certain,
    and is put back without having been kept."""

    def __init__(self, load: Load, targets: Sequence[torch.Tensor]) -> None:
        self.targets = targets
        self._load = load
        self._inverted = False

    def invert(self) -> None:
        self._inverted = not self._inverted
        for target in self.targets:
            raw(target).bitwise_not_()

    def load(self, pairs: Made) -> None:
        """RaisedError where the load fails."""
        try:
            with torch.no_grad():
                self._load(pairs)
        except WsyncError:
            raise
        except Exception as error:
            raise RaisedError(_at_work(error.__traceback__, pairs), error) from error

    def put_back(self) -> None:
        """What no load has written is as it was; what one has written is lost."""
        if self._inverted:
            self.invert()


def probe(
    loads: Overwriting, sources: Sequence[Source], given: Mapping[str, torch.Tensor]
) -> list[PlacedBox]:
    """What a load brings to targets, as boxes that make them up.

    given: tensors whose values matter, brought as they are.  Targets share no elements.
    """
    device = loads.targets[0].device if loads.targets else "cpu"
    numbering = Numbering(sources, given, device)
    lines = [Lines(target) for target in loads.targets]
    for call in range(numbering.calls):
        loads.invert()
        for each in lines:
            each.before()
        try:
            loads.load(numbering.pairs(call))
        except RaisedError:
            if numbering.whole:
                raise
            numbering.whole = True  # it may have written to a tensor, or asked for its strides
            loads.load(numbering.pairs(call))
        for each in lines:
            each.after()
            if call == numbering.naming - 1 and each.written:
                each.choose(numbering.forms(each.corners))
    return [
        piece
        for number, each in enumerate(lines)
        for piece in Reading(number, each, numbering).pieces()
    ]
