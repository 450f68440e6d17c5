"""How the rounds of a plan travel between its ranks: those of the trainer, and remote workers that
take part."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Protocol

from wsync import _core
from wsync.exchange.base import Exchange, GroupExchange
from wsync.exchange.groups import Store, UpdateGroup
from wsync.exchange.rendezvous import Crossing
from wsync.exchange.roster import Trainer
from wsync.exchange.trainers import TrainerGroup
from wsync.machine.addresses import own_address
from wsync.machine.deadline import Check
from wsync.machine.device import has_nccl
from wsync.options import Options


class _Part(Protocol):
    def close(self) -> None: ...


class Transport:
    """One rank's exchange, with the group and the store that it may need.

    `crossing`, of which all ranks are told, says where they meet if remote workers take part.
    """

    def __init__(self, group: TrainerGroup, trainer: Trainer, options: Options) -> None:
        self.crossing: Crossing | None = None
        self._exchange: Exchange | None = None
        self._group = group
        self._hosts = len(set(trainer.hosts))
        self._options = options
        self._device = _core.host()
        self._crowded = False
        self._store: Store | None = None
        self._everyone: UpdateGroup | None = None

    def invite(self, host: str, size: int, backend: str = "gloo") -> Crossing:
        """Where so many ranks can meet: in a store of this rank, which is reached at `host`."""
        self._store = Store(self._options.deadline)
        return Crossing.at(host, self._store.port, size, backend)

    def use(self, device: _core.Device, crowded: bool) -> None:
        """Says what rounds lie on, and whether other ranks use the same GPU, where NCCL does not
        work; to be called before remote workers are told of the crossing."""
        self._device, self._crowded = device, crowded
        if self.crossing is not None and self._meets_by_nccl():
            self.crossing = dataclasses.replace(self.crossing, backend="nccl")

    def open(self, plan: _core.Plan, check: Check) -> Exchange | None:
        """Makes the exchange, together with all ranks; None where the plan needs none.

        It is closed with this.  `check` is called while ranks or, later on, a stream are waited
        for.
        """
        how = self._choose()
        if how == "shared":
            self._exchange = self._share(plan, check)
        elif how != "none":
            self._exchange = self._join(how, check)
        return self._exchange

    def close(self) -> None:
        """Lets go of every part, whatever one of them raises."""
        parts: list[_Part | None] = [self._exchange, self._everyone, self._store]
        with contextlib.ExitStack() as last_first:
            for part in reversed(parts):
                if part is not None:
                    last_first.callback(part.close)

    def _choose(self) -> str:
        """What rounds are exchanged by: "none", "shared", "gloo" or "nccl"."""
        if self.crossing is not None:
            return self.crossing.backend
        if self._group.size == 1:
            return "none"
        wanted = self._options.exchange
        if wanted == "shared" and self._hosts > 1:
            raise _core.InvalidArgumentError(
                f"exchange='shared', but the trainer ranks are on {self._hosts} hosts"
            )
        if wanted == "nccl" and self._crowded:
            raise _core.InvalidArgumentError("exchange='nccl', but trainer ranks share a GPU")
        if wanted == "nccl" and not self._meets_by_nccl():
            raise _core.InvalidArgumentError(
                f"exchange='nccl', but rank {self._group.rank} is on {self._device!r}, or this "
                "torch has no NCCL"
            )
        if wanted != "auto":
            return wanted
        if self._meets_by_nccl():
            return "nccl"
        return "shared" if self._hosts == 1 else "gloo"

    def _meets_by_nccl(self) -> bool:
        return has_nccl(self._device) and not self._crowded

    def _share(self, plan: _core.Plan, check: Check) -> Exchange:
        group, options = self._group, self._options
        exchange = _core.SharedExchange(
            group.rank, group.size, max(plan.send_nbytes, 1), options.directory, self._device
        )
        try:
            addresses = group.all_gather(exchange.address.encode())
            exchange.connect([a.decode() for a in addresses], options.exchange_deadline, check)
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _join(self, how: str, check: Check) -> Exchange:
        """An exchange over a process group: the trainer's own, or one of all who meet."""
        if self.crossing is None and how == "nccl":
            self.crossing = self._cross()
        if self.crossing is None:
            return GroupExchange(self._group, how, self._device, check)
        timeout = self._options.exchange_deadline
        self._everyone = self.crossing.join(self._group.rank, self._device, timeout, check)
        return GroupExchange(self._everyone, how, self._device, check)

    def _cross(self) -> Crossing:
        """Where the trainer ranks meet on their GPUs."""
        mine = b"null"
        if self._group.rank == 0:
            crossing = self.invite(own_address([]), self._group.size, "nccl")
            mine = json.dumps(dataclasses.asdict(crossing)).encode()
        return Crossing(**json.loads(self._group.all_gather(mine)[0]))
