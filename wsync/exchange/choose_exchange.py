"""How the rounds of a plan travel between its ranks: those of the trainer, and remote workers that
take part."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from wsync import _core
from wsync.exchange.all_to_all_exchange import Exchange, GroupExchange
from wsync.exchange.trainer_group import TrainerGroup
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup, device_of
from wsync.machine.addresses import own_address
from wsync.machine.deadline import Check
from wsync.machine.device import has_nccl
from wsync.options import Options


class Transport:
    """One rank's exchange, with the group and the store that it may need.

    hosts: of every trainer rank.  `rendezvous` is where all ranks of the exchange meet, if not in
    the trainer's own group.
    """

    def __init__(self, group: TrainerGroup, hosts: Sequence[int], options: Options) -> None:
        self.rendezvous: Rendezvous | None = None
        self._kind = "none"
        self._exchange: Exchange | None = None
        self._group = group
        self._hosts = len(set(hosts))
        self._options = options
        self._device = _core.host()
        self._store: Store | None = None
        self._everyone: UpdateGroup | None = None

    def choose(self, device: _core.Device, crowded: bool, remote: Sequence[str]) -> None:
        """Chooses for all ranks, together with them, and says where they are to meet.

        Args:
            device: what rounds lie on.
            crowded: whether ranks share a GPU, where NCCL does not work.
            remote: for each remote worker that takes part, the name of its engine.
        """
        self._device = device
        self._kind = self._choose(crowded, bool(remote))
        if not remote and self._kind != "nccl":
            return
        mine: dict[str, object] = {}
        if self._group.rank == 0:
            self._store = Store(self._options.deadline)
            size = self._group.size + len(remote)
            place = Rendezvous(own_address(remote), self._store.port, size, self._kind)
            mine = dataclasses.asdict(place)
        self.rendezvous = Rendezvous(**self._group.gather_json(mine)[0])

    def open(self, plan: _core.Plan, check: Check) -> Exchange | None:
        """Makes the exchange, together with all ranks; None where the plan needs none.

        It is closed with this.  `check` is called while ranks or, later on, a stream are waited
        for.
        """
        if self._kind == "shared":
            self._exchange = self._share(plan, check)
        elif self.rendezvous is not None:
            device = device_of(self._kind, self._device)
            timeout = self._options.exchange_deadline
            self._everyone = self.rendezvous.join(
                self._group.rank, timeout, check, device=device, greet=True
            )
            self._exchange = GroupExchange(self._everyone, self._kind, self._device, check)
        elif self._kind != "none":
            self._exchange = GroupExchange(self._group, self._kind, self._device, check)
        return self._exchange

    def close(self) -> None:
        """Lets go of every part, whatever one of them raises."""
        with contextlib.ExitStack() as last_first:
            for part in (self._store, self._everyone, self._exchange):
                if part is not None:
                    last_first.callback(part.close)

    def _choose(self, crowded: bool, remote: bool) -> str:
        """What rounds are exchanged by: "none", "shared", "gloo" or "nccl"."""
        wanted = self._options.exchange
        nccl = has_nccl(self._device) and not crowded
        if remote:
            return "nccl" if nccl else "gloo"
        if self._group.size == 1:
            return "none"
        if wanted == "shared" and self._hosts > 1:
            raise _core.InvalidArgumentError(
                f"exchange='shared', but the trainer ranks are on {self._hosts} hosts"
            )
        if wanted == "nccl" and crowded:
            raise _core.InvalidArgumentError("exchange='nccl', but trainer ranks share a GPU")
        if wanted == "nccl" and not nccl:
            raise _core.InvalidArgumentError(
                f"exchange='nccl', but rank {self._group.rank} is on {self._device!r}, or this "
                "torch has no NCCL"
            )
        if wanted != "auto":
            return wanted
        if nccl:
            return "nccl"
        return "shared" if self._hosts == 1 else "gloo"

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
