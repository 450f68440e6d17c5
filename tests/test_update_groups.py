"""An engine worker's groups: who waits for whom, for how long, and what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import wsync
from wsync import _core
from wsync.demo.engines.transformers import Engine
from wsync.demo.engines.weights_only_engine import ProcessEngine
from wsync.engine.update_groups import UpdateGroups
from wsync.engine.update_state import Repeated
from wsync.exchange import choose_exchange
from wsync.exchange.choose_exchange import Transport
from wsync.exchange.introductions import Introduction
from wsync.exchange.polled_collectives import Collectives
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup
from wsync.machine.deadline import Deadline

PATIENCE = 60.0


def test_the_trainers_rank_is_not_for_engines() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match="rank_offset 0"):
        UpdateGroups().init(
            master_address="127.0.0.1",
            master_port=1,
            rank_offset=0,
            world_size=1,
            group_name="g",
            backend="gloo",
            meeting=1,
        )


@contextlib.contextmanager
def joined(groups: UpdateGroups, *, name: str = "g", **more: Any) -> Iterator[UpdateGroup]:
    """The trainer's end of a group of two that a worker has joined."""
    store = Store(PATIENCE)
    address: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": store.port}
    address |= {"rank_offset": 1, "world_size": 2, "group_name": name, "backend": "gloo"}
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(groups.init, **address, meeting=PATIENCE, **more)
        place = Rendezvous("127.0.0.1", store.port, 2, name=name)
        group = UpdateGroup(place, 0, timeout=PATIENCE)
        joining.result(PATIENCE)
    try:
        yield group
    finally:
        group.close()
        store.close()


BUCKET: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[3]]}


def test_a_broadcast_that_does_not_come_costs_its_deadline_and_the_group() -> None:
    groups = UpdateGroups()
    late = "a broadcast took over 1 s|a collective of group g did not end within 1 s"
    for limits in ({"timeout": 1.0}, {}):
        with joined(groups, **limits):
            few = {} if limits else {"timeout": 1.0}
            with pytest.raises(wsync.DeadlineError, match=late):
                groups.receive(group_name="g", **BUCKET, **few)
            with pytest.raises(wsync.InvalidArgumentError, match="in none of that name"):
                groups.receive(group_name="g", **BUCKET)


def test_a_tensor_comes_once_in_a_broadcast() -> None:
    groups = UpdateGroups()
    twice = {key: value * 2 for key, value in BUCKET.items()}
    with joined(groups), pytest.raises(wsync.InvalidArgumentError, match="2 names, but 1 tensors"):
        groups.receive(group_name="g", **twice, timeout=1.0)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_broadcast_that_is_shorter_than_announced_is_refused(load_format: str | None) -> None:
    """Gloo takes it, and leaves in the rest what was there: here what came before."""
    groups = UpdateGroups()
    what: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[8]]}
    what |= {"group_name": "g", "load_format": load_format}
    with joined(groups) as trainer, ThreadPoolExecutor() as pool:
        whole = torch.arange(8.0)
        taken = pool.submit(groups.receive, **what)
        trainer.broadcast([whole])
        assert torch.equal(taken.result(PATIENCE)[0][1], whole)
        taken = pool.submit(groups.receive, **what)
        trainer.broadcast([whole.bfloat16()])
        with pytest.raises(wsync.ProtocolError, match="group g: a broadcast is shorter"):
            taken.result(PATIENCE)
        with pytest.raises(wsync.InvalidArgumentError, match="in none of that name"):
            groups.receive(**what)


@pytest.mark.parametrize("how", ["told", "another"])
def test_a_worker_that_waits_for_a_broadcast_can_be_called_away(how: str) -> None:
    groups = UpdateGroups()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        first = stack.enter_context(joined(groups, name="first"))
        stack.enter_context(joined(groups, name="stage"))  # of the same trainer, so far
        taken = pool.submit(groups.receive, group_name="first", **BUCKET)
        first.broadcast([torch.arange(3.0)])
        assert torch.equal(taken.result(PATIENCE)[0][1], torch.arange(3.0))
        waiting = pool.submit(groups.receive, group_name="first", **BUCKET)
        time.sleep(0.3)
        assert not waiting.done()
        if how == "told":
            groups.destroy("first")
        else:
            stack.enter_context(joined(groups, name="second"))
        with pytest.raises(wsync.StateError, match="group 'first': this worker has left it"):
            waiting.result(PATIENCE)
        groups.destroy("stage")


