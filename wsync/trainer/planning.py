"""What trainer ranks agree on before any bytes move: each one's device, a plan, and its rings."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from wsync import _core
from wsync.exchange.remote_plan import PlanInput, join_parts, split_parts
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.device import default, find, release_cached
from wsync.messages.control import PIECES, WHOLE
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import JOINED, group_of, is_note, listed
from wsync.options import Options
from wsync.trainer.fused_experts import Box, single_experts
from wsync.trainer.roster import Delivery, Roster
from wsync.trainer.round_contents import WorkerRounds
from wsync.trainer.sessions.base import Session

_log = logging.getLogger(__name__)

_GPU_ROUND_NBYTES = 256 << 20
# The larger the rounds, the fewer times two processes hand the GPU to each other.
_LARGE_ROUND_NBYTES = 1 << 30
_LARGE_FREE_NBYTES = 8 << 30  # on every GPU, for rounds to be large
# Room for the tables of copies that a rank and its worker put on their GPU after the rings.
_TABLES_NBYTES = 16 << 20
_LEAST_RING_NBYTES = 16 << 10  # smaller rings are not tried
_DEFAULT_ROUND_NBYTES = 32 << 20  # the planner's, which may be exceeded for one large tensor
Single: TypeAlias = Mapping[int, Sequence[Box]]


@dataclass(frozen=True)
class Planning:
    """One rank's part in it; all ranks make one and call its methods together, in this order.

    sessions: with this rank's workers, which have been accepted.
    """

    group: TrainerGroup
    roster: Roster
    sessions: Sequence[Session]
    options: Options

    def gather(self, blobs: dict[int, bytes], source: str) -> tuple[list[bytes], _core.Device]:
        """Returns what every worker keeps, by its number, and what this rank uses: a GPU, or the
        host.

        Args:
            blobs: what this rank's workers keep; layouts that are equal travel once a rank.
            source: the UUID of the GPU of this rank's weights, "" for the host.

        Raises:
            InvalidArgumentError: devices that one update cannot use together.
        """
        texts = list(dict.fromkeys(blobs.values()))
        index = {number: texts.index(blob) for number, blob in blobs.items()}
        mine = join_parts({"index": index, "gpu": self._choose(source)}, texts)
        layouts: dict[int, bytes] = {}
        gpus = []
        for part in self.group.all_gather(mine):
            facts, found = split_parts(part)
            gpus.append(facts["gpu"])
            layouts |= {int(number): found[i] for number, i in facts["index"].items()}
        device = find(self._settle(gpus))
        return [layouts[number] for number in range(len(self.roster.workers))], device

    def fit(self, layouts: list[bytes], device: _core.Device) -> tuple[PlanInput, _core.Plan]:
        """Plans, and makes the rings: smaller ones where some rank has no memory for them.

        Raises:
            LayoutError: the ranks' plans differ.
            NoMemoryError: even small rings have no room on some rank.
        """
        limit, missing, released = self.options.ring_nbytes, "", False
        wanted, large = 0, self._may_be_large(device)
        while True:
            made_of = self._draw(layouts, device, limit, large)
            try:
                plan = made_of.plan(self.group.rank)
            except _core.InvalidArgumentError as error:
                if not missing:
                    raise
                text = f"{missing}, and a smaller ring cannot work: {error}"
                raise _core.NoMemoryError(text) from error
            if large and (tight := self._agree(plan, self._tight(plan, device))):
                _log.info("%s: rounds are not made larger", tight)
                large = False
                continue
            lacking = self._agree(plan, self._make_rings(plan, device))
            largest = max(plan.ring_nbytes(number) for number in range(len(self.roster.workers)))
            if not lacking:
                if self.group.rank == 0 and largest < wanted:
                    self._name_small_rings(missing, largest, wanted)
                return made_of, plan
            missing, wanted = lacking, wanted or largest
            if device.ordinal >= 0 and not released:
                release_cached(device)  # of torch, which a driver does not ask
                released = True
                continue
            if large:
                large = False
                continue
            limit = largest // 2
            if self.options.ring_nbytes or limit < _LEAST_RING_NBYTES:
                raise _core.NoMemoryError(missing)
            _log.info("%s; rings of %d bytes are tried", missing, limit)

    def _name_small_rings(self, missing: str, largest: int, wanted: int) -> None:
        _log.warning(
            "wsync: rings have %d bytes instead of %d, so that an update takes more and smaller "
            "rounds: %s; free memory there, or choose Options(ring_nbytes=)",
            largest,
            wanted,
            missing,
        )

    def plan(self, layouts: list[bytes], device: _core.Device) -> _core.Plan:
        """Plans without making rings.

        Raises:
            LayoutError: the ranks' plans differ.
        """
        plan = self._draw(layouts, device, self.options.ring_nbytes, False).plan(self.group.rank)
        self._agree(plan, "")
        return plan

    def name_unused(self, plan: _core.Plan) -> None:
        """Warns, on rank 0, of tensors that no worker makes use of."""
        if self.group.rank != 0:
            return
        names = [self.roster.model.tensor(index)[0] for index in plan.unused]
        names = [name for name in names if not is_note(name)]
        if names:
            _log.warning(
                "wsync: no engine makes use of %s: what the trainer has there is not delivered",
                listed(names),
            )

    def name_uncut(self, plan: _core.Plan) -> None:
        """Warns, on rank 0, of tensors for which a bucket has more bytes than were asked for."""
        if self.group.rank != 0:
            return
        asked, found = self._bucket_nbytes, dict[str, None]()
        for number, worker in enumerate(self.roster.workers):
            slots = [plan.slot(number, k).nbytes for k in range(plan.round_count)]
            if worker.takes_buckets and max(slots, default=0) > asked:
                for bucket in WorkerRounds(plan, number).buckets:
                    if sum(part.numel for part in bucket) > asked:
                        found |= {f"{part.name} ({part.numel:,} bytes)": None for part in bucket}
        if found:
            _log.warning(
                "wsync: buckets for engines without wsync are larger than bucket_nbytes=%d "
                "(slime's --update-weight-buffer-size) for what cannot be split: %s",
                asked,
                listed(found),
            )

    def name_cut(self, layouts: list[bytes]) -> None:
        """Warns, on rank 0, of tensors of which an engine keeps only the first part.  Loaders of
        SGLang and vLLM cut off what their parameters have no room for; others fill the rest
        themselves, as the row of a padding token, which looks the same from here.

        layouts: by worker; those that take whole tensors do not say what they keep.
        """
        if self.group.rank != 0:
            return
        kept: dict[int, list[bytes]] = {}
        for layout, worker in zip(layouts, self.roster.workers, strict=True):
            kept.setdefault(worker.engine, []).append(layout)
        kinds = dict[frozenset[bytes], int]()  # the first engine of each
        for engine, blobs in kept.items():
            if WHOLE not in blobs and PIECES not in blobs:
                kinds.setdefault(frozenset(blobs), engine)
        for kind, engine in kinds.items():
            short = _core.Layout.short([_core.Layout.from_bytes(blob) for blob in kind])
            cut = [
                f"{name} {shape}: dim {axis}: {first}:{end} of {shape[axis]}"
                for name, shape, axis, first, end in short
                if end < shape[axis]
            ]
            if cut:
                _log.warning(
                    "wsync: engine %s keeps only the first part of %s: it fills the rest itself, "
                    "or it was started from a smaller model, and has no room for that",
                    self.roster.engines[engine].name,
                    listed(cut),
                )

    def _choose(self, source: str) -> str | None:
        """The UUID of the GPU of this rank's workers, "" for the host; without workers that of
        its weights, None where these lie in host memory."""
        found: dict[str, int] = {}
        for session in self.sessions:
            if session.gpu is not None:
                found.setdefault(session.gpu, session.worker)
        for uuid, number in found.items():
            other = source or next((other for other in found if other != uuid), uuid)
            if uuid != other:
                worker = self.roster.workers[number]
                raise _core.InvalidArgumentError(
                    f"rank {self.group.rank} serves worker {worker.index} of engine "
                    f"{worker.engine} on {uuid or 'the host'}, but "
                    f"{'its weights are' if source else 'another of its workers is'} on "
                    f"{other or 'the host'}: engine_gpu_offsets says whose GPU an engine shares"
                )
        return next(iter(found), source or None)

    def _settle(self, gpus: list[str | None]) -> str:
        """What this rank uses, given what all ranks have chosen: GPUs, or all the host."""
        hosts = [rank for rank, gpu in enumerate(gpus) if gpu == ""]
        others = [rank for rank, gpu in enumerate(gpus) if gpu]
        if hosts and others:
            raise _core.InvalidArgumentError(
                f"rank {hosts[0]} serves a worker on the host, rank {others[0]} is on "
                f"{gpus[others[0]]}: one update uses one kind of device"
            )
        mine = gpus[self.group.rank]
        return (default() if others else "") if mine is None else mine

    def _may_be_large(self, device: _core.Device) -> bool:
        """Whether rounds can be larger than usual, where GPUs have room.  Not with Options.park,
        which needs the memory for something else, and not with remote engines, whose free memory is
        not known here."""
        asked = self.options.round_nbytes or self.options.ring_nbytes or self.options.park
        remote = bool(self.roster.taking(Delivery.REMOTE))
        return device.ordinal >= 0 and not (asked or self.roster.takes_buckets or remote)

    def _tight(self, plan: _core.Plan, device: _core.Device) -> str:
        """Why rounds of this plan would be too large for this rank's GPU; "" where it has room."""
        rings = sum(plan.ring_nbytes(session.worker) for session in self.sessions)
        # two rounds are under way between ranks
        needed = rings + 2 * (plan.send_nbytes + plan.recv_nbytes)
        free = device.memory_available()
        if free >= max(_LARGE_FREE_NBYTES, 2 * needed):
            return ""
        return f"rank {self.group.rank}: {free:,} bytes of its GPU are free"

    def _draw(
        self, layouts: list[bytes], device: _core.Device, ring_nbytes: int, large: bool
    ) -> PlanInput:
        wanted = [
            (layout, worker.stage, worker.takes_buckets)
            for layout, worker in zip(layouts, self.roster.workers, strict=True)
        ]
        round_nbytes = _LARGE_ROUND_NBYTES if large else self._round_nbytes(device, ring_nbytes)
        groups: dict[int, int] = {}
        single: Single = {}
        if self.roster.takes_buckets:
            asked = min(self._bucket_nbytes, ring_nbytes or self._bucket_nbytes)
            groups = joined(self.roster.model, asked)
            single = single_experts(self.roster.model, asked)
        kinds = list(dict.fromkeys(wanted))
        hosts = self.roster.hosts
        elsewhere = max(hosts) + 1
        remote = sum(engine.workers for engine in self.roster.taking(Delivery.REMOTE))
        return PlanInput(
            self.roster.model,
            [self._destination(*kind, groups, single) for kind in kinds],
            [
                (kinds.index(kind), worker.home)
                for kind, worker in zip(wanted, self.roster.workers, strict=True)
            ],
            # no trainer rank is nearer to a remote worker than another
            [*hosts, *range(elsewhere, elsewhere + remote)],
            round_nbytes=round_nbytes,
            ring_nbytes=ring_nbytes,
            rounds_grow=not self.options.round_nbytes,
        )

    @property
    def _bucket_nbytes(self) -> int:
        return self.options.round_nbytes or self.options.bucket_nbytes

    def _destination(
        self,
        layout: bytes,
        stage: int | None,
        in_buckets: bool,
        groups: Mapping[int, int],
        single: Single,
    ) -> tuple[_core.Layout, bool]:
        if layout not in (WHOLE, PIECES):
            return _core.Layout.from_bytes(layout), False
        model = self.roster.model
        tensors = range(model.tensor_count) if stage is None else self.roster.holds(stage)
        if not in_buckets:
            return whole(model, tensors), layout == WHOLE
        return whole(model, tensors, groups, single), layout == WHOLE

    def _round_nbytes(self, device: _core.Device, ring_nbytes: int) -> int:
        """Small rounds overlap better; stock engines take one request each, so theirs are large,
        but not where a broadcast costs much more than a request.  A GPU copies a round in less
        time than its message takes."""
        broadcast = bool(self.roster.taking(Delivery.BROADCAST))
        most = self.options.bucket_nbytes
        if (
            self.options.round_nbytes
            or not self.roster.takes_buckets
            or (broadcast and most >= _DEFAULT_ROUND_NBYTES)
        ):
            chosen = self.options.round_nbytes
            if chosen or device.ordinal < 0 or ring_nbytes:
                return chosen
            return _GPU_ROUND_NBYTES
        return most

    def _make_rings(self, plan: _core.Plan, device: _core.Device) -> str:
        """Makes the rings of this rank's workers; says what there is no memory for."""
        for session in self.sessions:
            session.drop_ring()
        try:
            for session in self.sessions:
                session.make_ring(plan, device)
            if device.ordinal >= 0:
                _core.Memory(_TABLES_NBYTES, device)  # given back at once
        except _core.NoMemoryError as error:
            return f"rank {self.group.rank}: {error}"
        return ""

    def _agree(self, plan: _core.Plan, missing: str) -> str:
        """Compares all ranks' plans; returns what the first rank that lacks memory says, or ""."""
        mine = [f"{plan.fingerprint:016x}", missing]
        prints, lacks = zip(*self.group.gather_json(mine), strict=True)
        if len(set(prints)) > 1:
            raise _core.LayoutError(
                f"trainer ranks made different plans: fingerprints {list(prints)}"
            )
        return next(filter(None, lacks), "")


