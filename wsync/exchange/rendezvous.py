"""What trainer ranks and remote workers share: one plan, and a group that moves its rounds.

A remote worker that runs wsync's receiver is one more rank of the plan's exchange: it has no
shard of the model, and the bucket that its boxes go to is its own.  The trainer tells it all that
a plan is made of, and it makes the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch

from wsync import _core
from wsync.exchange.groups import UpdateGroup
from wsync.machine.deadline import Check
from wsync.machine.device import has_nccl
from wsync.machine.lanes import Lane, result

_SETTLE_SECONDS: Final = 2.0  # our deadline comes before the store's, which says less


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a plan is made of, but for the rank; the arguments of `_core.Plan`."""

    source: _core.Layout
    destinations: Sequence[tuple[_core.Layout, bool]]
    workers: Sequence[tuple[int, int]]
    hosts: Sequence[int]
    round_nbytes: int
    ring_nbytes: int

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
        )


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where the ranks of a plan's exchange meet, trainer ranks first."""

    name: str
    host: str
    port: int
    size: int
    backend: str = "gloo"

    @staticmethod
    def at(host: str, port: int, size: int, backend: str = "gloo") -> Crossing:
        # a new name each time: a worker may still be in the group of a trainer that is gone
        return Crossing(f"wsync-{secrets.token_hex(8)}", host, port, size, backend)

    def join(self, rank: int, device: _core.Device, timeout: float, check: Check) -> UpdateGroup:
        """Joins the others; `check` is called now and whenever one of them is waited for.

        Raises:
            DeadlineError: not all came.
            UnsupportedError: they meet on GPUs, and this rank has none.
        """
        gpu = None
        if self.backend == "nccl":
            if not has_nccl(device):
                raise _core.UnsupportedError(f"rank {rank} on {device!r} cannot meet by NCCL")
            gpu = torch.device("cuda", device.ordinal)
        lane = Lane("wsync-crossing")
        left = threading.Event()

        def still_wanted() -> None:
            if left.is_set():
                raise _core.StateError(f"group {self.name}: nobody waits for it any more")

        group = functools.partial(
            UpdateGroup,
            self.host,
            self.port,
            rank=rank,
            size=self.size,
            name=self.name,
            backend=self.backend,
            device=gpu,
            timeout=timeout,
            meeting=timeout + _SETTLE_SECONDS,
            greet=True,
            check=still_wanted,  # the caller's is for the caller's thread
        )
        joining: Future[UpdateGroup] = lane.submit(group)
        lane.close()
        where = f"{self.host}:{self.port}"
        late = f"{self.size} trainer ranks and remote workers did not meet at {where}"
        try:
            return result(joining, timeout, check, late)
        except BaseException:
            left.set()
            joining.add_done_callback(_let_go)
            raise


@dataclasses.dataclass(frozen=True)
class Orders:
    """What one remote worker is told: its number among the plan's workers, its rank, the plan,
    its fingerprint, and where the ranks meet."""

    worker: int
    rank: int
    fingerprint: int
    crossing: Crossing
    blueprint: Blueprint

    def to_bytes(self) -> bytes:
        """A line of JSON, the source layout and the destinations'."""
        blueprint = self.blueprint
        fields = {
            "worker": self.worker,
            "rank": self.rank,
            "fingerprint": self.fingerprint,
            "crossing": dataclasses.asdict(self.crossing),
            "sizes": [len(layout) for layout in blueprint.layouts],
            "whole": [whole for _, whole in blueprint.destinations],
            "workers": list(blueprint.workers),
            "hosts": list(blueprint.hosts),
            "round_nbytes": blueprint.round_nbytes,
            "ring_nbytes": blueprint.ring_nbytes,
        }
        return json.dumps(fields).encode() + b"\n" + b"".join(blueprint.layouts)

    @staticmethod
    def from_bytes(data: bytes) -> Orders:
        """Raises ProtocolError or LayoutError for what `to_bytes` does not make."""
        head, _, body = data.partition(b"\n")
        try:
            fields = json.loads(head)
            source, *layouts = _cut(body, fields["sizes"])
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
            )
            told = fields["crossing"]
            port, size = _number(told["port"]), _number(told["size"])
            crossing = Crossing(
                str(told["name"]), str(told["host"]), port, size, str(told["backend"])
            )
            if crossing.backend not in ("gloo", "nccl"):
                raise ValueError(f"backend {crossing.backend!r}")
            worker, rank = _number(fields["worker"]), _number(fields["rank"])
            if blueprint.workers[worker][1] != rank or crossing.size != len(blueprint.hosts):
                raise ValueError(f"worker {worker} is not rank {rank} of {crossing.size}")
            return Orders(worker, rank, _number(fields["fingerprint"]), crossing, blueprint)
        except _core.WsyncError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise _core.ProtocolError(f"the trainer's plan: {what[:120]}") from error


def _let_go(joining: Future[UpdateGroup]) -> None:
    """Leaves a group that nobody waits for any more."""
    if joining.exception() is None:
        joining.result().close()


def _cut(body: bytes, sizes: Sequence[Any]) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(body[at : at + _number(size)])
        at += size
    if at != len(body):
        raise ValueError(f"{len(body)} bytes of layouts instead of {at}")
    return parts


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number from 0")
    return value
