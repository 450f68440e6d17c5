"""What takes part in updates: trainer ranks, engines, and the workers that each rank sends to."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wsync import _core
from wsync.handles.answers import drafts_itself, other_draft
from wsync.handles.base import EngineHandle, control_only, how_started
from wsync.machine.host import is_elsewhere
from wsync.messages.control import LOAD_FORMAT
from wsync.options import Options

_log = logging.getLogger(__name__)


class Delivery(enum.StrEnum):
    """How the workers of an engine get their weights."""

    WSYNC = "wsync"
    """wsync's receiver maps a ring that it shares with a trainer rank."""
    STOCK = "stock"
    """The engine takes flattened buckets, one request each."""
    REMOTE = "remote"
    """wsync's receiver on another host is one more rank of the plan's exchange."""
    BROADCAST = "broadcast"
    """The engine joins process groups, in which buckets are broadcast."""

    @property
    def words(self) -> str:
        """For a person to read."""
        return _WORDS[self][0]

    @property
    def path(self) -> str:
        """As `Report.paths` has it; "" for that of the exchange."""
        return _WORDS[self][1]


_WORDS = {
    Delivery.WSYNC: ("wsync's receiver", "ring"),
    Delivery.STOCK: ("flattened buckets", "stock buckets"),
    Delivery.REMOTE: ("wsync's receiver, over the network", ""),
    Delivery.BROADCAST: ("broadcasts", "stock broadcast"),
}


def _delivery(
    engine: EngineHandle, gpu: int | None, options: Options, ranks: int, drafts: bool
) -> Delivery:
    """What an engine takes; one whose GPUs are not all the trainer's is remote.  One that drafts
    tokens with layers of its model takes buckets unless options say otherwise: they update these
    layers, too."""
    wsync = LOAD_FORMAT in engine.load_formats and not drafts
    if options.delivery == "distributed" or (gpu is not None and gpu + engine.workers > ranks):
        if options.broadcast == "wsync" or (options.broadcast == "auto" and wsync):
            return Delivery.REMOTE
        return Delivery.BROADCAST
    if options.delivery == "stock" or (options.delivery == "auto" and not wsync):
        return Delivery.STOCK
    return Delivery.WSYNC


@dataclass(frozen=True)
class RolloutEngine:
    """One engine; first_gpu: the trainer rank on whose GPU its first worker is, where known."""

    name: str
    workers: int
    delivery: Delivery
    first_gpu: int | None = None

    @staticmethod
    def of(engine: EngineHandle, gpu: int | None, options: Options, ranks: int) -> RolloutEngine:
        """What a handle says; warns of weights that an engine drafts with and that stay.

        Raises:
            UnsupportedError: an engine without workers, of several pipeline stages or data-parallel
                replicas; or one that would get buckets and takes none, or is on another host.
        """
        started = how_started(engine, options.deadline)
        drafts = drafts_itself(started)
        delivery = _delivery(engine, gpu, options, ranks, drafts)
        if why := _obstacle(engine, gpu, started, delivery):
            raise _core.UnsupportedError(f"engine {engine.name}: {why}")
        receives = delivery in (Delivery.WSYNC, Delivery.REMOTE)
        if draft := other_draft(started) or ("layers of its model" if drafts and receives else ""):
            _log.warning(
                "engine %s drafts tokens with %s: updates leave that as it is", engine.name, draft
            )
        return RolloutEngine(engine.name, engine.workers, delivery, gpu)