def test_of_two_that_join_one_group_at_once_one_does() -> None:
    groups = UpdateGroups()
    address: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
    address |= {"world_size": 2, "group_name": "g", "backend": "gloo", "meeting": 1.0}
    with ThreadPoolExecutor() as pool:
        errors = [pool.submit(groups.init, **address).exception(PATIENCE)]
        both = [pool.submit(groups.init, **address) for _ in range(8)]
        errors += [future.exception(PATIENCE) for future in both]
    assert {type(error) for error in errors} == {wsync.DeadlineError, wsync.InvalidArgumentError}
    with joined(groups):  # those that failed are in no group
        groups.destroy("g")


def test_a_worker_is_in_the_groups_of_one_connection() -> None:
    """A trainer that has joined and not sent yet is in nobody's way, and leaves nothing behind."""
    groups = UpdateGroups()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        for name in ("wsync-0a-pp_0", "slime-pp_0", "wsync-0b-pp_0", "wsync-0b-pp_1"):
            member = stack.enter_context(joined(groups, name=name))
            if name == "wsync-0b-pp_0":
                first = member
        for name in ("wsync-0a-pp_0", "slime-pp_0"):
            with pytest.raises(wsync.InvalidArgumentError, match="in none of that name"):
                groups.receive(group_name=name, **BUCKET)
        for name, group in (("wsync-0b-pp_0", first), ("wsync-0b-pp_1", member)):
            taken = pool.submit(groups.receive, group_name=name, **BUCKET)
            group.broadcast([torch.arange(3.0)])
            assert torch.equal(taken.result(PATIENCE)[0][1], torch.arange(3.0))
            groups.destroy(name)


@pytest.mark.parametrize("why", ["turn", "dtype"])
def test_a_worker_that_does_not_take_a_bucket_leaves_its_group(why: str) -> None:
    """The bucket was sent all the same, and would pass for the next one."""
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(3))
    module.config = SimpleNamespace(name_or_path="")
    engine = Engine(module)
    announced: dict[str, Any] = {**BUCKET, "group_name": "g", "end": Deadline(PATIENCE)}
    unknown = {"dtypes": ["float33"]} if why == "dtype" else {}
    with joined(engine._groups) as trainer, ThreadPoolExecutor() as pool:
        engine.pause("abort", PATIENCE, "0b" if why == "turn" else "")
        pool.submit(trainer.broadcast, [torch.full((3,), 1.0)])
        with pytest.raises(wsync.WsyncError):
            engine.update_weights_from_distributed(**announced | unknown)
        if why == "turn":
            engine.resume(PATIENCE, "0b")
            engine.pause("abort", PATIENCE)
        pool.submit(trainer.broadcast, [torch.full((3,), 2.0)])
        with pytest.raises(wsync.WsyncError, match="in none of that name"):
            engine.update_weights_from_distributed(**announced, weight_version="2")
    assert engine.weight_version == "default"
    assert module.a.tolist() == [0.0] * 3


def test_a_late_announcement_of_an_update_that_has_ended_costs_no_group() -> None:
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(3))
    module.config = SimpleNamespace(name_or_path="")
    engine = Engine(module)
    announced: dict[str, Any] = {**BUCKET, "group_name": "g", "end": Deadline(PATIENCE)}
    with joined(engine._groups) as trainer, ThreadPoolExecutor() as pool:
        for update, value in (("0a", 1.0), ("0b", 2.0)):
            engine.pause("abort", PATIENCE, update)
            if update == "0b":
                with pytest.raises(wsync.StateError, match="update 0a has ended"):
                    engine.update_weights_from_distributed(**announced, update_id="0a")
            sent = pool.submit(trainer.broadcast, [torch.full((3,), value)])
            engine.update_weights_from_distributed(
                **announced, update_id=update, weight_version=update
            )
            sent.result(PATIENCE)
            assert module.a.tolist() == [value] * 3
            engine.resume(PATIENCE, update)


