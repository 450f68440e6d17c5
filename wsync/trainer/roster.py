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
        return {
            Delivery.WSYNC: "wsync's receiver",
            Delivery.STOCK: "flattened buckets",
            Delivery.REMOTE: "wsync's receiver, over the network",
            Delivery.BROADCAST: "broadcasts",
        }[self]

    @property
    def path(self) -> str:
        """As `Report.paths` has it; "" for that of the exchange."""
        return {
            Delivery.WSYNC: "ring",
            Delivery.STOCK: "stock buckets",
            Delivery.REMOTE: "",
            Delivery.BROADCAST: "stock broadcast",
        }[self]

    @staticmethod
    def of(
        engine: EngineHandle,
        first_gpu: int | None,
        options: Options,
        ranks: int,
        drafts: bool = False,
    ) -> Delivery:
        """What an engine takes.  One whose GPUs are not all the trainer's is remote.  One that
        drafts tokens with layers of its model takes buckets unless options say otherwise: they
        update these layers, too."""
        wsync = LOAD_FORMAT in engine.load_formats and not drafts
        if options.delivery == "distributed" or (
            first_gpu is not None and first_gpu + engine.workers > ranks
        ):
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
            UnsupportedError: buckets for an engine that is on another host by its name, or on
                several, or that takes none; an engine of several data-parallel replicas.
        """
        started = how_started(engine, options.deadline)
        drafts = drafts_itself(started)
        delivery = Delivery.of(engine, gpu, options, ranks, drafts)
        if control_only(engine) and delivery in (Delivery.STOCK, Delivery.BROADCAST):
            raise _core.UnsupportedError(
                f"engine {engine.name}: takes updates by wsync's receiver alone, as vLLM's do, and "
                f"no {delivery.words}: delivery='auto', or with 'distributed' broadcast='auto'"
            )
        _check_started(engine.name, started, delivery)
        if delivery is Delivery.STOCK and gpu is None and is_elsewhere(engine.name):
            raise _core.UnsupportedError(
                f"engine {engine.name}: it is on another host, and would end where it looks for a "
                "bucket in this one's shared memory: Options(delivery='distributed') is for that, "
                "or engine_gpu_offsets says which trainer rank's GPU it shares"
            )
        if drafts and LOAD_FORMAT in engine.load_formats:
            receives = delivery in (Delivery.WSYNC, Delivery.REMOTE)
            _log.warning(
                "engine %s drafts tokens with layers of its model: %s",
                engine.name,
                "wsync's receiver leaves them as they are"
                if receives
                else "it takes buckets, which update these, too, and not wsync's receiver",
            )
        if draft := other_draft(started):
            _log.warning(
                "engine %s drafts tokens with another model, %s: updates leave that as it is",
                engine.name,
                draft,
            )
        return RolloutEngine(engine.name, engine.workers, delivery, gpu)


def _check_started(name: str, said: Mapping[str, Any], delivery: Delivery) -> None:
    """Refuses what SGLang says of how it was started, and would end or fail by at an update."""
    if (stages := said.get("pp_size") or 1) != 1:
        raise _core.UnsupportedError(
            f"engine {name}: pp_size {stages}: SGLang gives every pipeline stage the "
            "payload of its tensor-parallel rank, so stages cannot be told apart; DiskSync "
            "updates them"
        )
    replicas, hosts = (said.get(key) or 1 for key in ("dp_size", "nnodes"))
    if replicas != 1 and not said.get("enable_dp_attention"):
        raise _core.UnsupportedError(
            f"engine {name}: dp_size {replicas}: SGLang updates no data-parallel replicas "
            "with tensors (but with enable_dp_attention); DiskSync updates them"
        )
    if said.get("sleep_on_idle") and said.get("enable_dp_attention"):
        _log.warning("engine %s: --sleep-on-idle: updates wait for seconds", name)
    if hosts != 1 and delivery is Delivery.STOCK:
        raise _core.UnsupportedError(
            f"engine {name}: nnodes {hosts}: workers on other hosts would end where they "
            "look for a bucket in this one's shared memory: Options(delivery='distributed')"
        )


@dataclass(frozen=True)
class PlanWorker:
    """One worker of a plan, which gets rounds in a ring, and the trainer rank that holds its
    session, `served_by`.

    It is one of three: worker `index` of engine number `engine`; a whole stock engine; or, if
    `stage` is set, all engines that take broadcasts together, for that pipeline stage, which
    `served_by` sends.  Its place in `Roster.workers` is its number in the plan, which is `worker`
    in all that follows.
    home: the rank of the exchange that unpacks its rounds into its ring: `served_by`, or, for a
    worker on another host, its own, which comes after the trainer's.
    """

    delivery: Delivery
    served_by: int
    home: int
    engine: int = -1
    index: int = 0
    stage: int | None = None

    @property
    def takes_buckets(self) -> bool:
        return self.delivery in (Delivery.STOCK, Delivery.BROADCAST)


@dataclass(frozen=True)
class Roster:
    """All that takes part in updates; the same on all ranks.

    hosts, stages: host and pipeline stage of every trainer rank; model: what they hold together.
    """

    hosts: Sequence[int]
    stages: Sequence[int]
    model: _core.Layout
    engines: Sequence[RolloutEngine]

    @functools.cached_property
    def workers(self) -> list[PlanWorker]:
        """By their number in the plan.

        A worker is served by the rank on its GPU where that is known, on whatever host; else by
        the rank on the first rank's host with the fewest sessions.  A stock engine is served by
        rank 0, because its requests carry the data.

        Raises:
            InvalidArgumentError: an engine without workers.
        """
        ranks = len(self.hosts)
        sessions = [0] * ranks
        near = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[0]]
        found, remote = list[PlanWorker](), list[tuple[int, int]]()
        for number, engine in enumerate(self.engines):
            if engine.workers < 1:
                raise _core.InvalidArgumentError(
                    f"engine {engine.name} has {engine.workers} workers"
                )
            if engine.delivery is Delivery.STOCK:
                sessions[0] += 1
                found.append(PlanWorker(engine.delivery, 0, 0, number))
            elif engine.delivery is Delivery.REMOTE:
                remote += [(number, index) for index in range(engine.workers)]
            elif engine.delivery is Delivery.WSYNC:
                for index in range(engine.workers):
                    home = -1 if engine.first_gpu is None else engine.first_gpu + index
                    if not 0 <= home < ranks:
                        home = min(near, key=lambda rank: (sessions[rank], rank))
                    sessions[home] += 1
                    found.append(PlanWorker(engine.delivery, home, home, number, index))
        found += [
            PlanWorker(Delivery.REMOTE, place % ranks, ranks + place, number, index)
            for place, (number, index) in enumerate(remote)
        ]
        if self.taking(Delivery.BROADCAST):
            # of each stage, its first rank sends
            sources = {stage: self.stages.index(stage) for stage in sorted(set(self.stages))}
            found += [
                PlanWorker(Delivery.BROADCAST, source, source, stage=stage)
                for stage, source in sources.items()
            ]
        return found

    @property
    def takes_buckets(self) -> bool:
        """Whether some worker takes buckets or broadcasts."""
        return any(worker.takes_buckets for worker in self.workers)

    def taking(self, delivery: Delivery) -> list[RolloutEngine]:
        """The engines with this delivery."""
        return [engine for engine in self.engines if engine.delivery is delivery]

    def holds(self, stage: int) -> list[int]:
        """Indices of the tensors of a stage; what several stages hold is the first one's."""
        return [i for i, first in enumerate(self._first_stages) if first == stage]

    @functools.cached_property
    def _first_stages(self) -> list[int]:
        stages, model = self.stages, self.model
        return [
            min((stages[shard.rank] for shard in model.shards(i)), default=min(stages))
            for i in range(model.tensor_count)
        ]

    def check(self, options: Options) -> None:
        """Raises InvalidArgumentError where there is no engine, or for options that have no effect
        on these."""
        if not self.engines:
            raise _core.InvalidArgumentError("no engines to connect to")
        found = {engine.delivery for engine in self.engines}
        idle = {}
        if not found & {Delivery.REMOTE, Delivery.BROADCAST}:
            idle["broadcast"] = "remote engines (delivery='distributed')"
        if Delivery.BROADCAST not in found:
            idle["backend"] = (
                "remote engines (delivery='distributed') that take broadcasts of buckets or tensors"
            )
        if len(self.hosts) == 1 and Delivery.REMOTE not in found:
            idle["exchange"] = "several trainer ranks, and this trainer has one"
            if Delivery.WSYNC not in found and options.quantise is None:
                idle["park"] = (
                    "engines that run wsync (delivery='wsync'), several trainer ranks, or quantise"
                )
        options.refuse(idle)
        if Delivery.REMOTE in found and options.exchange == "shared":
            distant = ", ".join(engine.name for engine in self.taking(Delivery.REMOTE))
            raise _core.InvalidArgumentError(
                f"exchange='shared', but workers of remote engines take part in it: {distant}"
            )
