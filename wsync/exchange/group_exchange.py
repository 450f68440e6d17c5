"""Exchange of a plan's messages between its ranks, one step per round.

Trainer ranks of one host read each other's staging, and those with a GPU each have NCCL
(`_core.Exchange`); otherwise a round is one all-to-all of a process group.  Both have the methods
of csrc/comm/comm.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch

from wsync import _core
from wsync.machine.deadline import Check
from wsync.machine.device import lead_torch, on_gpu, release_cached, staging

if TYPE_CHECKING:
    from wsync.exchange.trainer_group import TrainerGroup
    from wsync.exchange.update_group import UpdateGroup


class GroupExchange:
    """One all-to-all of a process group per round, on contiguous staging of this rank: in host
    memory for gloo, on the GPU for NCCL.

    A message to several peers is packed once and copied for the others, because all-to-all
    has no broadcast.  Staging has two halves, so that a round can be packed while the one
    before is on its way.
    """

    def __init__(
        self,
        group: TrainerGroup | UpdateGroup,
        backend: str,
        device: _core.Device,
        check: Callable[[], object],
    ) -> None:
        self._backend = backend
        self._device = device
        self._group = group
        self._check = check  # called while this waits for a stream
        self._plan: _core.Plan | None = None
        make = functools.partial(on_gpu if backend == "nccl" else staging, device=device)
        self._halves = [_Half(make), _Half(make)]

    @property
    def name(self) -> str:
        """As `Report.exchange` has it: "nccl" is wsync's own."""
        return "torch nccl" if self._backend == "nccl" else self._backend

    @property
    def nbytes(self) -> int:
        return sum(half.send.numel() + half.recv.numel() for half in self._halves)

    def begin(self, plan: _core.Plan) -> None:
        self._plan = plan
        for half in self._halves:
            half.work = None

    def acquire(self, round: int, timeout: float, check: Check | None = None) -> None:
        half = self._halves[round % 2]
        if half.work is not None:
            try:
                self._group.finish(half.work, timeout, check)
            except _core.DeadlineError as error:
                raise _core.DeadlineError(f"round {half.round}: {error}") from None
            half.work = None

    def spans(self, round: int) -> _core.BufferTable:
        if self._plan is None:
            raise _core.StateError("exchange: spans before begin")
        half = self._halves[round % 2]
        return half.place(self._plan.messages(round), self._group.rank, self._group.size)

    def post(self, round: int, stream: _core.Stream) -> None:
        half = self._halves[round % 2]
        half.round = round
        self._hand_over(stream)
        for first, count, others in half.repeats:
            for other in others:
                half.send[other : other + count] = half.send[first : first + count]
        half.work = self._group.exchange(
            half.recv[: sum(half.recv_counts)],
            half.send[: sum(half.send_counts)],
            half.recv_counts,
            half.send_counts,
        )

    def wait(
        self, round: int, stream: _core.Stream, timeout: float, check: Check | None = None
    ) -> None:
        self.acquire(round, timeout, check)

    def release(self, round: int, stream: _core.Stream) -> None:
        # The next but one round overwrites what this stream may still read.
        self._hand_over(stream)

    def _hand_over(self, stream: _core.Stream) -> None:
        """The group comes next, which is torch's: it has an order only with streams of a GPU."""
        if self._backend == "nccl":
            lead_torch(stream)
        else:
            stream.synchronize(self._group.timeout, self._check)

    def check(self) -> None:
        """Raises nothing: whoever waits for a round gets its error."""

    def park(self) -> None:
        """Gives the staging back until rounds need it again; none is under way."""
        for half in self._halves:
            half.clear()
        if self._backend == "nccl":
            release_cached(self._device)

    def close(self) -> None:
        self._plan = None


class _Half:
    """Staging of the rounds of one parity."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self.clear()
        self.send_counts: list[int] = []
        self.recv_counts: list[int] = []
        self.repeats: list[tuple[int, int, list[int]]] = []
        self.round = 0
        self.work: object | None = None

    def clear(self) -> None:
        self.send = self._make(0)
        self.recv = self._make(0)

    def place(self, messages: list[_core.Message], rank: int, size: int) -> _core.BufferTable:
        """Lays the messages out by peer and returns where each is packed to or read from."""
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
        self.send = self._at_least(self.send, sum(self.send_counts))
        self.recv = self._at_least(self.recv, sum(self.recv_counts))
        self.repeats = []
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

    def _at_least(self, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
        return tensor if tensor.numel() >= nbytes else self._make(nbytes)


Exchange: TypeAlias = GroupExchange | _core.Exchange