def test_a_worker_stays_in_the_group_of_a_bucket_that_is_announced_twice() -> None:
    groups = UpdateGroups()
    with joined(groups), pytest.raises(Repeated), groups.announced("g"):
        raise Repeated("a has come before")
    groups.destroy("g")


def test_ranks_that_cross_look_around_in_the_thread_that_waits() -> None:
    """What is looked at, sockets say, is not for two threads."""
    store = Store(PATIENCE)
    place = Rendezvous("127.0.0.1", store.port, 2)
    callers: set[int] = set()

    def look() -> None:
        callers.add(threading.get_ident())

    def come_late() -> UpdateGroup:
        group = UpdateGroup(place, 1, timeout=PATIENCE)
        time.sleep(0.5)  # the other one waits for the greeting
        hello = [torch.zeros(1)], dist.AllreduceOptions()
        group.finish(group._group.start("allreduce", *hello), PATIENCE)
        return group

    with ThreadPoolExecutor() as pool:
        coming = pool.submit(come_late)
        here = place.join(0, PATIENCE, look, device=torch.device("cpu"), greet=True)
        there = coming.result()
    assert callers <= {threading.get_ident()}
    for group in (here, there):
        group.close()
    store.close()


STOPPED = """
import os, signal
from wsync.exchange.update_group import Store
store = Store(60)
print(store.port, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_trainer_that_is_stopped_keeps_no_engine_from_answering() -> None:
    """Torch's deadlines do not hold while a store's host accepts connections and says nothing."""
    with (
        ProcessEngine({"a": ((3,), torch.float32)}) as engine,
        subprocess.Popen([sys.executable, "-P", "-c", STOPPED], stdout=subprocess.PIPE) as host,
    ):
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())
            os.waitid(os.P_PID, host.pid, os.WSTOPPED | os.WNOWAIT)
            address: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port}
            address |= {"rank_offset": 1, "world_size": 2, "group_name": "g", "backend": "gloo"}
            for _ in range(2):
                with pytest.raises(wsync.WsyncError, match=r"did not meet|no answer within 1 s"):
                    engine.call("init_weights_update_group", address, 1.0)
                assert engine.model_info(PATIENCE)["consistent"]
        finally:
            host.kill()


class Broken:
    """A backend of which a member is gone."""

    def broadcast(self, *_: Any) -> Any:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1. This may be fatal")


def test_a_collective_that_does_not_start_names_who_is_gone() -> None:
    group = Collectives(Broken(), whole="group g", member="a member of group g")
    with pytest.raises(wsync.PeerClosedError, match="a member of group g is gone: Connection"):
        group.start("broadcast")
    group.close()
    with pytest.raises(wsync.StateError, match="the group of group g is closed"):
        group.start("broadcast")


def test_a_group_may_be_closed_while_a_collective_starts() -> None:
    class Closing(list[Any]):
        """Is emptied by the thread that closes a group, when it has been looked at."""

        def __getitem__(self, place: Any) -> Any:
            self.clear()
            return super().__getitem__(place)

    group = Collectives(Broken(), whole="group g", member="a member of group g")
    group._held = Closing(group._held)
    with pytest.raises(wsync.StateError, match="the group of group g is closed"):
        group.start("broadcast")


def test_torch_does_not_end_a_process_whose_nccl_group_has_lost_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no NCCL here; what is shown is what torch reads when it makes such a group."""
    seen: list[str | None] = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

        def _set_default_timeout(self, _: object) -> None:
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for before in (None, "3"):
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        else:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        store = Store(5.0)
        place = Rendezvous("localhost", store.port, 1, "nccl", "alone")
        UpdateGroup(place, 0, timeout=5.0, device=torch.device("cuda", 0))
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
    assert seen == ["0", "0"]


