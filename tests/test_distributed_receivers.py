"""Remote engines that run wsync's receiver: each worker is a rank of the exchange."""

from __future__ import annotations

import multiprocessing
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import distributed_receivers as cases
from support.fused import Fused, bytes_of, draw, held
from support.megatron_cpu import Parallel
from support.procs import Ranks, started
from support.relay import RelayedListener
from support.tiny_qwen3 import dense, sparse
from support.weights_only_engine import ProcessEngine
from support.worker_processes import WorkersEngine

import wsync
from wsync import _core
from wsync.exchange import remote_session, update_group
from wsync.exchange.update_group import UpdateGroup
from wsync.layout import from_tensors
from wsync.machine.host import own_address
from wsync.messages.tcp_channel import Channel, Frame, Listener
from wsync.trainer.planning import whole
from wsync.trainer.sessions.broadcast import BroadcastSession
from wsync.trainer.sessions.worker import RemoteSession

PARALLEL = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2)),
    "moe-tp2pp2ep2": (sparse(), Parallel(tp=2, pp=2, ep=2, etp=1)),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_engines_of_different_sizes_come_and_go(name: str, ranks: Ranks) -> None:
    found = ranks.run(cases.come_and_go, *PARALLEL[name], timeout=240)
    for rank in found:
        assert [facts["wrong"] for facts in rank] == [[]] * 5
        assert [facts["versions"] for facts in rank] == [set()] * 5
    first = found[0]
    assert [facts["workers"] for facts in first] == [1, 1, 3, 3, 2]
    assert [facts["redundancy"] for facts in first] == [1.0] * 5
    assert all(facts["rounds"] > 2 for facts in first)
    # the union of what the workers of one engine keep is the model, and nothing else travels
    model = first[0]["model_nbytes"]
    assert first[0]["delivered_nbytes"] == model
    # the copies of what no worker of two has to itself: norms and routers, and the like
    assert 2 * model <= first[2]["delivered_nbytes"] < 2.5 * model
    # pieces are sent from the replicas in turn: no rank sends most of it
    sent = [rank[0]["sent_nbytes"] for rank in found]
    assert sent == [first[0]["sent_nbytes"]] * 4


@pytest.mark.parametrize("broadcast", ["auto", "bucket"])
def test_colocated_and_remote_engines_in_one_update(broadcast: str, ranks: Ranks) -> None:
    found = ranks.run(cases.mix, *PARALLEL["tp2pp2"], broadcast, timeout=240)
    assert [facts["wrong"] for facts in found] == [[]] * 4
    assert found[0]["workers"] == 3
    assert found[0]["redundancy"] == 1.0
    remote = "gloo" if broadcast == "auto" else "stock broadcast"
    assert [facts["paths"] for facts in found] == [{"tp2": "ring", "tp1": remote}] * 4


def test_workers_that_learn_are_sent_what_they_keep() -> None:
    settings = [{"tp": 2, "rank": rank} for rank in range(2)]
    options = wsync.Options(**{**cases.OPTIONS, "round_nbytes": 2048, "ring_nbytes": 8192})
    with WorkersEngine(cases.FusedWorker, settings, name="fused", path=sys.path) as engine:
        with wsync.connect(draw(0), [engine], options=options) as sync:
            for seed in (1, 2):
                report = sync.update(draw(seed), version=seed)
        found = engine._call("held", None, 20)
    for rank in range(2):
        module = Fused(2, rank, ep=True)
        module.load_weights(list(draw(2).items()))
        wanted = {name: bytes_of(tensor) for name, tensor in held(module).items()}
        assert [name for name in wanted if found[rank][name] != wanted[name]] == []
    assert report.redundancy == 1.0
    assert report.delivered_nbytes < 1.4 * report.model_nbytes
    assert report.sent_nbytes < 1.05 * report.delivered_nbytes  # pieces start at aligned places
    assert engine.weight_version == "2"


