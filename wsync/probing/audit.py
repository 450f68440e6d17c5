"""Checks that a load still does what was learnt of it.  The trainer sends nothing for this check.

Some sources are read back from their places in the targets, with zeros for the elements that other
workers keep.  Then the bytes of these places are inverted, and the load is called with the sources.
Afterwards every byte must be as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from wsync.module_tensors import checksum_of, name_of
from wsync.module_tensors.names import JOINED, group_of, key_of, weight_of
from wsync.probing.learn import LearntLoad
from wsync.probing.lines import raw
from wsync.probing.numbering import Source
from wsync.probing.pieces import as_kept, by_name
from wsync.probing.probe import Load

MOST_NBYTES: Final = 64 << 20  # a unit with more bytes is not audited
SAMPLE_NBYTES: Final = 4 << 20  # the usual size of a sample
SHARE: Final = 1000  # if this is more, a sample has 1/SHARE of the model's bytes
_STRIDE: Final = 7919  # successive samples take units at this distance


class AuditError(Exception):
    """A load puts tensors in other places than it did when it was learnt."""

    def __init__(self, names: Sequence[str], error: Exception | None) -> None:
        why = f": {error}" if error is not None else ""
        listed = ", ".join(names[:3])
        super().__init__(f"load_weights loads {listed} to other places than before{why}")


class Audit:
    """Audits a load by samples.

    A unit is one source, or several sources if a load may have to wait until it has them all.  A
    sample takes one of the units whose names differ only in numbers, and later samples take others.
    What a load computes cannot be read back, so it is not audited.
    """

    def __init__(
        self,
        load: Load,
        learnt: LearntLoad,
        sources: Iterable[Source],
        nbytes: int = SAMPLE_NBYTES,
    ) -> None:
        self._load = load
        self._places = by_name((*learnt.pieces, *(copy.target for copy in learnt.copies)))
        self._known = {source.name: source for source in sources if source.name in self._places}
        units: dict[object, list[str]] = {}
        for name, dtype, _ in self._known.values():
            together = group_of(name, JOINED) or weight_of(name, name_of(dtype))
            units.setdefault(together or name, []).append(name)
        kinds: dict[tuple[str, ...], deque[list[str]]] = {}
        for names in units.values():
            if self._nbytes(names) <= MOST_NBYTES:
                kind = tuple(key_of(name) for name in names)
                kinds.setdefault(kind, deque()).append(names)
        self._kinds = deque(kinds.values())
        self._room = max(nbytes, self._nbytes(self._known) // SHARE)

    def is_possible(self, targets: Sequence[torch.Tensor]) -> bool:
        """Whether the load can be called with a sample.  Some loads need all sources at once."""
        names = self._next()
        touched = {piece.target for name in names for piece in self._places[name]}
        before = [checksum_of(targets[number]) for number in touched]
        try:
            self._check(names, targets)
        except AuditError:
            return False
        return [checksum_of(targets[number]) for number in touched] == before

    def some(self, targets: Sequence[torch.Tensor]) -> list[str]:
        """Checks the next sample, and returns the names of its sources.

        targets: the targets of the load, at their present addresses.

        Raises:
            AuditError: the load puts sources in other places.  The sample's places are restored.
        """
        names = self._next()
        self._check(names, targets)
        return names

    def _next(self) -> list[str]:
        names, room = list[str](), self._room
        for units in self._kinds:
            size = self._nbytes(units[0])
            if size <= room or not names:
                names += units[0]
                room -= size
                units.rotate(-_STRIDE)
        self._kinds.rotate(-1)
        return names

    def _nbytes(self, names: Iterable[str]) -> int:
        return sum(self._known[name].nbytes for name in names)

    def _check(self, names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
        pairs, kept = [], []
        with torch.no_grad():
            for name in names:
                whole, places = self._read_back(name, targets)
                pairs.append((name, whole))
                kept += [(name, place, brought) for place, brought in places]
            for _, place, _ in kept:
                place.bitwise_not_()
            raised: Exception | None = None
            try:
                self._load(pairs)
            except Exception as error:  # a load may have loaded these, and then need others
                raised = error
            wrong = [name for name, place, brought in kept if not torch.equal(place, brought)]
            if wrong:
                for _, place, brought in kept:
                    place.copy_(brought)
                raise AuditError(list(dict.fromkeys(wrong)), raised)

    def _read_back(
        self, name: str, targets: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns a source with this worker's elements, and zeros for the others.  Also returns its
        places, each with the bits that the load must put there, as integers.  A place may hold
        other bits now, because it may hold anything after an engine has slept."""
        _, dtype, shape = self._known[name]
        pieces = self._places[name]
        views = [piece.view(targets) for piece in pieces]
        whole = torch.zeros(shape, dtype=dtype, device=views[0].device)
        for piece, view in zip(pieces, views, strict=True):
            piece.of(whole).copy_(as_kept(view, dtype))
        brought = [
            raw(as_kept(piece.of(whole), view.dtype).clone())
            for piece, view in zip(pieces, views, strict=True)
        ]
        return whole, list(zip(map(raw, views), brought, strict=True))