def _obstacle(
    engine: EngineHandle, gpu: int | None, started: Mapping[str, Any], delivery: Delivery
) -> str:
    """Why an engine cannot take what it would be sent, or would end by it; "" if it can."""
    stages, replicas, hosts = (started.get(key) or 1 for key in ("pp_size", "dp_size", "nnodes"))
    if engine.workers < 1:
        return f"it has {engine.workers} workers"
    if control_only(engine) and delivery in (Delivery.STOCK, Delivery.BROADCAST):
        return (
            f"takes updates by wsync's receiver alone, as vLLM's do, and no {delivery.words}: "
            "delivery='auto', or with 'distributed' broadcast='auto'"
        )
    if stages != 1:
        return (
            f"pp_size {stages}: SGLang gives every pipeline stage the payload of its "
            "tensor-parallel rank, so stages cannot be told apart; DiskSync updates them"
        )
    if replicas != 1 and not started.get("enable_dp_attention"):
        return (
            f"dp_size {replicas}: SGLang updates no data-parallel replicas with tensors (but with "
            "enable_dp_attention); DiskSync updates them"
        )
    if delivery is Delivery.STOCK and (hosts != 1 or (gpu is None and is_elsewhere(engine.name))):
        where = f"nnodes {hosts}: workers are" if hosts != 1 else "it is"
        return (
            f"{where} on another host, and would end looking for a bucket in this one's shared "
            "memory: Options(delivery='distributed'), or engine_gpu_offsets says which trainer "
            "rank's GPU it shares"
        )
    return ""


@dataclass(frozen=True)
class PlanWorker:
    """One worker of a plan, which gets rounds in a ring, and the trainer rank that holds its
    session, `served_by`.

    It is one of three: worker `index` of engine number `engine`; a whole stock engine; or all
    engines that take broadcasts together.  Its place in `Roster.workers` is its number in the plan,
    which is `worker` in all that follows.
    serving_rank: the rank of the exchange that unpacks its rounds into its ring: `served_by`, or,
    for a worker on another host, its own, which comes after the trainer's.
    """

    delivery: Delivery
    served_by: int
    serving_rank: int
    engine: int = -1
    index: int = 0

    @property
    def takes_buckets(self) -> bool:
        return self.delivery in (Delivery.STOCK, Delivery.BROADCAST)


@dataclass(frozen=True)
class Roster:
    """All that takes part in updates; the same on all ranks.

    hosts: of every trainer rank; model: what they hold together.
    """

    hosts: Sequence[int]
    model: _core.Layout
    engines: Sequence[RolloutEngine]

    @functools.cached_property
    def workers(self) -> list[PlanWorker]:
        """By their number in the plan.

        A worker is served by the rank on its GPU where that is known, on whatever host; else by
        the rank on the first rank's host with the fewest sessions.  A stock engine is served by
        rank 0, because its requests carry the data.
        """
        ranks = len(self.hosts)
        sessions = [0] * ranks
        near = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[0]]
        found, remote = list[PlanWorker](), list[tuple[int, int]]()
        for number, engine in enumerate(self.engines):
            if engine.delivery is Delivery.STOCK:
                sessions[0] += 1
                found.append(PlanWorker(engine.delivery, 0, 0, number))
            elif engine.delivery is Delivery.REMOTE:
                remote += [(number, index) for index in range(engine.workers)]
            elif engine.delivery is Delivery.WSYNC:
                for index in range(engine.workers):
                    rank = -1 if engine.first_gpu is None else engine.first_gpu + index
                    if not 0 <= rank < ranks:
                        rank = min(near, key=lambda each: (sessions[each], each))
                    sessions[rank] += 1
                    found.append(PlanWorker(engine.delivery, rank, rank, number, index))
        found += [
            PlanWorker(Delivery.REMOTE, place % ranks, ranks + place, number, index)
            for place, (number, index) in enumerate(remote)
        ]
        if self.taking(Delivery.BROADCAST):
            found.append(PlanWorker(Delivery.BROADCAST, 0, 0))
        return found

    @property
    def takes_buckets(self) -> bool:
        """Whether some worker takes buckets or broadcasts."""
        return any(worker.takes_buckets for worker in self.workers)

    def taking(self, delivery: Delivery) -> list[RolloutEngine]:
        """The engines with this delivery."""
        return [engine for engine in self.engines if engine.delivery is delivery]

    def check(self, options: Options) -> None:
        """Raises InvalidArgumentError where there is no engine, or for options that exclude each
        other."""
        if not self.engines:
            raise _core.InvalidArgumentError("no engines to connect to")
        options.refuse({})
        remote = self.taking(Delivery.REMOTE)
        if remote and options.exchange == "shared":
            distant = ", ".join(engine.name for engine in remote)
            raise _core.InvalidArgumentError(
                f"exchange='shared', but workers of remote engines take part in it: {distant}"
            )