class Failed:
    """A collective that has ended badly."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("ncclRemoteError: a peer is gone")


class Stuck:
    """A backend's group, which ends when it is let go."""

    def __init__(self) -> None:
        self.let_go, self.ended = threading.Event(), threading.Event()

    def allreduce(self) -> Failed:
        return Failed()

    def __del__(self) -> None:
        self.let_go.wait(PATIENCE)
        self.ended.set()


def test_a_group_that_has_failed_is_left_without_waiting_for_its_end() -> None:
    stuck = Stuck()
    let_go, ended = stuck.let_go, stuck.ended
    group = Collectives(stuck, whole="2 ranks", member="a rank", lingers=True)
    del stuck
    with pytest.raises(wsync.PeerClosedError, match="a rank is gone"):
        group.finish(group.start("allreduce"), PATIENCE)
    group.close()
    assert not ended.is_set()
    let_go.set()
    assert ended.wait(PATIENCE)


def test_a_group_whose_end_takes_long_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsync.exchange.polled_collectives.LEAVE_SECONDS", 0.05)
    stuck = Stuck()
    let_go, ended = stuck.let_go, stuck.ended
    group = Collectives(stuck, whole="2 ranks", member="a rank")
    del stuck
    group.close()
    assert not ended.is_set()
    let_go.set()
    assert ended.wait(PATIENCE)


def test_an_error_that_is_kept_keeps_no_member_waiting() -> None:
    """A member is gone; the others learn that when the one who sends has left, too."""
    store = Store(PATIENCE)
    place = Rendezvous("localhost", store.port, 3)
    with ThreadPoolExecutor(3) as pool:
        make = lambda rank: UpdateGroup(place, rank, timeout=PATIENCE)  # noqa: E731
        trainer, gone, waits = pool.map(make, range(3))
        gone.close()
        waiting = pool.submit(waits.broadcast, [torch.zeros(1 << 20)] * 4)
        with pytest.raises(wsync.PeerClosedError) as kept:
            trainer.broadcast([torch.zeros(1 << 20)] * 4)
        trainer.close()
        with pytest.raises(wsync.PeerClosedError):
            waiting.result(PATIENCE / 2)
        waits.close()
    store.close()
    assert kept.value.__traceback__ is not None


class Interrupted:
    """A group of torch's whose collective has begun when Ctrl-C comes; notes who ends it."""

    def __init__(self, ended_by: list[threading.Thread]) -> None:
        self.ended_by = ended_by

    @staticmethod
    def allreduce() -> None:
        raise KeyboardInterrupt

    def __del__(self) -> None:
        self.ended_by.append(threading.current_thread())


def test_who_drops_an_interrupts_traceback_does_not_end_the_group() -> None:
    """That would wait for the collective, beyond every deadline."""
    ended_by: list[threading.Thread] = []
    group = Collectives(Interrupted(ended_by), whole="2 ranks", member="a rank")
    with pytest.raises(KeyboardInterrupt) as caught:
        group.start("allreduce")
    before = threading.active_count()
    group.close()
    del caught
    deadline = Deadline(PATIENCE)
    while not ended_by or threading.active_count() > before:
        assert deadline.left
        time.sleep(0.01)
    assert ended_by != [threading.current_thread()]


def test_an_error_of_a_backends_own_is_not_a_group_that_is_closed() -> None:
    class Backend:
        def allreduce(self) -> None:
            raise IndexError("of the backend")

    group = Collectives(Backend(), whole="2 ranks", member="a rank")
    with pytest.raises(IndexError, match="of the backend"):
        group.start("allreduce")
    group.close()
    with pytest.raises(wsync.StateError, match="2 ranks is closed"):
        group.start("allreduce")


# a collective that is stuck when its group is left, and ends after the interpreter has begun to
ENDING = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from wsync import DeadlineError
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup

store = Store(60.0)
place = Rendezvous("localhost", store.port, 2)
with ThreadPoolExecutor(2) as pool:
    make = lambda rank: UpdateGroup(place, rank, timeout=60.0)
    first, second = pool.map(make, (0, 1))
second.timeout = 0.0
try:
    second.broadcast([torch.zeros(4)])
