"""What a remote worker is told, so that it makes the plan that the trainer ranks have made.

A remote worker that runs wsync's receiver is one more rank of the plan's exchange: it has no
shard of the model, and the bucket that its boxes go to is its own.
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
"""Where the ranks of an exchange meet: in a store, to make a group of torch's, or, by NCCL, at
each other's addresses, which are in their order."""


@dataclasses.dataclass(frozen=True)
class PlanInput:
    """What a plan is made of, but for the rank; the arguments of `_core.Plan`."""

    source: _core.Layout
    destinations: Sequence[tuple[_core.Layout, bool]]
    workers: Sequence[tuple[int, int]]
    hosts: Sequence[int]
    round_nbytes: int
    ring_nbytes: int
    rounds_grow: bool

    @functools.cached_property
    def layouts(self) -> list[bytes]:
        """The source's, and the destinations'."""
        return [self.source.to_bytes(), *(layout.to_bytes() for layout, _ in self.destinations)]

    def plan(self, rank: int) -> _core.Plan:
        return _core.Plan(
            self.source,
            self.destinations,
            self.workers,
            self.hosts,
            rank,
            round_nbytes=self.round_nbytes,
            ring_nbytes=self.ring_nbytes,
            rounds_grow=self.rounds_grow,
        )


@dataclasses.dataclass(frozen=True)
class RemotePlan:
    """What one remote worker is told: its number among the plan's workers, its rank, the plan,
    its fingerprint, and where the ranks meet."""

    worker: int
    rank: int
    fingerprint: int
    meeting: Meeting
    input: PlanInput

    def to_bytes(self) -> bytes:
        """The source layout and the destinations', after a line of JSON."""
        given, meeting = self.input, self.meeting
        fields = {
            "worker": self.worker,
            "rank": self.rank,
            "fingerprint": self.fingerprint,
            "meeting": dataclasses.asdict(meeting)
            if isinstance(meeting, Rendezvous)
            else list(meeting),
            "whole": [whole for _, whole in given.destinations],
            "workers": list(given.workers),
            "hosts": list(given.hosts),
            "round_nbytes": given.round_nbytes,
            "ring_nbytes": given.ring_nbytes,
            "rounds_grow": given.rounds_grow,
        }
        return join_parts(fields, given.layouts)

    @staticmethod
    def from_bytes(data: bytes) -> RemotePlan:
        """What the same wsync has made by `to_bytes`; LayoutError for a layout of another."""
        told, parts = split_parts(data)
        source, *layouts = map(_core.Layout.from_bytes, parts)
        meeting = told["meeting"]
        return RemotePlan(
            told["worker"],
            told["rank"],
            told["fingerprint"],
            Rendezvous(**meeting) if isinstance(meeting, dict) else meeting,
            PlanInput(
                source,
                list(zip(layouts, told["whole"], strict=True)),
                [(kind, rank) for kind, rank in told["workers"]],
                told["hosts"],
                told["round_nbytes"],
                told["ring_nbytes"],
                told["rounds_grow"],
            ),
        )


def join_parts(fields: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """A line of JSON, and bytes."""
    head = json.dumps({**fields, "sizes": [len(part) for part in parts]})
    return head.encode() + b"\n" + b"".join(parts)


def split_parts(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """What `join_parts` was given."""
    head, _, body = data.partition(b"\n")
    fields = json.loads(head)
    ends = accumulate(fields["sizes"], initial=0)
    return fields, [body[first:last] for first, last in pairwise(ends)]
