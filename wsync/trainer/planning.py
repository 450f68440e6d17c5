"""What trainer ranks agree on before any bytes move: each rank's device, the plan and the rings."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from wsync import _core
from wsync.exchange.remote_plan import PlanInput, join_parts, split_parts
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.device import default, find, release_cached
from wsync.messages.control import PIECES, WHOLE
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import JOINED, group_of, listed
from wsync.options import Options
from wsync.trainer.fused_experts import Box, single_experts
from wsync.trainer.roster import Delivery, Roster
from wsync.trainer.sessions.broadcast import BroadcastSession
from wsync.trainer.sessions.stock import StockSession
from wsync.trainer.sessions.worker import WorkerSession

_log = logging.getLogger(__name__)

_GPU_ROUND_NBYTES = 256 << 20
# With larger rounds, two processes hand the GPU to each other less often.
_LARGE_ROUND_NBYTES = 1 << 30
_LARGE_FREE_NBYTES = 16 << 30  # large rounds need this on every GPU, for each worker
_DEFAULT_ROUND_NBYTES = 32 << 20  # the planner's default; one large tensor may exceed it
_LEAST_RING_NBYTES = 16 << 10  # smaller rings are not tried
_ALL_NBYTES = 1 << 62  # a ring of so many bytes gets a slot for every round, and is no larger
_STAGE_SHARE = 0.5  # the part of a worker's free memory that stage="auto" may take
Session: TypeAlias = WorkerSession | StockSession | BroadcastSession
Single: TypeAlias = Mapping[int, Sequence[Box]]


@dataclass(frozen=True)
class Planning:
    """One rank's part in planning.  All ranks make one and call its methods together, in order.

    sessions: one for each worker that this rank serves; all have connected.
    """

    group: TrainerGroup
    roster: Roster
    sessions: Sequence[Session]
    options: Options

    def gather(
        self, blobs: dict[int, bytes], source: str, more: Mapping[str, Any]
    ) -> tuple[list[bytes], _core.Device, list[Any]]:
        """Returns what every worker keeps, in the order of worker numbers; this rank's device (a
        GPU or the host); and what every rank tells.

        Args:
            blobs: what this rank's workers keep, by number; equal layouts are sent only once.
            source: the UUID of the GPU of this rank's weights; "" if they are on the host.
            more: further facts that this rank tells.
        """
        texts = list(dict.fromkeys(blobs.values()))
        index = {number: texts.index(blob) for number, blob in blobs.items()}
        receivers = (s.gpu for s in self.sessions if isinstance(s, WorkerSession))
        gpus = {gpu: None for gpu in (*receivers, source or None) if gpu is not None}
        mine = join_parts({**more, "index": index, "gpus": list(gpus)}, texts)
        layouts: dict[int, bytes] = {}
        told = []
        for part in self.group.all_gather(mine):
            facts, found = split_parts(part)
            told.append(facts)
            layouts |= {int(number): found[i] for number, i in facts["index"].items()}
        device = find(self._device([facts["gpus"] for facts in told]))
        return [layouts[number] for number in range(len(self.roster.workers))], device, told

    @contextlib.contextmanager
    def naming(self, layouts: Sequence[bytes]) -> Iterator[None]:
        """If a worker's tensors do not fit the model, the block's error names its engine."""
        try:
            yield
        except (_core.LayoutError, _core.UnsupportedError) as error:
            model = self.roster.model.join()
            for number, blob in enumerate(layouts):
                if blob in (WHOLE, PIECES):
                    continue
                try:
                    _core.Route(model, _core.Layout.from_bytes(blob))
                except type(error) as its:
                    engine = self.roster.engines[self.roster.workers[number].engine].name
                    raise type(error)(f"engine {engine}: {its}") from error
            raise

    def may_stage(
        self, layouts: list[bytes], free: Mapping[int, tuple[str, str, int]], reading: bool
    ) -> bool:
        """Whether engines may take all rounds before they pause (see Options.stage).

        free: by number, each remote worker's host, its GPU ("" for the host's own memory), and the
        free memory there.  reading: whether workers read lent memory in place.

        Raises:
            NoMemoryError: the shares of remote workers do not fit, with stage="on".
        """
        options, on = self.options, self.options.stage == "on"
        auto = options.stage == "auto" and not options.ring_nbytes and not options.park
        auto = auto and len(free) == len(layouts) and WHOLE not in layouts
        if reading or not (on or (auto and not any(gpu for _, gpu, _ in free.values()))):
            return False
        shares, left = Counter[tuple[str, str]](), dict[tuple[str, str], int]()
        for number, (host, gpu, nbytes) in free.items():
            given = layouts[number] not in (WHOLE, PIECES)
            kept = _core.Layout.from_bytes(layouts[number]).shard_nbytes if given else 0
            place = host, gpu
            shares[place] += kept or self.roster.model.nbytes
            left[place] = min(nbytes, left.get(place, nbytes))
            if shares[place] <= left[place] * (1 if on else _STAGE_SHARE):
                continue
            engine = self.roster.engines[self.roster.workers[number].engine].name
            text = (
                f"engine {engine}: its workers there need {shares[place]:,} bytes to stage an "
                f"update, and {left[place]:,} are free"
            )
            if on:
                raise _core.NoMemoryError(f"{text}; Options(stage='off') needs less memory")
            if self.group.rank == 0:
                _log.warning("wsync: %s: updates are not staged", text)
            return False
        return True

    def fit(
        self, layouts: list[bytes], device: _core.Device, staged: bool = False
    ) -> tuple[PlanInput, _core.Plan]:
        """Makes the plan and this rank's rings.  If some rank has no memory for its rings, all
        ranks try again with smaller rings, unless these have to hold all rounds (`staged`).

        Raises:
            LayoutError: the ranks' plans differ.
            NoMemoryError: some rank has no memory for rings of the given size, or for small rings.
        """
        if device.ordinal >= 0:
            release_cached(device)  # the driver does not ask torch for its cached memory
        large, limit, short = self._may_be_large(device), self.options.ring_nbytes, ""
        if staged:
            large, limit = False, _ALL_NBYTES
        while True:
            made_of = self._draw(layouts, device, large, limit)
            try:
                plan = made_of.plan(self.group.rank)
            except _core.InvalidArgumentError as error:
                if not short:
                    raise
                text = f"{short}, and a smaller ring cannot work: {error}"
                raise _core.NoMemoryError(text) from error
            lacking = self._agree(plan, self._make_rings(plan, device))
            if not lacking:
                self._name(short, limit)
                return made_of, plan
            if staged:
                raise _core.NoMemoryError(f"{lacking}: Options(stage='off') needs less memory")
            if large:  # rounds of the usual size come before a smaller ring
                large = False
                continue
            short = lacking
            limit = max(plan.ring_nbytes(number) for number in range(len(layouts))) // 2
            if self.options.ring_nbytes or limit < _LEAST_RING_NBYTES:
                raise _core.NoMemoryError(
                    f"{lacking}: free memory there, or give a smaller Options(ring_nbytes=)"
                )

    def _make_rings(self, plan: _core.Plan, device: _core.Device) -> str:
        """Makes the rings of this rank's workers; returns an error's text if memory is short."""
        try:
            for session in self.sessions:
                session.make_ring(plan, device)
        except _core.NoMemoryError as error:
            return f"rank {self.group.rank}: {error}"
        return ""

    def _name(self, short: str, ring_nbytes: int) -> None:
        """Warns, on rank 0, of rings that are smaller than usual, and of tensors that are larger
        than a bucket should be."""
        model, most = self.roster.model, self._bucket_nbytes
        if self.group.rank != 0:
            return
        if short:
            _log.warning(
                "wsync: %s: rings have at most %d bytes, so that an update takes more rounds; free "
                "memory there, or choose Options(ring_nbytes=)",
                short,
                ring_nbytes,
            )
        if not self.roster.takes_buckets:
            return
        single = single_experts(model, most)
        sizes = {i: _nbytes(model, i) for i in range(model.tensor_count) if i not in single}
        uncut = [
            f"{model.tensor(index).name} ({nbytes:,} bytes)"
            for index, nbytes in sizes.items()
            if nbytes > most
        ]
        if uncut:
            _log.warning(
                "wsync: buckets for engines without wsync are larger than bucket_nbytes=%d "
                "(slime's --update-weight-buffer-size) for tensors that cannot be split: %s",
                most,
                listed(uncut),
            )

    def plan(self, layouts: list[bytes], device: _core.Device) -> _core.Plan:
        """Plans without making rings.

        Raises:
            LayoutError: the ranks' plans differ.
        """
        plan = self._draw(layouts, device, False, self.options.ring_nbytes).plan(self.group.rank)
        self._agree(plan, "")
        return plan

    def _device(self, used: list[list[str]]) -> str:
        """The UUID of the GPU that this rank uses; "" if it uses the host.  used: by rank, the
        devices of its weights and workers.

        Raises:
            InvalidArgumentError: one update cannot use these devices together.
        """
        gpus = any(any(mine) for mine in used)
        for rank, mine in enumerate(used):
            if len(mine) > 1 or ("" in mine and gpus):
                places = " and ".join(uuid or "the host" for uuid in mine)
                raise _core.InvalidArgumentError(
                    f"rank {rank}: its weights and the workers that it serves are on {places}; "
                    "they must all be on one GPU, or all on hosts: engine_gpu_offsets says whose "
                    "GPU an engine shares"
                )
        mine = used[self.group.rank]
        return mine[0] if mine else default() if gpus else ""

    def _may_be_large(self, device: _core.Device) -> bool:
        """Whether rounds can be larger than usual, because every rank's GPU has room.  This is
        False with Options.park, because the memory is needed between updates.  It is also False
        with remote engines, because their free memory is not known here."""
        asked = self.options.round_nbytes or self.options.ring_nbytes or self.options.park
        remote = bool(self.roster.taking(Delivery.REMOTE))
        if asked or self.roster.takes_buckets or remote:
            return False
        needed = _LARGE_FREE_NBYTES * max(len(self.sessions), 1)
        # a rank without CUDA answers, too, if other ranks have GPUs
        roomy = device.ordinal >= 0 and device.memory_available() >= needed
        return all(self.group.gather_json(roomy))

    def _draw(
        self, layouts: list[bytes], device: _core.Device, large: bool, ring_nbytes: int
    ) -> PlanInput:
        workers, hosts = self.roster.workers, self.roster.hosts
        pairs = zip(layouts, workers, strict=True)
        wanted = [(layout, worker.takes_buckets) for layout, worker in pairs]
        kinds = list(dict.fromkeys(wanted))
        # all trainer ranks are equally far from a remote worker
        elsewhere = max(hosts) + 1
        remote = sum(engine.workers for engine in self.roster.taking(Delivery.REMOTE))
        return PlanInput(
            self.roster.model,
            [self._destination(*kind, ring_nbytes) for kind in kinds],
            [
                (kinds.index(kind), worker.serving_rank)
                for kind, worker in zip(wanted, workers, strict=True)
            ],
            [*hosts, *range(elsewhere, elsewhere + remote)],
            {
                "round_nbytes": _LARGE_ROUND_NBYTES
                if large
                else self._round_nbytes(device, ring_nbytes),
                "ring_nbytes": ring_nbytes,
                "rounds_grow": not self.options.round_nbytes,
            },
        )

    @property
    def _bucket_nbytes(self) -> int:
        asked = self.options.round_nbytes or self.options.bucket_nbytes
        return min(asked, self.options.ring_nbytes or asked)

    def _destination(
        self, layout: bytes, in_buckets: bool, ring_nbytes: int
    ) -> tuple[_core.Layout, bool]:
        """The layout that a worker keeps, and whether the worker takes each box in one piece."""
        if layout not in (WHOLE, PIECES):
            return _core.Layout.from_bytes(layout), False
        model = self.roster.model
        asked = min(self._bucket_nbytes, ring_nbytes or self._bucket_nbytes)
        cut = (joined(model, asked), single_experts(model, asked)) if in_buckets else ()
        return whole(model, range(model.tensor_count), *cut), layout == WHOLE

    def _round_nbytes(self, device: _core.Device, ring_nbytes: int) -> int:
        """The bytes of a round; 0 leaves them to the planner.  Small rounds overlap better.  A
        stock engine takes one request for each round, so its rounds are large, unless broadcasts
        cost much more than requests.  On a GPU, small rounds cost more than they save."""
        if self.options.round_nbytes:
            return self.options.round_nbytes
        broadcast = bool(self.roster.taking(Delivery.BROADCAST))
        most = self.options.bucket_nbytes
        if self.roster.takes_buckets and not (broadcast and most >= _DEFAULT_ROUND_NBYTES):
            return most
        limited = 0 < ring_nbytes < _ALL_NBYTES
        return 0 if device.ordinal < 0 or limited else _GPU_ROUND_NBYTES

    def _agree(self, plan: _core.Plan, missing: str) -> str:
        """Compares all ranks' plans.  Returns the error text of the first rank that lacks memory;
        "" if none does."""
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

    groups: by tensor, its group if that is not the model's.  single: by tensor, the boxes that it
    is kept in.
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
    """Maps tensors to groups.  Some engines join the tensors of a group within one call of
    load_weights.  Groups with more than `most` bytes are left out."""
    found: dict[int, list[int]] = {}
    for index in range(model.tensor_count):
        if group := group_of(model.tensor(index).name, JOINED):
            found.setdefault(group, []).append(index)
    return {
        index: group
        for group, members in found.items()
        if sum(_nbytes(model, member) for member in members) <= most
        for index in members
    }


def _nbytes(model: _core.Layout, index: int) -> int:
    """The bytes of a tensor, with the planner's padding."""
    _, dtype, shape, _ = model.tensor(index)
    return -(-math.prod(shape) * dtype_of(dtype).itemsize // 64) * 64
