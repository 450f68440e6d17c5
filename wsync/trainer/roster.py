"""The members of updates: trainer ranks, engines, and the workers that each rank sends to."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wsync import _core
from wsync.handles.answers import (
    drafts_itself,
    drafts_of,
    ignores_pause,
    other_draft,
    stages_of,
)
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
        """The delivery in words."""
        return _WORDS[self][0]

    @property
    def path(self) -> str:
        """The entry in `Report.paths`; "" stands for the name of the exchange."""
        return _WORDS[self][1]


_WORDS = {
    Delivery.WSYNC: ("wsync's receiver", "ring"),
    Delivery.STOCK: ("flattened buckets", "stock buckets"),
    Delivery.REMOTE: ("wsync's receiver, over the network", ""),
    Delivery.BROADCAST: ("broadcasts", "stock broadcast"),
}


def _delivery(engine: EngineHandle, last_gpu: int, options: Options, ranks: int) -> Delivery:
    """Chooses the delivery of an engine.  An engine with GPUs beyond the trainer's is remote."""
    wsync = LOAD_FORMAT in engine.load_formats
    if options.delivery == "distributed" or last_gpu >= ranks:
        if options.broadcast == "wsync" or (options.broadcast == "auto" and wsync):
            return Delivery.REMOTE
        return Delivery.BROADCAST
    if options.delivery == "stock" or (options.delivery == "auto" and not wsync):
        return Delivery.STOCK
    return Delivery.WSYNC


@dataclass(frozen=True)
class RolloutEngine:
    """One engine.  workers: of all its pipeline stages.  first_gpu: the trainer rank whose GPU its
    first worker shares, if known.  drafts: the models that draft tokens with layers of its model; a
    worker with wsync's receiver updates them with the model."""

    name: str
    workers: int
    delivery: Delivery
    first_gpu: int | None = None
    drafts: int = 0

    @staticmethod
    def of(engine: EngineHandle, gpu: int | None, options: Options, ranks: int) -> RolloutEngine:
        """Describes a handle's engine; warns if updates do not change the weights of its draft.

        Raises:
            UnsupportedError: the engine has no workers, or several data-parallel replicas; or it
                would get buckets, but takes none, has several pipeline stages or is on another
                host.
        """
        started = how_started(engine, options.deadline)
        workers, drafts = engine.workers * stages_of(started), drafts_of(started)
        last_gpu = -1 if gpu is None else gpu + workers - 1
        delivery = _delivery(engine, last_gpu, options, ranks)
        why = _obstacle(engine, gpu, started, delivery)
        if why := why or ignores_pause(started, options.pause_mode):
            raise _core.UnsupportedError(f"engine {engine.name}: {why}")
        left = drafts_itself(started) and not drafts
        if draft := other_draft(started) or ("layers of its model" if left else ""):
            _log.warning(
                "engine %s drafts tokens with %s, which updates do not change", engine.name, draft
            )
        return RolloutEngine(engine.name, workers, delivery, gpu, drafts)


def _obstacle(
    engine: EngineHandle, gpu: int | None, started: Mapping[str, Any], delivery: Delivery
) -> str:
    """Why an engine cannot take its delivery, or would end because of it; "" if it can take it."""
    stages, replicas, hosts = (started.get(key) or 1 for key in ("pp_size", "dp_size", "nnodes"))
    drafting = started.get("speculative_algorithm")
    if engine.workers < 1:
        return f"it has {engine.workers} workers"
    if control_only(engine) and delivery in (Delivery.STOCK, Delivery.BROADCAST):
        return (
            "like vLLM, it takes updates only through wsync's receiver, not by "
            f"{delivery.words}: give delivery='auto', or broadcast='auto' with "
            "delivery='distributed'"
        )
    if stages != 1 and delivery in (Delivery.STOCK, Delivery.BROADCAST):
        return (
            f"pp_size {stages}: SGLang answers for its first pipeline stage only, so updates need "
            f"wsync's receiver, not {delivery.words}: start the server with "
            f"--custom-weight-loader {LOAD_FORMAT}, or use DiskSync"
        )
    if stages != 1 and drafting:
        return f"pp_size {stages}: pipeline stages that draft tokens ({drafting}) are not supported"
    if replicas != 1 and not started.get("enable_dp_attention"):
        return (
            f"dp_size {replicas}: SGLang updates data-parallel replicas with tensors only if "
            "enable_dp_attention is set; set it, or use DiskSync"
        )
    if started.get("enable_dp_attention_local_control_broadcast"):  # or SGLANG_RUST_SERVER
        return (
            "enable_dp_attention_local_control_broadcast: its data-parallel groups would wait for "
            "each other in an update, each in another step; start the server without it"
        )
    if delivery is Delivery.STOCK and (hosts != 1 or (gpu is None and is_elsewhere(engine.name))):
        where = f"nnodes {hosts}: workers are" if hosts != 1 else "it is"
        return (
            f"{where} on another host, and would crash, because buckets are in this host's shared "
            "memory: give Options(delivery='distributed'), or engine_gpu_offsets if the engine "
            "shares a trainer rank's GPU"
        )
    return ""


@dataclass(frozen=True)
class PlanWorker:
    """One worker of a plan.  It gets rounds in a ring.

    It stands for one of these: worker `index` of engine number `engine`; a whole stock engine; or
    all engines that take broadcasts.  Its position in `Roster.workers` is its number in the plan;
    other modules call this number `worker`.
    served_by: the trainer rank that holds its session.
    serving_rank: the rank of the exchange that unpacks rounds into its ring.  This is `served_by`,
    but a worker on another host has its own rank, after the trainer's.
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
    """All members of updates; the same on all ranks.

    hosts: the number of each trainer rank's host.  model: what all trainer ranks hold together.
    """

    hosts: Sequence[int]
    model: _core.Layout
    engines: Sequence[RolloutEngine]

    @functools.cached_property
    def workers(self) -> list[PlanWorker]:
        """The workers in the order of their numbers in the plan.

        If a worker's GPU is known, the rank on this GPU serves the worker, on any host.  Otherwise
        the rank with the fewest sessions on rank 0's host serves it.  Rank 0 serves every stock
        engine, because its requests carry the data.
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
        """Raises InvalidArgumentError if there is no engine, or if options do not fit engines."""
        if not self.engines:
            raise _core.InvalidArgumentError("no engines to connect to")
        if options.stage == "on" and self.takes_buckets:
            without = self.taking(Delivery.STOCK) + self.taking(Delivery.BROADCAST)
            raise _core.UnsupportedError(
                f"stage='on', but these engines run without wsync's receiver and have no place for "
                f"a staged update: {', '.join(engine.name for engine in without)}"
            )
        remote = self.taking(Delivery.REMOTE)
        if remote and options.exchange == "shared":
            distant = ", ".join(engine.name for engine in remote)
            raise _core.InvalidArgumentError(
                f"exchange='shared', but workers of remote engines take part in it: {distant}"
            )
