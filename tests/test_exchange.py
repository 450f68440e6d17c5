"""The exchange between the ranks of one host, with a real plan and real processes."""

import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from unittest import mock

import pytest
import torch
from exchange_ranks import PATIENCE, RANKS, ROUND, make_plan, run, update_rank
from support.procs import forked, stopped

import wsync.exchange.group_exchange
import wsync.machine.device
from wsync import _core

CONTEXT = forked()


class World:
    """Rank processes that have told each other their addresses."""

    def __init__(self, behaviours: list[str]) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for rank, behaviour in enumerate(behaviours):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=run, args=(rank, there, behaviour))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        addresses = [self.hear(rank) for rank in range(len(behaviours))]
        for pipe in self.pipes:
            pipe.send(addresses)

    def hear(self, rank: int) -> object:
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


def test_every_worker_gets_every_byte() -> None:
    assert make_plan(0).round_count > 2 * ROUND
    world = World(["work"] * RANKS)
    try:
        assert [world.hear(rank) for rank in range(RANKS)] == ["3 updates"] * RANKS
    finally:
        world.close()


class Threads:
    """A group of threads, as torch's groups are: data is taken when a collective starts."""

    def __init__(self, size: int) -> None:
        self.meeting = threading.Barrier(size, timeout=PATIENCE)
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def member(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    timeout = PATIENCE

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.size = threads, rank, len(threads.sent)

    def exchange(
        self, output: torch.Tensor, data: torch.Tensor, outputs: list[int], inputs: list[int]
    ) -> object:
        self.threads.sent[self.rank] = list(data.clone().split(inputs))
        self.threads.meeting.wait()
        parts = [sent[self.rank] for sent in self.threads.sent]
        for into, part in zip(output.split(outputs), parts, strict=True):
            into.copy_(part)
        self.threads.meeting.wait()
        return "done"

    def finish(self, work: object, timeout: float, check: object = None) -> None:
        assert work == "done"


def test_a_group_on_gpus_has_an_order_with_streams_and_not_with_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no such group here; what is shown is when torch is told to wait for a stream."""
    told: list[_core.Stream] = []

    def lead(stream: _core.Stream) -> None:
        told.append(stream)
        stream.synchronize(PATIENCE)

    monkeypatch.setattr(wsync.exchange.group_exchange, "lead_torch", lead)
    monkeypatch.setattr(wsync.exchange.group_exchange, "on_gpu", wsync.machine.device.staging)
    threads, host = Threads(RANKS), _core.host()

    def work(rank: int) -> None:
        member = threads.member(rank)
        exchange = wsync.exchange.group_exchange.GroupExchange(member, "nccl", host, lambda: None)
        update_rank(rank, Pipe()[0], exchange, "work")
        assert exchange.nbytes > 0
        exchange.park()
        assert exchange.nbytes == 0
        update_rank(rank, Pipe()[0], exchange, "work")

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(work, range(RANKS)))
    # a round is packed before it is sent, and unpacked before its staging is filled again
    assert len(told) == 2 * 2 * RANKS * 3 * make_plan(0).round_count


def test_a_round_that_takes_too_long_is_named() -> None:
    group = mock.Mock(timeout=PATIENCE, exchange=lambda *_: "under way")
    group.finish.side_effect = _core.DeadlineError("a collective took over 1 s")
    exchange = wsync.exchange.group_exchange.GroupExchange(
        group, "gloo", _core.host(), lambda: None
    )
    exchange.post(3, _core.Stream())
    with pytest.raises(_core.DeadlineError, match=r"^round 3: a collective took over 1 s$"):
        exchange.acquire(5, 1.0)


def test_a_wait_for_a_round_calls_the_check_that_it_is_given() -> None:
    group = mock.Mock(timeout=PATIENCE, exchange=lambda *_: "under way")
    group.finish.side_effect = lambda work, timeout, check=None: check()
    exchange = wsync.exchange.group_exchange.GroupExchange(
        group, "gloo", _core.host(), lambda: None
    )

    def check() -> None:
        raise _core.RemoteError("an engine has failed")

    stream = _core.Stream()
    for wait in (exchange.acquire, functools.partial(exchange.wait, stream=stream)):
        exchange.post(0, stream)
        with pytest.raises(_core.RemoteError, match="an engine has failed"):
            wait(0, timeout=1.0, check=check)


def test_a_killed_rank_is_named_on_all_others() -> None:
    world = World(["work", "stop", "work"])
    try:
        assert world.hear(1) == "stopping"
        end = time.monotonic() + PATIENCE
        while not stopped(world.pid(1)):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(world.pid(1), signal.SIGKILL)
        texts = [str(world.hear(rank)) for rank in (0, 2)]
        # The first to notice leaves too, and may be what the other one sees.
        assert all(text.startswith("PeerClosedError: rank ") for text in texts), texts
        assert any(f"rank 1 (pid {world.pid(1)}) closed the connection" in text for text in texts)
    finally:
        world.close()


def test_a_stopped_rank_ends_the_wait_with_the_deadline() -> None:
    world = World(["hurry", "stop", "work"])
    try:
        assert world.hear(1) == "stopping"
        assert world.hear(0) == (
            f"DeadlineError: deadline passed while the data of round {ROUND} of rank 1 "
            f"(pid {world.pid(1)}) was awaited"
        )
    finally:
        world.close()


def test_missing_ranks_are_named() -> None:
    exchange = _core.Exchange.shared(0, RANKS, 4096)
    assert exchange.name == "shared"
    assert exchange.nbytes == 2 * 4096
    with pytest.raises(_core.DeadlineError, match="waits for 2 of 3 ranks to connect: 1 2"):
        exchange.connect([exchange.address] * RANKS, 0.1)
    with pytest.raises(_core.InvalidArgumentError, match="2 addresses for 3 ranks"):
        exchange.connect([exchange.address] * 2, 0.1)
    with pytest.raises(_core.StateError, match="not connected"):
        exchange.begin(make_plan(0))
    exchange.close()
    with pytest.raises(_core.StateError, match="is closed"):
        exchange.begin(make_plan(0))
