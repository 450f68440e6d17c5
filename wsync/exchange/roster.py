"""Who takes part in an update, and which trainer rank serves which engine worker."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from wsync import _core


@dataclass(frozen=True)
class Worker:
    """One receiver of a plan, and the trainer rank that holds its session.

    It is a tensor-parallel worker of an engine, which has a `rank` of its own in the exchange if
    it is remote; or, with a `stage`, all remote engines without wsync alike, which get the tensors
    of that pipeline stage from its source, `home`.
    """

    engine: int
    index: int
    home: int
    stock: bool = False
    stage: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Trainer:
    """What all ranks of a trainer know of each other, by rank: their host and pipeline stage;
    and what they hold together."""

    hosts: list[int]
    stages: list[int]
    model: _core.Layout

    def source(self, stage: int) -> int:
        """The rank that sends a stage's tensors to remote engines: its first."""
        return self.stages.index(stage)

    def holds(self, stage: int) -> list[int]:
        """Indices of the tensors of a stage; what several stages hold is the first one's."""
        return [i for i, first in enumerate(self._first_stages) if first == stage]

    @functools.cached_property
    def _first_stages(self) -> list[int]:
        stages, model = self.stages, self.model
        return [
            min((stages[shard[0]] for shard in model.shards(i)), default=min(stages))
            for i in range(model.tensor_count)
        ]


def assign_homes(
    engine_workers: Sequence[int | None],
    hosts: list[int],
    offsets: list[int] | None = None,
) -> list[Worker]:
    """Chooses the trainer rank that serves each worker.

    A worker goes to the rank on its GPU where `offsets` (per engine, the index of its first
    GPU) says which that is, on whatever host; else to the rank on the first rank's host with the
    fewest sessions.
    An engine of 0 workers is a stock one: rank 0 serves it, because its requests carry the data.
    One of None is remote and has no worker of its own.

    Raises:
        InvalidArgumentError: an engine without workers, or another number of offsets.
    """
    if offsets is not None and len(offsets) != len(engine_workers):
        raise _core.InvalidArgumentError(
            f"{len(offsets)} engine_gpu_offsets for {len(engine_workers)} engines"
        )
    sessions = [0] * len(hosts)
    near = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    workers = []
    for engine, count in enumerate(engine_workers):
        if count is None:
            continue
        if count < 0:
            raise _core.InvalidArgumentError(f"engine {engine} has {count} workers")
        if count == 0:
            sessions[0] += 1
            workers.append(Worker(engine, 0, 0, stock=True))
        for index in range(count):
            home = None if offsets is None else offsets[engine] + index
            if home is None or not 0 <= home < len(hosts):
                home = min(near, key=lambda rank: (sessions[rank], rank))
            sessions[home] += 1
            workers.append(Worker(engine, index, home))
    return workers
