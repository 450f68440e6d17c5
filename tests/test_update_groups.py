"""An engine worker's groups: who waits for whom, for how long, and what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.update_groups import UpdateGroups
from support.weights_only_engine import ProcessEngine

import wsync
from wsync import _core
from wsync.exchange import choose_exchange
from wsync.exchange.choose_exchange import ExchangeSetup
from wsync.exchange.introductions import Introduction
from wsync.exchange.polled_collectives import Collectives
from wsync.exchange.update_group import Rendezvous, Store, UpdateGroup

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
        group = place.join(0, PATIENCE, bool, device=torch.device("cpu"))
        joining.result(PATIENCE)
    try:
        yield group
    finally:
        group.close()
        store.close()


BUCKET: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[3]]}


def test_a_broadcast_that_does_not_come_costs_its_deadline() -> None:
    groups = UpdateGroups()
    late = "a broadcast was not done within 1 s|a collective of group g did not end within 1 s"
    for limits in ({"timeout": 1.0}, {}):
        with joined(groups, **limits):
            few = {} if limits else {"timeout": 1.0}
            with pytest.raises(wsync.DeadlineError, match=late):
                groups.receive(group_name="g", **BUCKET, **few)
            groups.destroy("g")


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

    rank = size = lambda _: 0

    def broadcast(self, *_: Any) -> Any:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1. This may be fatal")


def test_a_collective_that_does_not_start_names_who_is_gone() -> None:
    group = Collectives(Broken(), timeout=1.0, whole="group g", member="a member of group g")
    with pytest.raises(wsync.PeerClosedError, match="a member of group g is gone: Connection"):
        group.start("broadcast")
    group.close()
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

        rank = size = lambda _: 0

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for before in (None, "3"):
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        else:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        store = Store(5.0)
        place = Rendezvous("localhost", store.port, 1, "nccl", "alone")
        place.join(0, 5.0, bool, device=torch.device("cuda", 0))
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
    assert seen == ["0", "0"]


ONE = Introduction(gpu="GPU-1", version=22907, address="nccl 22907 1 -", lacks="")
TWO = dataclasses.replace(ONE, gpu="GPU-2")
OLD = dataclasses.replace(TWO, version=22809)
OTHER = dataclasses.replace(TWO, cumem="0")
NONE = dataclasses.replace(TWO, version=0, address="", lacks="has no NCCL")


def chosen(
    options: wsync.Options, first: Introduction, second: Introduction, *workers: Introduction
) -> str:
    """By the first of two ranks on one host, which serves workers of engine E."""
    told = [[1, "trainer rank 1", dataclasses.asdict(second)]]
    group: Any = SimpleNamespace(rank=0, size=2, gather_json=lambda mine: [mine, told])
    setup = ExchangeSetup(group, [0, 0], options)
    remote = {2 + i: (f"engine E: worker {i}", said) for i, said in enumerate(workers)}
    with mock.patch.object(Introduction, "on", return_value=first):
        setup.choose(_core.host(), remote)
    return setup._kind


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (ONE, "trainer rank 0 and trainer rank 1 share GPU-1: NCCL needs a GPU for each"),
        (NONE, "trainer rank 1 has no NCCL"),
        (OLD, "trainer rank 0 has NCCL 22907 and trainer rank 1 NCCL 22809"),
        (
            OTHER,
            r"trainer rank 0 has NCCL_CUMEM_ENABLE=1 \(1 is the default\) and trainer rank 1 0",
        ),
        (Introduction(), "trainer rank 1 has its weights in CPU memory"),
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
    ("worker", "why"),
    [
        (TWO, "trainer rank 1 and engine E: worker 1 share GPU-2: NCCL needs a GPU"),
        (dataclasses.replace(OLD, gpu="GPU-4"), "engine E: worker 1 NCCL 22809"),
        (dataclasses.replace(NONE, gpu="GPU-4"), "engine E: worker 1 has no NCCL"),
        (Introduction(), "engine E: worker 1 has its weights in CPU memory"),
    ],
)
def test_remote_workers_that_nccl_does_not_serve_are_reached_by_gloo(
    worker: Introduction, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    three = dataclasses.replace(ONE, gpu="GPU-3")
    choose_exchange._say_once.cache_clear()
    for options in (wsync.Options(), wsync.Options(exchange="nccl")):
        assert chosen(options, ONE, TWO, three) == "nccl"
    assert caplog.messages == []
    for _ in range(2):
        assert chosen(wsync.Options(), ONE, TWO, three, worker) == "gloo"
    (said,) = caplog.messages
    assert "remote workers are reached by gloo, because " in said
    assert why in said
    assert chosen(wsync.Options(exchange="gloo"), ONE, TWO, three) == "gloo"
    with pytest.raises(wsync.InvalidArgumentError, match=why):
        chosen(wsync.Options(exchange="nccl"), ONE, TWO, three, worker)
