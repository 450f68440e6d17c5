"""Chooses how a plan's rounds travel between its ranks: the trainer's, and remote workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Mapping, Sequence

from wsync import _core
from wsync.exchange.group_exchange import Exchange, GroupExchange
from wsync.exchange.introductions import Introduction, obstacle
from wsync.exchange.remote_plan import Meeting
from wsync.exchange.trainer_group import TrainerGroup
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup
from wsync.machine.deadline import PUNCTUAL, Check
from wsync.machine.host import own_address
from wsync.options import Options

_say_once = functools.cache(logging.getLogger(__name__).warning)


class ExchangeSetup:
    """Chooses, opens and closes one rank's exchange, and the group and store that it may need.

    hosts: the host of every trainer rank.  All trainer ranks call the methods together, in this
    order.
    """

    def __init__(self, group: TrainerGroup, hosts: Sequence[int], options: Options) -> None:
        self._kind = "none"
        self._exchange: Exchange | None = None
        self._group = group
        self._hosts = len(set(hosts))
        self._options = options
        self._device = _core.host()
        self._members: list[tuple[str, Introduction]] = []  # by rank; remote workers come last
        self._meeting: Meeting = ()
        self._store: Store | None = None
        self._everyone: UpdateGroup | None = None

    def choose(self, device: _core.Device, workers: Mapping[int, tuple[str, Introduction]]) -> None:
        """Chooses an exchange for all ranks from what each reports.

        Args:
            device: the device on which rounds are.
            workers: the remote workers that this rank serves, by their rank in the exchange.  Each
                value is a name for messages and the worker's introduction.

        Raises:
            InvalidArgumentError: the exchange that Options name is not possible.
        """
        self._device = device
        rank = self._group.rank
        known = {**workers, rank: (f"trainer rank {rank}", Introduction.on(device))}
        mine = [(n, name, dataclasses.asdict(said)) for n, (name, said) in known.items()]
        told = sorted(itertools.chain(*self._group.gather_json(mine)), key=operator.itemgetter(0))
        self._members = [(name, Introduction(**said)) for _, name, said in told]
        self._kind = self._choose()

    def meet(self, plan: _core.Plan, engines: Sequence[str]) -> Meeting:
        """Makes what ranks need to meet, and returns where they meet, as remote workers get it.

        engines: the names of the engines that remote workers belong to.
        """
        trainers, size = self._group.size, len(self._members)
        if self._kind in ("shared", "nccl"):
            exchange = self._exchange = self._make(plan)
            workers = [member.address for _, member in self._members[trainers:]]
            self._meeting = (*self._group.gather_json(exchange.address), *workers)
        elif size > trainers:
            mine: dict[str, object] = {}
            if self._group.rank == 0:
                self._store = Store(self._options.deadline)
                mine = dataclasses.asdict(Rendezvous(own_address(engines), self._store.port, size))
            self._meeting = Rendezvous(**self._group.gather_json(mine)[0])
        return self._meeting

    def open(self, check: Check) -> Exchange | None:
        """Meets all other ranks; returns the exchange, or None if the plan needs none.

        `close` closes it.  `check` is called while this waits for ranks, and later while the
        exchange waits for a stream.
        """
        timeout = self._options.exchange_deadline
        if isinstance(self._exchange, _core.Exchange):
            assert not isinstance(self._meeting, Rendezvous)
            if len(self._members) > self._group.size:  # workers that have met await an update
                timeout = PUNCTUAL * self._options.deadline
            self._exchange.connect(self._meeting, timeout, check)
        elif self._kind != "none":
            group = self._group.collectives
            if isinstance(self._meeting, Rendezvous):
                group = self._everyone = self._meeting.join(self._group.rank, timeout, check)
            assert group is not None
            self._exchange = GroupExchange(group, self._device, check)
        return self._exchange

    def close(self) -> None:
        """Closes every part, even if closing one raises."""
        with contextlib.ExitStack() as last_first:
            for part in (self._store, self._everyone, self._exchange):
                if part is not None:
                    last_first.callback(part.close)

    def _choose(self) -> str:
        """Returns the kind of exchange: "none", "shared", "nccl" or "gloo"."""
        wanted = self._options.exchange
        if len(self._members) == 1:
            return "none"
        if wanted == "shared" and self._hosts > 1:
            raise _core.InvalidArgumentError(
                f"exchange='shared', but the trainer ranks are on {self._hosts} hosts"
            )
        lacking = obstacle(self._members)
        if wanted == "nccl" and lacking:
            raise _core.InvalidArgumentError(f"exchange='nccl', but {lacking}")
        if wanted != "auto":
            return wanted
        if not lacking:
            return "nccl"
        gpus = {member.gpu for _, member in self._members}
        if len(self._members) == self._group.size:
            # one GPU may not reach another's memory
            return "shared" if self._hosts == 1 and len(gpus) == 1 else "gloo"
        if self._group.rank == 0 and gpus != {""}:
            _say_once("wsync: %s", f"remote workers are reached by gloo, because {lacking}")
        return "gloo"

    def _make(self, plan: _core.Plan) -> _core.Exchange:
        rank, size, options = self._group.rank, len(self._members), self._options
        if self._kind == "shared":
            sent = max(plan.send_nbytes, 1)
            return _core.Exchange.shared(rank, size, sent, options.directory, self._device)
        # engines wait for rounds, too, but cannot say which rank is missing
        sizes, timeout = (plan.send_nbytes, plan.recv_nbytes), PUNCTUAL * options.deadline
        return _core.Exchange.nccl(rank, size, *sizes, timeout, self._device)
