"""Checks that a load still does what was learnt of it, without anything from a trainer.

Some tensors are read back from the places that they were learnt to be loaded to, with zeros where
other workers have the rest.  The places are inverted, and the load brings the tensors once more:
every byte has to return.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from wsync.module_tensors import checksum_of
from wsync.probing.learn import LearntLoad
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import PlacedBox, as_kept
from wsync.probing.probe import Load

NBYTES: Final = 64 << 20  # of tensors that are loaded at a time
SAMPLE_NBYTES: Final = 4 << 20
_NUMBER: Final = re.compile(r"\d+")
_STRIDE: Final = 7919  # units that follow each other in turn lie far apart


class AuditError(Exception):
    """A load puts tensors elsewhere than it was learnt to.  names: some of them."""

    def __init__(self, names: Sequence[str], error: Exception | None) -> None:
        self.names = names
        why = f": {error}" if error is not None else ""
        super().__init__(f"load_weights loads {', '.join(names[:3])} elsewhere by now{why}")


class Audit:
    """Audits a load by samples: of tensors called alike, those of one layer, or one expert.

    Tensors with the same numbers in their names go together: a load may wait for all of them.
    Samples rotate.  What a load computes cannot be read back, and is not audited.
    """

    def __init__(
        self,
        load: Load,
        learnt: LearntLoad,
        sources: Iterable[Source],
        nbytes: int = NBYTES,
    ) -> None:
        self._load, self._most = load, nbytes
        self._sample = min(SAMPLE_NBYTES, nbytes)
        self._places: dict[str, list[PlacedBox]] = {}
        for piece in (*learnt.pieces, *(copy.target for copy in learnt.copies)):
            self._places.setdefault(piece.name, []).append(piece)
        self._known = {source.name: source for source in sources if source.name in self._places}
        units: dict[tuple[str, ...], list[str]] = {}
        for name in self._known:
            units.setdefault(tuple(_NUMBER.findall(name)), []).append(name)
        self._alike: dict[tuple[str, ...], list[list[str]]] = {}
        for names in units.values():
            kind = tuple(_NUMBER.sub("#", name) for name in names)
            self._alike.setdefault(kind, []).append(names)
        self._turn = 0

    def is_possible(self, targets: Sequence[torch.Tensor]) -> bool:
        """Whether the load does with a sample: some want all tensors in one call."""
        names = self._next()
        touched = {piece.target for name in names for piece in self._places[name]}
        before = [checksum_of(targets[number]) for number in touched]
        try:
            self._check(names, targets)
        except AuditError:
            return False
        return [checksum_of(targets[number]) for number in touched] == before

    def some(self, targets: Sequence[torch.Tensor]) -> list[str]:
        """Checks the next sample.  AuditError where that fails; all is as it was, then.

        targets: those of the load, wherever they lie by now.
        """
        names = self._next()
        self._check(names, targets)
        return names

    def all(self, targets: Sequence[torch.Tensor]) -> None:
        """Checks every tensor, in parts."""
        for units in self._alike.values():
            for names in self._parts(units):
                self._check(names, targets)

    def _next(self) -> list[str]:
        names: list[str] = []
        for units in self._alike.values():
            unit = units[self._turn * _STRIDE % len(units)]
            names += self._within(unit, self._sample - sum(map(self._nbytes, names)))
        self._turn += 1
        return names

    def _within(self, unit: Sequence[str], room: int) -> list[str]:
        found = []
        for name in unit:
            if (nbytes := self._nbytes(name)) <= room:
                found.append(name)
                room -= nbytes
        return found

    def _parts(self, units: Sequence[Sequence[str]]) -> Iterator[list[str]]:
        part: list[str] = []
        for unit in units:
            if part and sum(map(self._nbytes, (*part, *unit))) > self._most:
                yield part
                part = []
            part += unit
        yield part

    def _nbytes(self, name: str) -> int:
        _, dtype, shape = self._known[name]
        return math.prod(shape) * dtype.itemsize

    def _check(self, names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
        pairs, kept = [], []
        with torch.no_grad():
            for name in names:
                whole, places = self._read_back(name, targets)
                pairs.append((name, whole))
                kept += [(name, place, place.clone()) for place in places]
            for _, place, _ in kept:
                place.bitwise_not_()
            raised: Exception | None = None
            try:
                self._load(pairs)
            except Exception as error:  # a load may ask for more tensors when it has loaded these
                raised = error
            wrong = [name for name, place, was in kept if not torch.equal(place, was)]
            if wrong:
                for _, place, was in kept:
                    place.copy_(was)
                raise AuditError(list(dict.fromkeys(wrong)), raised)

    def _read_back(
        self, name: str, targets: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A tensor as far as this worker has it, and its places, as integers."""
        _, dtype, shape = self._known[name]
        pieces = self._places[name]
        views = [piece.view(targets) for piece in pieces]
        whole = torch.zeros(shape, dtype=dtype, device=views[0].device)
        for piece, view in zip(pieces, views, strict=True):
            piece.of(whole).copy_(as_kept(view, dtype))
        return whole, [raw(view) for view in views]
