"""Remote engines as they are: weights broadcast over process groups, as SGLang takes them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support import distributed_cases as cases
from support.broadcast_engine import served
from support.megatron_cpu import Parallel
from support.procs import Ranks
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import dense, in_server, sparse, sums
from support.weights_only_engine import ProcessEngine, RefusingWorker

import wsync
from wsync.demo.engines.serve import ServerProcess
from wsync.layout import from_tensors
from wsync.trainer.connection import Connection

OPTIONS: dict[str, Any] = {
    "deadline": 60.0,
    "lost": "raise",
    "progress": False,
    "delivery": "distributed",
    "broadcast": "bucket",
    "bucket_nbytes": 4096,
}


def delivered(delivery: str) -> dict[str, Any]:
    """These options for another delivery, which knows no broadcasts."""
    if delivery == "distributed":
        return OPTIONS
    return {**OPTIONS, "delivery": delivery, "broadcast": "auto"}


# no two of them can follow each other in a bucket without gaps as they come
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((3,), torch.uint8),
    "b": ((5, 7), torch.bfloat16),
    "c": ((129,), torch.float32),
    "d": ((1, 3), torch.bfloat16),
    "e": ((5,), torch.float8_e4m3fn),
    "f": ((40, 70), torch.bfloat16),
    "g": ((), torch.float64),
    "h": ((0, 4), torch.float32),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(
            0, 120, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator
        )
        .to(torch.uint8)
        .view(dtype)
        .reshape(shape)
        for name, (shape, dtype) in SHAPES.items()
    }


def same(engine: ProcessEngine, weights: dict[str, torch.Tensor]) -> bool:
    found = engine.weights()
    return found.keys() == weights.keys() and all(
        torch.equal(as_bytes(found[name]), as_bytes(weights[name])) for name in weights
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ProcessEngine]]:
    """Engines that tests may not harm."""
    with (
        ProcessEngine(SHAPES, name="first") as first,
        ProcessEngine(SHAPES, name="second") as other,
    ):
        yield [first, other]


@pytest.mark.parametrize("broadcast", ["bucket", "tensor"])
def test_every_engine_gets_every_byte(engines: list[ProcessEngine], broadcast: str) -> None:
    weights = drawn(0)
    options = wsync.Options(**{**OPTIONS, "broadcast": broadcast})
    with wsync.connect(weights, engines, options=options) as sync:
        for seed in (1, 2):
            weights.update(drawn(seed))
            report = sync.update(version=f"{broadcast}-{seed}")
            assert [same(engine, weights) for engine in engines] == [True, True]
            assert [e.weight_version for e in engines] == [f"{broadcast}-{seed}"] * 2
            assert not any(engine.paused for engine in engines)
    assert report.workers == 2
    assert report.delivered_nbytes == 2 * report.model_nbytes
    assert report.rounds > 1


def slime(weights: dict[str, torch.Tensor], **more: Any) -> wsync.UpdateWeightFromDistributed:
    return wsync.UpdateWeightFromDistributed(
        SimpleNamespace(),
        from_tensors(weights),
        lambda: weights,
        model_name="any",
        quantization_config=None,
        options=wsync.Options(**{**OPTIONS, **more}),
    )


def test_slimes_calls_and_engines_that_come_and_go(
    engines: list[ProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    weights = drawn(3)
    updater = slime(weights)
    with pytest.raises(wsync.StateError, match="connect_rollout_engines before"):
        updater.update_weights()
    for number, present in enumerate((engines[:1], engines, engines[1:]), 1):
        updater.connect_rollout_engines(present, object())
        weights.update(drawn(10 + number))
        updater.update_weights()
        assert [same(engine, weights) for engine in present] == [True] * len(present)
        assert {engine.weight_version for engine in present} == {str(number)}
    assert updater.weight_version == 3
    assert updater.pop_metrics()["wsync/update_seconds"] > 0
    assert updater.pop_metrics() == {}
    assert not same(engines[0], weights)
    updater.disconnect_rollout_engines()
    updater.disconnect_rollout_engines()


def test_an_engine_of_the_trainers_own_process_is_not_remote() -> None:
    class Engine:
        """As `sglang.Engine` is called."""

        def update_weights_from_tensor(self, named_tensors: Any) -> None: ...
        def flush_cache(self) -> None: ...

    options = wsync.Options(**OPTIONS)
    with wsync.connect(drawn(9), [Engine()], options=options) as sync:
        with pytest.raises(wsync.UnsupportedError, match="init_weights_update_group: an engine in"):
            sync.update()


def test_colocated_and_remote_engines_in_one_update(
    engines: list[ProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = drawn(30)
    updater = wsync.UpdateWeightFromTensor(
        SimpleNamespace(),
        from_tensors(weights),
        None,
        model_name="any",
        options=wsync.Options(**{**OPTIONS, "delivery": "auto"}),
    )
    updater.connect_rollout_engines(engines, None, engine_gpu_offsets=[0, 1])
    joins = cases.note_joins(engines)
    known: list[int] = []  # joins when the workers that learn had learnt
    send_model = Connection._send_model

    def noting(*arguments: Any) -> None:
        send_model(*arguments)
        known.append(len(joins))

    monkeypatch.setattr(Connection, "_send_model", noting)
    for seed in (31, 32):
        weights.update(drawn(seed))
        updater.update_weights()
        assert [same(engine, weights) for engine in engines] == [True, True]
        assert [engine.weight_version for engine in engines] == [str(updater.weight_version)] * 2
    assert len({join["group_name"] for join in joins}) == 1
    assert known == [0]  # an engine that joins does not wait for that
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    metrics = updater.pop_metrics()
    assert metrics["wsync/delivered_nbytes"] == 2 * nbytes
    assert metrics["wsync/engines_by_ring"] == metrics["wsync/engines_by_stock_broadcast"] == 1
    updater.disconnect_rollout_engines()


@pytest.mark.parametrize("said", [2, 3])
def test_a_wrong_number_of_workers_is_reported_in_time(
    engines: list[ProcessEngine], said: int
) -> None:
    """The group waits for ranks that nobody is; the engine that came goes on."""

    class Boastful:
        """Says that it has more workers than it has."""

        workers = said

        def __getattr__(self, name: str) -> Any:
            return getattr(engines[0], name)

    weights = drawn(5)
    handle: Any = Boastful()
    options = wsync.Options(**{**OPTIONS, "deadline": 2.0})
    with wsync.connect(weights, [handle], options=options) as sync:
        with pytest.raises(wsync.WsyncError, match=f"{1 + said} members did not meet"):
            sync.update()
    assert not engines[0].paused
    with wsync.connect(weights, engines[:1], options=wsync.Options(**OPTIONS)) as sync:
        sync.update()
    assert same(engines[0], weights)


def test_an_engine_that_never_joins_is_reported_in_time(engines: list[ProcessEngine]) -> None:
    release = threading.Event()

    class Absent:
        """Does not come when it is called."""

        name, workers, load_formats, unanswered = "absent", 1, (), ()

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

        def call(self, method: str, arguments: Any, timeout: float) -> None:
            if method == "init_weights_update_group":
                release.wait(60)

    weights = drawn(6)
    options = wsync.Options(**{**OPTIONS, "deadline": 2.0})
    try:
        with wsync.connect(weights, [engines[0], Absent()], options=options) as sync:
            with pytest.raises(
                wsync.DeadlineError,
                match=r"3 members did not meet.*first \(tp 1\), absent \(tp 1\)",
            ):
                sync.update()
            with pytest.raises(wsync.DeadlineError, match="engine absent: still busy with"):
                sync.update()
    finally:
        release.set()
    with wsync.connect(weights, engines[:1], options=wsync.Options(**OPTIONS)) as sync:
        sync.update()
    assert same(engines[0], weights)


@pytest.mark.parametrize("delivery", ["distributed", "stock"])
def test_an_engine_that_refuses_a_bucket_is_sent_no_later_one(delivery: str) -> None:
    """It would take the refused bucket for the next, and report the version with the last."""
    weights = {f"t{i}": torch.full((1024,), 1.0) for i in range(4)}
    shapes = {name: (t.shape, t.dtype) for name, t in weights.items()}
    options = wsync.Options(**delivered(delivery))
    with ProcessEngine(shapes, worker=RefusingWorker) as engine:
        with wsync.connect(weights, [engine], options=options) as sync:
            with pytest.raises(wsync.RemoteError, match="no second bucket"):
                sync.update(version=7)
        assert engine.model_info(60)["weight_version"] != "7"
        assert [t.count_nonzero() > 0 for t in engine.weights().values()].count(True) == 1


def large(nbytes: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((nbytes // 8,), i, dtype=torch.uint8) for i in range(8)}


@pytest.fixture
def big() -> Iterator[list[ProcessEngine]]:
    """Two engines, and buckets that take their time."""
    shapes = {name: (t.shape, t.dtype) for name, t in large(64 << 20).items()}
    with ProcessEngine(shapes, name="doomed") as first, ProcessEngine(shapes, name="well") as other:
        yield [first, other]


@pytest.mark.parametrize(
    ("how", "delivery"),
    [
        (signal.SIGKILL, "distributed"),
        pytest.param(signal.SIGSTOP, "distributed", marks=pytest.mark.slow),
        (signal.SIGKILL, "stock"),
    ],
)
def test_an_engine_that_dies_or_stalls_between_buckets(
    big: list[ProcessEngine], how: signal.Signals, delivery: str
) -> None:
    weights = large(64 << 20)
    options = wsync.Options(**{**delivered(delivery), "deadline": 5.0, "bucket_nbytes": 8 << 20})
    sync = wsync.connect(weights, big, options=options)
    sync.update()
    struck = threading.Event()
    ask = big[0]._call
    told: list[str] = []

    def call(what: str, arguments: Any, timeout: float) -> list[Any]:
        told.append(what)
        if told.count("update_weights_from_distributed") + told.count("update") == 4:
            os.kill(big[0].pids[0], how)
            struck.set()
        return ask(what, arguments, timeout)

    big[0]._call = call  # type: ignore[method-assign]
    with pytest.raises(wsync.WsyncError):
        sync.update()
    assert struck.is_set()
    assert big[1].paused
    sync.close()
    if how == signal.SIGSTOP:
        os.kill(big[0].pids[0], signal.SIGCONT)
    weights["t0"].fill_(77)
    with wsync.connect(weights, big[1:], options=wsync.Options(**OPTIONS)) as sync:
        sync.update(version=9)
    assert torch.equal(big[1].weights()["t0"], weights["t0"])
    assert big[1].weight_version == "9" and not big[1].paused


CASES = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2), "bucket"),
    "tp2pp2-tensors": (dense(), Parallel(tp=2, pp=2), "tensor"),
    "tp2pp2vpp2-tied": (dense(4, tied=True), Parallel(tp=2, pp=2, vpp=2), "bucket"),
    "moe-tp2pp2ep2": (sparse(), Parallel(tp=2, pp=2, ep=2, etp=1), "bucket"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_broadcasts_for_all_stages(name: str, ranks: Ranks) -> None:
    config, parallel, broadcast = CASES[name]
    found = ranks.run(cases.update, config, parallel, broadcast, timeout=240)
    assert [facts["wrong"] for facts in found] == [[]] * 4
    first = found[0]
    assert first["versions"] == ["1", "1", "2", "2", "3"]
    assert first["groups"] == 1
    # each byte goes once to the rank that sends
    assert first["sent_nbytes"] < first["model_nbytes"]


def test_a_rank_that_fails_leaves_engines_paused_and_the_next_update_works(ranks: Ranks) -> None:
    found = ranks.run(cases.fail_once, dense(), Parallel(tp=2, pp=2), timeout=240)
    assert {facts["error"] for facts in found} == {
        "RemoteError: trainer rank 1: ValueError: a planted failure"
    }
    assert found[0]["paused"]
    assert found[0]["open"] == []  # nobody can join a group that has failed
    assert [facts["wrong"] for facts in found] == [[]] * 4


def test_http_engines_take_broadcasts() -> None:
    config = dense()
    with served(config) as server, TensorParallelEngine(config, tp=2) as sharded:
        model = transformers.AutoModelForCausalLM.from_config(config)
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        options = wsync.Options(**{**OPTIONS, "bucket_nbytes": 1 << 17})
        with wsync.connect(weights, [server.url, sharded], options=options) as sync:
            sync.update(version=5)
        found = sharded.weights()
        assert [n for n in weights if not torch.equal(found[n], weights[n])] == []
        check_http(server, weights)


def check_http(server: ServerProcess, weights: dict[str, torch.Tensor]) -> None:
    import requests

    def post(path: str, body: dict[str, Any]) -> requests.Response:
        return requests.post(server.url + path, json=body, timeout=60)

    assert in_server(server.url) == sums(weights)
    assert wsync.handle(server.url).model_info(5)["weight_version"] == "5"
    what = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
    assert post("/pause_generation", {}).status_code == 200
    answer = post("/update_weights_from_distributed", what)
    assert answer.status_code == 400 and "group 'none'" in answer.json()["message"]
    assert post("/destroy_weights_update_group", {"group_name": "none"}).status_code == 400
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 3, "world_size": 2}
    group |= {"backend": "gloo", "group_name": "none"}
    answer = post("/init_weights_update_group", group)
    assert answer.status_code == 400 and "rank 3 is not below world_size 2" in answer.text
