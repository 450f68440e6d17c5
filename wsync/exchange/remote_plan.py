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
from typing import Any, Final, TypeAlias

from wsync import _core
from wsync.exchange.update_group import Rendezvous
from wsync.machine.error_text import error_text

Meeting: TypeAlias = Rendezvous | Sequence[str]
"""Where the ranks of an exchange meet: in a store, to make a group of torch's, or, by NCCL, at
each other's addresses, which are in their order."""

_MAX_ADDRESS: Final = 511  # characters, as csrc/comm/comm.h has it


@dataclasses.dataclass(frozen=True)
class Blueprint:
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
class Orders:
    """What one remote worker is told: its number among the plan's workers, its rank, the plan,
    its fingerprint, and where the ranks meet."""

    worker: int
    rank: int
    fingerprint: int
    meeting: Meeting
    blueprint: Blueprint

    def to_bytes(self) -> bytes:
        """The source layout and the destinations', after a line of JSON."""
        blueprint = self.blueprint
        fields = {
            "worker": self.worker,
            "rank": self.rank,
            "fingerprint": self.fingerprint,
            "meeting": dataclasses.asdict(self.meeting)
            if isinstance(self.meeting, Rendezvous)
            else list(self.meeting),
            "whole": [whole for _, whole in blueprint.destinations],
            "workers": list(blueprint.workers),
            "hosts": list(blueprint.hosts),
            "round_nbytes": blueprint.round_nbytes,
            "ring_nbytes": blueprint.ring_nbytes,
            "rounds_grow": blueprint.rounds_grow,
        }
        return join_parts(fields, blueprint.layouts)

    @staticmethod
    def from_bytes(data: bytes) -> Orders:
        """Raises ProtocolError or LayoutError for what `to_bytes` does not make."""
        try:
            fields, (source, *layouts) = split_parts(data)
            blueprint = Blueprint(
                _core.Layout.from_bytes(source),
                [
                    (_core.Layout.from_bytes(layout), bool(whole))
                    for layout, whole in zip(layouts, fields["whole"], strict=True)
                ],
                [(_number(kind), _number(home)) for kind, home in fields["workers"]],
                [_number(host) for host in fields["hosts"]],
                _number(fields["round_nbytes"]),
                _number(fields["ring_nbytes"]),
                bool(fields["rounds_grow"]),
            )
            meeting, size = _meeting(fields["meeting"])
            worker, rank = _number(fields["worker"]), _number(fields["rank"])
            if blueprint.workers[worker][1] != rank or size != len(blueprint.hosts):
                raise ValueError(f"worker {worker} is not rank {rank} of {size}")
            return Orders(worker, rank, _number(fields["fingerprint"]), meeting, blueprint)
        except _core.WsyncError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            what = error_text(error)
            raise _core.ProtocolError(f"the trainer's plan: {what[:120]}") from error


def join_parts(fields: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """A line of JSON, and bytes."""
    head = json.dumps({**fields, "sizes": [len(part) for part in parts]})
    return head.encode() + b"\n" + b"".join(parts)


def split_parts(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """What `join_parts` was given.  Raises ValueError, TypeError or KeyError for other bytes."""
    head, _, body = data.partition(b"\n")
    fields = json.loads(head)
    ends = list(accumulate(map(_number, fields["sizes"]), initial=0))
    if ends[-1] != len(body):
        raise ValueError(f"{len(body)} bytes of layouts instead of {ends[-1]}")
    return fields, [body[first:last] for first, last in pairwise(ends)]


def _meeting(told: Any) -> tuple[Meeting, int]:
    """Where ranks meet, and how many they are."""
    if isinstance(told, list):
        for address in told:
            if not (isinstance(address, str) and 0 < len(address) <= _MAX_ADDRESS):
                raise ValueError(f"address {address!r}")
        return told, len(told)
    host, backend, name = (str(told[key]) for key in ("host", "backend", "name"))
    port, size = _number(told["port"]), _number(told["size"])
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r}")
    return Rendezvous(host, port, size, backend, name), size


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number from 0")
    return value