except DeadlineError:
    second.close()

class Late:
    def __init__(self, peer):
        self.peer = peer

    def __del__(self, sleep=time.sleep):
        self.peer = None
        sleep(0.5)

late = Late(first._group._held[0])
del first, second
sys.exit(3)
"""


def test_a_process_ends_as_it_wants_to_whatever_is_stuck_in_a_group() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", ENDING], stderr=subprocess.PIPE, text=True, timeout=180.0
    )
    assert ended.returncode == 3, ended.stderr


ONE = Introduction(gpu="GPU-1", version=22907, address="nccl 22907 1 -", lacks="", in_torch=True)
TWO = dataclasses.replace(ONE, gpu="GPU-2")
OLD = dataclasses.replace(TWO, version=22809)
NONE = dataclasses.replace(TWO, version=0, address="", lacks="has no NCCL")


def chosen(
    options: wsync.Options, first: Introduction, second: Introduction, *workers: Introduction
) -> str:
    """By the first of two ranks on one host, which serves workers of engine E."""
    told = [dataclasses.asdict(second), {}]
    group: Any = SimpleNamespace(rank=0, size=2, gather_json=lambda mine: [mine, told])
    transport = Transport(group, [0, 0], options)
    remote = {2 + i: (f"engine E: worker {i}", said) for i, said in enumerate(workers)}
    with mock.patch.object(Introduction, "on", return_value=first):
        transport.choose(_core.host(), remote)
    return transport._kind


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (ONE, "trainer rank 0 and trainer rank 1 share GPU-1: NCCL needs a GPU for each"),
        (NONE, "trainer rank 1 has no NCCL"),
        (OLD, "trainer rank 0 has NCCL 22907 and trainer rank 1 NCCL 22809"),
        (Introduction(), "trainer rank 1 is on the host"),
    ],
)
def test_ranks_that_nccl_does_not_serve_share_memory_where_all_reach_it(
    second: Introduction, why: str
) -> None:
    """Ranks on several GPUs may not reach each other's memory."""
    assert chosen(wsync.Options(), ONE, TWO) == "nccl"
    assert chosen(wsync.Options(), ONE, second) == ("shared" if second == ONE else "gloo")
    assert chosen(wsync.Options(exchange="shared"), ONE, second) == "shared"
    with pytest.raises(wsync.InvalidArgumentError, match=f"exchange='nccl', but {why}"):
        chosen(wsync.Options(exchange="nccl"), ONE, second)


@pytest.mark.parametrize(
    ("worker", "kind", "why"),
    [
        (TWO, "gloo", "trainer rank 1 and engine E: worker 1 share GPU-2: NCCL needs a GPU"),
        (dataclasses.replace(OLD, gpu="GPU-4"), "gloo", "engine E: worker 1 NCCL 22809"),
        (dataclasses.replace(NONE, gpu="GPU-4"), "torch nccl", "engine E: worker 1 has no NCCL"),
        (Introduction(), "gloo", "engine E: worker 1 is on the host"),
    ],
)
def test_remote_workers_that_nccl_does_not_serve_are_reached_by_torch_s_groups(
    worker: Introduction, kind: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    three = dataclasses.replace(ONE, gpu="GPU-3")
    choose_exchange._say_once.cache_clear()
    for options in (wsync.Options(), wsync.Options(exchange="nccl")):
        assert chosen(options, ONE, TWO, three) == "nccl"
    assert caplog.messages == []
    for _ in range(2):
        assert chosen(wsync.Options(), ONE, TWO, three, worker) == kind
    (said,) = caplog.messages
    assert f"remote workers are reached by {kind}, because " in said
    assert why in said
    assert chosen(wsync.Options(exchange="gloo"), ONE, TWO, three) == "gloo"
    with pytest.raises(wsync.InvalidArgumentError, match=why):
        chosen(wsync.Options(exchange="nccl"), ONE, TWO, three, worker)


def test_nothing_is_said_where_all_are_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(wsync.Options(), Introduction(), Introduction(), Introduction()) == "gloo"
    assert caplog.messages == []