def whole(
    model: _core.Layout,
    tensors: Iterable[int],
    groups: Mapping[int, int] = MappingProxyType({}),
    single: Single = MappingProxyType({}),
) -> _core.Layout:
    """The layout of a worker that keeps these tensors of a model.

    groups: by tensor, where it is in another group than the model's.  single: by tensor, the boxes
    that it is kept in.
    """
    builder = _core.LayoutBuilder()
    for index in tensors:
        name, dtype, shape, group = model.tensor(index)
        zeros = (0,) * len(shape)
        group = groups.get(index, group)
        for start, extent in single.get(index, [(zeros, shape)]):
            builder.add_shard(name, dtype, shape, start, extent, 0, 0, zeros, "", group)
    return builder.build()


def joined(model: _core.Layout, most: int) -> dict[int, int]:
    """By tensor: the group of what some engines join within one call of load_weights, where it
    takes no more bytes than this."""
    found: dict[int, list[int]] = {}
    for index in range(model.tensor_count):
        if group := group_of(model.tensor(index).name, JOINED):
            found.setdefault(group, []).append(index)
    return {
        index: group
        for group, members in found.items()
        if sum(_padded_nbytes(model, member) for member in members) <= most
        for index in members
    }


def _padded_nbytes(model: _core.Layout, index: int) -> int:
    _, dtype, shape, _ = model.tensor(index)
    return -(-math.prod(shape) * dtype_of(dtype).itemsize // 64) * 64  # as the planner has it
