"""The message from which a remote worker makes the same plan as the trainer ranks.

A remote worker that runs wsync's receiver is one more rank of the plan's exchange.  It has no shard
of the model, and its boxes go to a bucket of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from wsync import _core
from wsync.exchange.update_group import Rendezvous

Meeting: TypeAlias = Rendezvous | Sequence[str]
"""The meeting place of an exchange's ranks: a store, in which they make a torch group; or, with
NCCL, each rank's address, in the order of ranks."""


@dataclasses.dataclass(frozen=True)
class PlanInput:
    """The arguments of `_core.Plan`, except for the rank.

    rounds: round_nbytes, ring_nbytes and rounds_grow.
    """

    source: _core.Layout
    destinations: Sequence[tuple[_core.Layout, bool]]
    workers: Sequence[tuple[int, int]]
    hosts: Sequence[int]
    rounds: Mapping[str, Any]

    @functools.cached_property
    def layouts(self) -> list[bytes]:
        """The source's layout in bytes, and then the destinations'."""
        return [self.source.to_bytes(), *(layout.to_bytes() for layout, _ in self.destinations)]

    def plan(self, rank: int) -> _core.Plan:
        given = self.source, self.destinations, self.workers, self.hosts
        return _core.Plan(*given, rank, **self.rounds)


@dataclasses.dataclass(frozen=True)
class RemotePlan:
    """What one remote worker is told: its number among the plan's workers, its rank, the plan's
    input and fingerprint, and the place where the ranks meet."""

    worker: int
    rank: int
    fingerprint: int
    meeting: Meeting
    input: PlanInput

    def to_bytes(self) -> bytes:
        """A line of JSON, the source's layout and the destinations' layouts."""
        given, place = self.input, self.meeting
        fields = {
            "numbers": [self.worker, self.rank, self.fingerprint],
            "meeting": dataclasses.asdict(place) if isinstance(place, Rendezvous) else place,
            "whole": [whole for _, whole in given.destinations],
            "workers": given.workers,
            "hosts": given.hosts,
            "rounds": given.rounds,
        }
        return join_parts(fields, given.layouts)

    @staticmethod
    def from_bytes(data: bytes) -> RemotePlan:
        """Parses what `to_bytes` of the same version of wsync has made.  LayoutError: another
        version made it."""
        told, parts = split_parts(data)
        source, *layouts = map(_core.Layout.from_bytes, parts)
        place = told["meeting"]
        meeting = Rendezvous(**place) if isinstance(place, dict) else place
        destinations = list(zip(layouts, told["whole"], strict=True))
        workers = [(kind, rank) for kind, rank in told["workers"]]
        given = PlanInput(source, destinations, workers, told["hosts"], told["rounds"])
        worker, rank, fingerprint = told["numbers"]
        return RemotePlan(worker, rank, fingerprint, meeting, given)


def join_parts(fields: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """Joins a line of JSON and the parts."""
    head = json.dumps({**fields, "sizes": [len(part) for part in parts]})
    return head.encode() + b"\n" + b"".join(parts)


def split_parts(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the arguments that `join_parts` had, with the parts' sizes among the fields."""
    head, _, body = data.partition(b"\n")
    fields = json.loads(head)
    ends = accumulate(fields["sizes"], initial=0)
    return fields, [body[first:last] for first, last in pairwise(ends)]
