"""One way to exchange the rounds of a plan, for the `nccl` benchmark."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_device import SECONDS, fill, read
from wsync import _core
from wsync.exchange.group_exchange import Exchange, GroupExchange
from wsync.exchange.polled_collectives import Collectives
from wsync.machine import device

_THREAD = "wsync-nccl"  # of wsync, which makes the calls of NCCL


class TorchNccl(GroupExchange):
    """torch's all-to-all of NCCL, on staging of the GPU."""

    def __init__(self, group: Collectives, at: _core.Device, check: Callable[[], object]) -> None:
        super().__init__(group, at, check)
        for half in self._halves:
            half.make = functools.partial(device.on_gpu, device=at)
        self.park()


class Way:
    """One rank's exchange of a plan's rounds, with what it reads and fills.

    cpu: seconds of processor time that the calling thread has spent in calls of the exchange.
    calls, repeated: of a counted update, how many functions of C these calls call from Python, and
    how many bytes staging holds once more.  received: bytes that other ranks send to this one.
    """

    def __init__(
        self,
        exchange: Exchange,
        at: _core.Device,
        plan: _core.Plan,
        whole: Sequence[torch.Tensor],
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.exchange = exchange
        self.cpu = 0.0
        self.calls = 0
        self.repeated = 0
        self._plan = plan
        self._stream = _core.Stream(1, at)
        mine = torch.cat([t.chunk(ranks)[rank].reshape(-1) for t in whole]).view(torch.uint8)
        parameters = _core.Memory(mine.numel(), at)
        fill(self._stream, parameters, mine)
        self._ring = _core.Memory(max(plan.ring_nbytes(rank), 1), at)
        self.clear()
        self._sources = _core.BufferTable([(parameters.address, parameters.nbytes)], parameters)
        spans = [(0, 0)] * ranks
        spans[rank] = (self._ring.address, self._ring.nbytes)
        self._rings = _core.BufferTable(spans, self._ring)
        self._counts = False
        self.place = f"cuda:{at.ordinal}" if at.ordinal >= 0 else "cpu"
        self.received = sum(
            message.nbytes
            for number in range(plan.round_count)
            for message in plan.messages(number)
            if message.source != rank
        )

    def settle(self) -> None:
        """Waits until torch has done what it was given there."""
        device.await_torch(self._stream.device)

    def clear(self) -> None:
        fill(self._stream, self._ring, torch.full((self._ring.nbytes,), 0xA5, dtype=torch.uint8))

    def update(self) -> None:
        """All rounds, as a connection runs them."""
        exchange, plan, stream = self.exchange, self._plan, self._stream
        self._timed(exchange.begin, plan)
        messages = self._send(0)
        for number in range(plan.round_count):
            stream.copy(plan, number, _core.LOCAL, self._sources, self._rings)
            following = self._send(number + 1) if number + 1 < plan.round_count else messages
            self._timed(exchange.wait, number, stream, SECONDS)
            stream.copy(plan, number, _core.UNPACK, messages, self._rings)
            self._timed(exchange.release, number, stream)
            messages = following
        stream.synchronize(SECONDS)
        exchange.check()

    def count(self) -> None:
        """An update whose calls are counted, and the bytes that staging holds more than once."""
        before = self.cpu
        self._counts, self.calls, self.repeated = True, 0, 0
        self.update()
        self._counts, self.cpu = False, before

    def right(self, whole: Sequence[torch.Tensor]) -> bool:
        """Whether the ring holds every byte that the worker wants."""
        rank = dist.get_rank()
        ring = read(self._stream, self._ring, self._ring.nbytes)
        manifest = self._plan.manifest(rank)
        found = 0
        for index in range(manifest.tensor_count):
            tensor = whole[int(manifest.tensor(index)[0][1:])]
            for shard in manifest.shards(index):
                rows, columns = map(_slice, shard.start, shard.extent)
                wanted = tensor[rows, columns].contiguous().view(torch.uint8).view(-1)
                if not torch.equal(ring[shard.offset : shard.offset + wanted.numel()], wanted):
                    return False
                found += wanted.numel()
        return found == self._plan.stats["delivered_nbytes"] // dist.get_world_size()

    def _send(self, number: int) -> _core.BufferTable:
        self._timed(self.exchange.acquire, number, SECONDS)
        messages: _core.BufferTable = self._timed(self.exchange.spans, number)
        self._stream.copy(self._plan, number, _core.PACK, self._sources, messages)
        self._timed(self.exchange.post, number, self._stream)
        if self._counts and isinstance(self.exchange, GroupExchange):
            half = self.exchange._halves[number % 2]
            self.repeated += sum(count * len(others) for _, count, others in half.repeats)
        return messages

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.thread_time()
        sys.setprofile(self._count if self._counts else None)
        result = call(*arguments)
        sys.setprofile(None)
        self.calls -= self._counts  # of setprofile
        self.cpu += time.thread_time() - begin
        return result

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.calls += event == "c_call"


def _slice(start: int, extent: int) -> slice:
    return slice(start, start + extent)


def thread_seconds() -> float:
    """Processor time of the threads that make the calls of NCCL for wsync."""
    seconds = 0.0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == _THREAD:
            # the clock of a thread, as the kernel numbers it
            seconds += time.clock_gettime(~int(task.name) << 3 | 6)
    return seconds
