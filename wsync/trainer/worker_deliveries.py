"""Which engine worker is sent what, by a plan."""

from __future__ import annotations

from dataclasses import dataclass

from wsync import _core
from wsync.trainer.roster import Delivery, Roster


@dataclass(frozen=True, kw_only=True)
class WorkerDelivery:
    """What one worker gets at every update.

    worker: its number within the engine; None where the engine's API takes the bytes for all of
    them.  way: in words.  rank: the trainer rank that serves it; None where several do.
    """

    engine: str
    worker: int | None
    way: str
    rank: int | None
    tensors: int
    nbytes: int


def deliveries(plan: _core.Plan, roster: Roster) -> list[WorkerDelivery]:
    """Together they are what a Report counts as delivered."""
    found = []
    for number, worker in enumerate(roster.workers):
        if worker.stage is not None:
            continue
        manifest = plan.manifest(number)
        found.append(
            WorkerDelivery(
                engine=roster.engines[worker.engine].name,
                worker=None if worker.delivery is Delivery.STOCK else worker.index,
                way=worker.delivery.words,
                rank=worker.served_by,
                tensors=manifest.tensor_count,
                nbytes=manifest.shard_nbytes,
            )
        )
    sources = {worker.served_by for worker in roster.workers if worker.stage is not None}
    found += [
        WorkerDelivery(
            engine=engine.name,
            worker=index,
            way=Delivery.BROADCAST.words,
            rank=min(sources) if len(sources) == 1 else None,
            tensors=roster.model.tensor_count,
            nbytes=roster.model.nbytes,
        )
        for engine in roster.taking(Delivery.BROADCAST)
        for index in range(engine.workers)
    ]
    return found
