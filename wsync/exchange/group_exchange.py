"""Exchanges a plan's messages between its ranks, one step per round.

Trainer ranks of one host read each other's staging, and ranks with a GPU each use NCCL
(`_core.Exchange`).  Otherwise a round is one all-to-all of gloo.  Both kinds have the methods of
csrc/comm/comm.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

import torch

from wsync import _core
from wsync.exchange.polled_collectives import Collective, Collectives
from wsync.machine.deadline import Check
from wsync.machine.device import staging


class GroupExchange:
    """One all-to-all of gloo per round, on contiguous staging of this rank in host memory.

    A message to several peers is packed once and then copied for the others, because all-to-all
    has no broadcast.  Staging has two halves, so that a round can be packed while the round before
    it is on its way.

    check: called while this waits for a stream.
    """

    name = "gloo"

    def __init__(self, group: Collectives, device: _core.Device, check: Check) -> None:
        self._group = group
        self._check = check
        self._plan: _core.Plan | None = None
        make = functools.partial(staging, device=device)
        self._halves = [_Half(make), _Half(make)]

    @property
    def nbytes(self) -> int:
        return sum(half.send.numel() + half.recv.numel() for half in self._halves)

    def begin(self, plan: _core.Plan) -> None:
        self._plan = plan
        for half in self._halves:
            half.work = None

    def acquire(self, round: int, timeout: float, check: Check = bool) -> None:
        half = self._halves[round % 2]
        if half.work is not None:
            self._group.finish(half.work, timeout, check)
            half.work = None

    def spans(self, round: int) -> _core.BufferTable:
        assert self._plan is not None, "begin comes first"
        half = self._halves[round % 2]
        return half.place(self._plan.messages(round), self._group.rank, self._group.size)

    def post(self, round: int, stream: _core.Stream) -> None:
        half = self._halves[round % 2]
        self._settle(stream)
        for first, count, others in half.repeats:
            for other in others:
                half.send[other : other + count] = half.send[first : first + count]
        half.work = self._group.exchange(
            half.recv[: sum(half.recv_counts)],
            half.send[: sum(half.send_counts)],
            half.recv_counts,
            half.send_counts,
        )

    def wait(self, round: int, stream: _core.Stream, timeout: float, check: Check = bool) -> None:
        self.acquire(round, timeout, check)

    def release(self, round: int, stream: _core.Stream) -> None:
        self._settle(stream)  # the stream may still read what the next round but one overwrites

    def _settle(self, stream: _core.Stream) -> None:
        stream.synchronize(self._group.timeout, self._check)

    def check(self) -> None:
        """Raises nothing, because a failed round raises its error in the wait for it."""

    def park(self) -> None:
        """Frees the staging until rounds need it again.  No round may be under way."""
        for half in self._halves:
            half.send = half.recv = half.make(0)

    def close(self) -> None:
        self._plan = None


class _Half:
    """The staging of every second round."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self.make = make
        self.send = self.recv = make(0)
        self.work: Collective | None = None

    def place(self, messages: list[_core.Message], rank: int, size: int) -> _core.BufferTable:
        """Lays the messages out by peer; returns where each is packed to or read from."""
        self.send_counts = [0] * size
        self.recv_counts = [0] * size
        for message in messages:
            if message.source == rank:
                for peer in message.peers:
                    self.send_counts[peer] += message.nbytes
            else:
                self.recv_counts[message.source] += message.nbytes
        send_at = list(accumulate(self.send_counts, initial=0))
        recv_at = list(accumulate(self.recv_counts, initial=0))
        if self.send.numel() < send_at[-1]:
            self.send = self.make(send_at[-1])
        if self.recv.numel() < recv_at[-1]:
            self.recv = self.make(recv_at[-1])
        self.repeats: list[tuple[int, int, list[int]]] = []
        spans = []
        for source, peers, _, _, nbytes in messages:
            if source == rank:
                starts = []
                for peer in peers:
                    starts.append(send_at[peer])
                    send_at[peer] += nbytes
                spans.append((self.send.data_ptr() + starts[0], nbytes))
                if len(starts) > 1:
                    self.repeats.append((starts[0], nbytes, starts[1:]))
            else:
                spans.append((self.recv.data_ptr() + recv_at[source], nbytes))
                recv_at[source] += nbytes
        return _core.BufferTable(spans, owner=(self.send, self.recv))


Exchange: TypeAlias = GroupExchange | _core.Exchange
