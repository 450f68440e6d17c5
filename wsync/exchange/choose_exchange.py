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
from wsync.machine.nvidia_wheels import nccl_libraries
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
        lacking = next(filter(None, self._group.gather_json(_lacks_nccl(device))), "")
        self._kind = self._choose("trainer ranks share a GPU" if crowded else lacking, bool(remote))
        if not remote:
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
        if self._kind == "shared" or (self._kind == "nccl" and self.rendezvous is None):
            self._exchange = self._make(plan, check)
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

    def _choose(self, lacking: str, remote: bool) -> str:
        """What rounds are exchanged by: "none", "shared", "gloo" or "nccl".  lacking: why it cannot
        be NCCL, "" where it can."""
        wanted = self._options.exchange
        if remote:
            return "nccl" if has_nccl(self._device) and not lacking else "gloo"
        if self._group.size == 1:
            return "none"
        if wanted == "shared" and self._hosts > 1:
            raise _core.InvalidArgumentError(
                f"exchange='shared', but the trainer ranks are on {self._hosts} hosts"
            )
        if wanted == "nccl" and lacking:
            raise _core.InvalidArgumentError(f"exchange='nccl', but {lacking}")
        if wanted != "auto":
            return wanted
        if not lacking:
            return "nccl"
        return "shared" if self._hosts == 1 else "gloo"

    def _make(self, plan: _core.Plan, check: Check) -> Exchange:
        """An exchange of the trainer ranks alone, who have met."""
        group, options, device = self._group, self._options, self._device
        if self._kind == "shared":
            exchange = _core.Exchange.shared(
                group.rank, group.size, max(plan.send_nbytes, 1), options.directory, device
            )
        else:
            sizes, timeout = (plan.send_nbytes, plan.recv_nbytes), options.exchange_deadline
            exchange = _core.Exchange.nccl(group.rank, group.size, *sizes, timeout, device)
        try:
            addresses = group.all_gather(exchange.address.encode())
            exchange.connect([a.decode() for a in addresses], options.exchange_deadline, check)
        except BaseException:
            exchange.close()
            raise
        return exchange


def _lacks_nccl(device: _core.Device) -> str:
    """Why ranks on such a device cannot meet by NCCL; "" where they can."""
    if device.ordinal < 0:
        return f"a rank is on {device!r}"
    try:
        _core.nccl_library(nccl_libraries())
    except _core.UnsupportedError as error:
        return f"a rank on {device!r} has {error}"
    return ""