def test_an_engine_that_never_comes_is_named_in_time() -> None:
    release = threading.Event()

    class Absent:
        """Takes the opening request and does nothing about it."""

        name, workers, load_formats, unanswered = "absent", 1, (), ()

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

        def update_weights(self, *_: Any, **__: Any) -> None:
            release.wait(60)

    weights = {"a": torch.arange(5000.0)}
    shapes = {"a": (weights["a"].shape, torch.float32)}
    options = wsync.Options(
        **{**cases.OPTIONS, "deadline": 5.0, "broadcast": "wsync", "lost": "raise"}
    )
    try:
        with ProcessEngine(shapes, name="present") as present:
            with wsync.connect(weights, [present, Absent()], options=options) as sync:
                for text in ("worker 0 did not join the update within", "still busy with"):
                    text = f"engine absent: {text}"
                    with pytest.raises(wsync.DeadlineError, match=text):
                        sync.update()
            assert not present.paused and present.model_info(5)["consistent"]
            with wsync.connect(weights, [present], options=options) as sync:
                sync.update(version=3)
            assert torch.equal(present.weights()["a"], weights["a"])
            assert present.weight_version == "3" and not present.paused
    finally:
        release.set()


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("killed", r"engine tp1: (worker 0 (is gone|did)|.*ended)"),
        ("stopped", r"took over|within|not answer|no answer"),
        ("trainer", r"RemoteError: trainer rank 1: ValueError: a planted failure"),
    ],
)
def test_survivors_report_and_the_next_update_works(way: str, text: str, ranks: Ranks) -> None:
    found = ranks.run(cases.fail_once, *PARALLEL["tp2pp2"], way, timeout=240)
    errors = {facts["error"] for facts in found}
    assert len(errors) == 1
    assert re.search(text, errors.pop())
    first = found[0]
    # the engine that was not struck has noticed, and did not take on anything
    assert first["consistent"] == [False]
    assert "update 2" in first["reasons"][0]
    assert [facts["wrong"] for facts in found] == [[]] * 4
    assert first["versions"] == ["after"] * (1 if way == "killed" else 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_is_struck_does_not_hold_an_engine(how: signal.Signals) -> None:
    weights = {f"t{i}": torch.arange(20000.0) + i for i in range(8)}
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    with ProcessEngine(shapes, name="held") as engine:
        ours, theirs = multiprocessing.Pipe()
        trainer = started(cases.strike_the_trainer, theirs, shapes, how)
        try:
            # the trainer reaches the engine through this process, which goes on
            error = cases.relay(ours, engine, timeout=60)
            assert "worker 0: update 2 of this connection: " in error
            assert ("within 5 s" if how == signal.SIGSTOP else "is gone") in error
            info = engine.model_info(10)
            assert not info["consistent"] and info["weight_version"] == "1"
            options = wsync.Options(**cases.OPTIONS)
            with wsync.connect(weights, [engine], options=options) as sync:
                sync.update(version="next")
            found = engine.weights()
            assert all(torch.equal(found[name], weights[name]) for name in weights)
            assert engine.model_info(10)["weight_version"] == "next"
        finally:
            trainer.kill()
            trainer.join(20)


@pytest.mark.parametrize("since", ["the start", "a round"])
def test_a_network_that_carries_nothing_any_more(
    since: str, engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections stay open, and neither end hears from the other."""
    answers: list[str] = []
    stalled, relays = threading.Event(), []
    listener = type("Listener", (RelayedListener,), {"stalled": stalled, "relays": relays})
    monkeypatch.setattr(remote_session, "Listener", listener)
    weights = {"a": torch.arange(5000.0)}
    deliver, post = engine.update_weights, RemoteSession.post

    def update_weights(*arguments: Any, **more: Any) -> None:
        try:
            deliver(*arguments, **more)
        except wsync.WsyncError as error:
            answers.append(str(error))
            raise

    def posted(*arguments: Any) -> None:
        stalled.set()
        post(*arguments)

    monkeypatch.setattr(engine, "update_weights", update_weights)
    options = wsync.Options(**{**cases.OPTIONS, "deadline": 4.0, "round_nbytes": 8192})
    with wsync.connect(weights, [engine], options=options) as sync:
        if since == "the start":
            stalled.set()
        with monkeypatch.context() as patch:
            patch.setattr(RemoteSession, "post", posted)
            with pytest.raises(wsync.WsyncError, match=r"worker 0.* within (3.6|4) s"):
                sync.update()
        # the engine's end has given up by itself
        assert re.search(r"did not send (MODEL or PLAN|COMMIT) within (3.6|4) s", answers[0])
        assert engine.model_info(5)["consistent"] == (since == "the start")
        assert engine.paused == (since != "the start")
        stalled.clear()
        sync.update(version="next")
    assert torch.equal(engine.weights()["a"], weights["a"])
    assert engine.weight_version == "next"
    for relay in relays:
        relay.close()


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    with ProcessEngine({"a": ((5000,), torch.float32)}, name="engine") as started:
        yield started


def test_remote_workers_and_shared_memory_exclude_each_other(engine: ProcessEngine) -> None:
    options = wsync.Options(**{**cases.OPTIONS, "exchange": "shared"})
    with pytest.raises(wsync.InvalidArgumentError, match=r"exchange='shared', but .*: engine"):
        wsync.connect({"a": torch.arange(5000.0)}, [engine], options=options)
    assert not engine.paused


def test_a_worker_may_come_by_an_address_that_is_not_the_hosts_own() -> None:
    """As behind NAT, whose address is given by WSYNC_ADDRESS."""
    listener = Listener("203.0.113.5", "worker 0")
    where = re.fullmatch(r"([0-9a-f]{32})@203\.0\.113\.5:([0-9]+)", listener.address)
    assert where is not None
    worker = Channel.connect(f"{where[1]}@127.0.0.1:{where[2]}", 5)
    trainer = listener.accept(5)
    trainer.send(Frame.COMMIT, b"", 5)
    assert worker.wait((Frame.COMMIT,), 5)[0] == Frame.COMMIT
    for end in (trainer, worker, listener):
        end.close()


def test_an_address_where_nobody_can_listen_is_named() -> None:
    with pytest.raises(wsync.SystemCallError, match=r"listening at no\.such\.host"):
        Listener("no.such.host.invalid", "worker 0")


def test_other_hosts_are_never_told_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"10.0.0.1": "10.0.0.9", "127.0.0.1": "127.0.0.1"}

    def on_the_way(host: str, port: int) -> str:
        if host not in ways:
            raise OSError("no route")
        return ways[host]

    def named(host: str, *_: object, **__: object) -> list[Any]:
        addresses = ["127.0.1.1", "192.168.7.1"] if host == socket.gethostname() else []
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.delenv("WSYNC_ADDRESS", raising=False)
    monkeypatch.setattr("wsync.machine.host._on_the_way", on_the_way)
    monkeypatch.setattr(socket, "getaddrinfo", named)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert own_address([]) == "192.168.7.1"
    assert own_address(["actor 7"]) == "192.168.7.1"
    assert own_address(["http://127.0.0.1:1"]) == "127.0.0.1"
    assert own_address(["http://127.0.0.1:1", "http://10.0.0.1:1"]) == "10.0.0.9"
    assert own_address(["http://127.0.0.1:1", "actor 7"]) == "192.168.7.1"


def test_the_environment_has_the_last_word_on_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSYNC_ADDRESS", "10.1.2.3")
    assert own_address([]) == own_address(["http://127.0.0.1:1"]) == "10.1.2.3"
    monkeypatch.setenv("WSYNC_ADDRESS", "no address")
    with pytest.raises(wsync.InvalidArgumentError, match="WSYNC_ADDRESS='no address': "):
        own_address([])


def test_connections_without_the_token_are_closed_and_keep_nobody_out() -> None:
    listener = Listener("127.0.0.1", "worker 0")
    host, port = listener.address.partition("@")[2].split(":")
    strangers = [socket.create_connection((host, int(port)), 5) for _ in range(2)]
    strangers[0].send(bytes(100))  # the other one says nothing
    with pytest.raises(wsync.DeadlineError, match=r"worker 0 did not connect within 0.2 s"):
        listener.accept(0.2)
    wrong = Channel.connect("f" * 32 + listener.address[32:], 5)
    worker = Channel.connect(listener.address, 5)
    trainer = listener.accept(5)
    trainer.send(Frame.COMMIT, b"", 5)
    assert worker.wait((Frame.COMMIT,), 5)[0] == Frame.COMMIT
    with pytest.raises(wsync.PeerClosedError):
        wrong.wait((Frame.COMMIT,), 5)
    listener.close()
    for end in (trainer, worker, wrong, *strangers):
        end.close()


def start(group: UpdateGroup) -> Any:
    """A collective that the other member never takes part in."""
    return group.exchange(torch.empty(8), torch.ones(8), [4, 4], [4, 4])


def test_a_source_broadcasts_from_the_trainers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own torch's current GPU is the first one."""
    chosen = {threading.get_ident(): 3}
    made: list[tuple[str, str]] = []

    class Nccl:
        def __init__(self, store: Any) -> None:
            self.store = store

        def _set_default_timeout(self, timeout: Any) -> None: ...

        rank = size = lambda _: 0

    def make(backend: str, store: Any, *_: Any) -> Any:
        made.append((backend, threading.current_thread().name))
        return Nccl(store)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.get(threading.get_ident(), 0))
    monkeypatch.setattr(update_group, "_make", make)
    engine = SimpleNamespace(name="http://127.0.0.1:1", workers=1, call=lambda *_, **__: None)
    taking: list[Any] = [engine]
    session = BroadcastSession(0, taking, options=wsync.Options(backend="nccl"))
    source = from_tensors({"a": torch.ones(3)}).layout
    plan = _core.Plan(source, [(whole(source, [0]), True)], [(0, 0)], [0], 0)
    session.make_ring(plan, _core.host())
    session.attach(plan, _core.host(), 5.0, lambda: None)
    assert made == [("nccl", "wsync-join")]
    assert session._group is not None and session._group._device == torch.device("cuda", 3)
    assert session._group.timeout == wsync.Options().deadline  # not what the meeting has left
    session.close()
