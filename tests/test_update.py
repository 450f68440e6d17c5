"""Whole updates from one trainer process, with real engine processes on the other side."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.memory import shared_nbytes
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import draw, in_server, same, sums
from support.weights_only_engine import ProcessEngine
from support.workers import ThreadEngine

import wsync
from wsync import _core
from wsync.demo.cli import traces
from wsync.engine.ring_loaders import ModuleLoader
from wsync.machine import trace
from wsync.messages import payload
from wsync.trainer.planning import Planning
from wsync.trainer.sessions.worker import WorkerSession

OPTIONS = wsync.Options(deadline=60.0, progress=False)


def test_every_byte_arrives_and_the_version_is_taken_on(
    config: Any, engine: TensorParallelEngine
) -> None:
    weights = draw(config, 1)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        report = sync.update(version=7)
    assert same(engine.weights(), weights)
    assert engine.weight_version == "7"
    assert not engine.paused
    assert report.tensors == len(weights)
    assert report.model_nbytes == sum(t.numel() * 4 for t in weights.values())
    assert report.redundancy == 1.0  # each worker is sent the boxes that it keeps
    assert report.delivered_nbytes > report.model_nbytes  # norms go to both workers
    assert report.seconds >= sum(report.phases.values()) > 0


def test_an_engine_that_has_written_nothing_goes_on_after_a_failure(
    config: Any, engine: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = draw(config, 1), draw(config, 2)
    with wsync.connect(first, engines=[engine], options=OPTIONS) as sync:
        sync.update(version="kept")

    def refuse(*given: Any, **named: Any) -> None:
        raise _core.RemoteError("no")

    with TensorParallelEngine(config, tp=1, name="other") as other:
        monkeypatch.setattr(other, "update_weights", refuse)
        with wsync.connect(second, engines=[engine, other], options=OPTIONS) as sync:
            with pytest.raises(_core.RemoteError, match="no") as caught:
                sync.update()
        (note,) = caught.value.__notes__
        assert "stay paused until an update succeeds: 'other'." in note
    assert not engine.paused
    assert engine.model_info(10)["weight_version"] == "kept"
    assert same(engine.weights(), first)


def test_later_updates_reuse_the_ring_and_may_bring_other_storage(
    config: Any, engine: TensorParallelEngine
) -> None:
    weights = draw(config, 1)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update()
        for seed in (2, 3):
            moved = draw(config, seed)
            report = sync.update(moved)
            assert same(engine.weights(), moved)
    assert report.version == "3"
    assert engine.weight_version == "3"


@contextlib.contextmanager
def victim_and_survivor(
    config: Any,
) -> Iterator[tuple[TensorParallelEngine, TensorParallelEngine]]:
    with (
        TensorParallelEngine(config, tp=1, name="victim") as victim,
        TensorParallelEngine(config, tp=1, name="survivor") as survivor,
    ):
        yield victim, survivor


@pytest.mark.parametrize("park", [True, False])
def test_parked_rings_take_no_memory_between_updates(
    config: Any, engine: TensorParallelEngine, park: bool
) -> None:
    processes = [os.getpid(), *engine.pids]
    before = [shared_nbytes(pid) for pid in processes]
    options = wsync.Options(deadline=60, progress=False, park=park)
    with wsync.connect(draw(config, 1), engines=[engine], options=options) as sync:
        for seed in (1, 2, 3):
            weights = draw(config, seed)
            report = sync.update(weights)
            assert same(engine.weights(), weights)
            more = [shared_nbytes(pid) - was for pid, was in zip(processes, before, strict=True)]
            least = report.ring_nbytes // (2 * len(engine.pids))  # workers keep about the same
            assert [nbytes < least for nbytes in more] == [park] * len(processes)


def test_an_engine_that_dies_while_its_ring_is_parked_is_named(config: Any) -> None:
    weights = draw(config, 1)
    options = wsync.Options(deadline=60, progress=False, park=True, lost="raise")
    with victim_and_survivor(config) as (victim, survivor):
        with wsync.connect(weights, engines=[victim, survivor], options=options) as sync:
            sync.update()
            os.kill(victim.pids[0], signal.SIGKILL)
            with pytest.raises(wsync.WsyncError) as caught:
                sync.update()
        assert str(caught.value).startswith("engine victim: ")
        weights = draw(config, 2)
        with wsync.connect(weights, engines=[survivor], options=options) as sync:
            sync.update()
            sync.update()
        assert same(survivor.weights(), weights)


def test_a_trainer_takes_over_from_one_whose_rings_are_parked(
    config: Any, engine: TensorParallelEngine
) -> None:
    options = wsync.Options(deadline=60, progress=False, park=True)
    with wsync.connect(draw(config, 1), engines=[engine], options=options) as first:
        first.update()
        weights = draw(config, 2)
        with wsync.connect(weights, engines=[engine], options=options) as second:
            second.update()
            assert same(engine.weights(), weights)
        with pytest.raises(wsync.WsyncError):
            first.update()
        first.update(weights)
        assert same(engine.weights(), weights)


def test_many_small_rounds_give_the_same_bytes(config: Any, engine: TensorParallelEngine) -> None:
    weights = draw(config, 4)
    options = wsync.Options(deadline=60, round_nbytes=1 << 14, ring_nbytes=1 << 16, progress=False)
    with wsync.connect(weights, engines=[engine], options=options) as sync:
        report = sync.update()
    assert report.rounds > 5
    assert same(engine.weights(), weights)


def little_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    make = WorkerSession.make_ring

    def make_ring(session: WorkerSession, plan: Any, device: Any) -> None:
        if plan.ring_nbytes(session.worker) > nbytes:
            raise wsync.NoMemoryError(f"no {plan.ring_nbytes(session.worker)} bytes")
        make(session, plan, device)

    monkeypatch.setattr(WorkerSession, "make_ring", make_ring)


def test_where_memory_is_short_rings_are_smaller(
    config: Any,
    engine: TensorParallelEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = draw(config, 6)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        usual = sync.update()
    limit = usual.ring_nbytes // engine.workers // 3
    little_memory(monkeypatch, limit)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        report = sync.update()
    assert same(engine.weights(), weights)
    assert report.ring_nbytes <= engine.workers * limit
    assert report.rounds > usual.rounds
    (text,) = caplog.messages
    assert text.startswith("wsync: rank 0: no ")
    most = int(text.partition(": rings have at most ")[2].split()[0])
    assert report.ring_nbytes <= engine.workers * most < usual.ring_nbytes


def test_usual_rounds_come_before_a_smaller_ring(
    config: Any,
    engine: TensorParallelEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make = Planning._make_rings
    with wsync.connect(draw(config, 6), engines=[engine], options=OPTIONS) as sync:
        usual = sync.update()
    monkeypatch.setattr(Planning, "_may_be_large", lambda *_: True)
    tried = ["no memory for large rounds", ""]
    monkeypatch.setattr(Planning, "_make_rings", lambda *given: tried.pop(0) or make(*given))
    with wsync.connect(draw(config, 6), engines=[engine], options=OPTIONS) as sync:
        assert sync.update().ring_nbytes == usual.ring_nbytes
    assert caplog.messages == []


def test_ranks_without_cuda_are_asked_for_large_rounds_too() -> None:
    """Other ranks gather their answers, and would take its next gather for one."""
    told: list[object] = []
    group: Any = SimpleNamespace(gather_json=lambda mine: told.append(mine) or [mine, True])
    roster: Any = SimpleNamespace(takes_buckets=False, taking=lambda _: [])
    assert not Planning(group, roster, [], wsync.Options())._may_be_large(_core.host())
    assert told == [False]


def test_where_dev_shm_is_small_a_stock_engine_gets_a_smaller_ring(
    config: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker gives it 64 MB."""
    make, most = payload.shared_bytes, 1 << 17

    def shared_bytes(nbytes: int) -> torch.Tensor:
        if nbytes > most:
            raise wsync.NoMemoryError(f"no {nbytes} bytes")
        return make(nbytes)

    monkeypatch.setattr(payload, "shared_bytes", shared_bytes)
    weights = draw(config, 8)
    options = wsync.Options(deadline=60, delivery="stock", progress=False)
    with wsync.connect(weights, engines=[server], options=options) as sync:
        assert sync.update().ring_nbytes <= most
    assert in_server(server) == sums(weights)


@pytest.mark.parametrize("ring_nbytes", [0, 1 << 16])
def test_memory_for_no_ring_at_all_is_an_error(
    config: Any, engine: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch, ring_nbytes: int
) -> None:
    little_memory(monkeypatch, 1 << 10)
    options = wsync.Options(deadline=60, ring_nbytes=ring_nbytes, progress=False)
    with wsync.connect(draw(config, 6), engines=[engine], options=options) as sync:
        with pytest.raises(wsync.NoMemoryError, match=r"rank 0: no \d+ bytes: .*ring_nbytes="):
            sync.update()


def test_two_kinds_of_engine_in_one_update(
    config: Any, engine: TensorParallelEngine, server: str
) -> None:
    weights = draw(config, 5)
    with wsync.connect(weights, engines=[server, engine], options=OPTIONS) as sync:
        sync.update(version="after-step-5")
    assert wsync.handle(server).model_info(10)["weight_version"] == "after-step-5"
    assert in_server(server) == sums(weights)
    assert same(engine.weights(), weights)


def test_a_stock_engine_gets_flattened_buckets(config: Any, server: str) -> None:
    options = wsync.Options(deadline=60, delivery="stock", bucket_nbytes=1 << 15, progress=False)
    with wsync.connect(draw(config, 6), engines=[server], options=options) as sync:
        for seed in (6, 7):
            weights = draw(config, seed)
            report = sync.update(weights)
            assert in_server(server) == sums(weights)
    assert report.rounds > 3
    assert report.paths == {server: "stock buckets"}
    assert wsync.handle(server).model_info(10)["weight_version"] == "2"


def test_what_a_bucket_waits_for_is_in_a_phase(
    config: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path))
    options = wsync.Options(deadline=60, delivery="stock", bucket_nbytes=1 << 15, progress=False)
    with wsync.connect(draw(config, 6), engines=[server], options=options) as sync:
        report = sync.update()
    (record,) = (r for r in traces(tmp_path, {}) if r["role"] == "trainer")
    order = [what for _, what, *_ in record["spans"] if what in ("copy", "post")]
    assert order == ["copy", "post"] * report.rounds + ["copy"]


def test_non_contiguous_and_empty_tensors_are_read_where_they_lie() -> None:
    weights = {
        "a.transposed": torch.arange(15.0).reshape(3, 5).t(),
        "b.sliced": torch.arange(20, dtype=torch.bfloat16).reshape(4, 5)[:, 1:3],
        "c.empty": torch.empty(0, 4),
        "d.scalar": torch.tensor(3.5),
    }
    with ProcessEngine({name: (t.shape, t.dtype) for name, t in weights.items()}) as engine:
        engine.fill(77)
        with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
            sync.update()
        found = engine.weights()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name


def test_a_large_tensor_is_cut_where_the_engine_copies_by_name() -> None:
    weights = {"large": torch.arange(40_000.0).reshape(200, 200), "small": torch.ones(3)}
    options = wsync.Options(deadline=60, round_nbytes=1 << 14, progress=False)
    with ProcessEngine({name: (t.shape, t.dtype) for name, t in weights.items()}) as engine:
        engine.fill(77)
        with wsync.connect(weights, engines=[engine], options=options) as sync:
            report = sync.update()
        assert same(engine.weights(), weights)
    assert report.rounds >= 10


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(wsync.PeerClosedError, match=r"http://127\.0\.0\.1:9"):
        wsync.connect({"a": torch.zeros(1)}, engines=["http://127.0.0.1:9"])


def test_a_round_size_that_cannot_work_names_budget_and_tensor(config: Any) -> None:
    weights = draw(config, 1)
    options = wsync.Options(deadline=60, round_nbytes=100, progress=False)
    with TensorParallelEngine(config, tp=1, delivery="full") as engine:
        with wsync.connect(weights, engines=[engine], options=options) as sync:
            with pytest.raises(wsync.InvalidArgumentError, match=r"100"):
                sync.update()


def test_a_tensor_that_the_trainer_lacks_is_named_and_nothing_is_written(
    config: Any, engine: TensorParallelEngine
) -> None:
    before = draw(config, 8)
    with wsync.connect(before, engines=[engine], options=OPTIONS) as sync:
        sync.update()
    weights = draw(config, 1)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.LayoutError, match=r"layers\.1\.mlp\.up_proj"):
            sync.update()
    assert same(engine.weights(), before)


def test_weights_of_another_shape_are_refused_by_name(
    config: Any, engine: TensorParallelEngine
) -> None:
    weights = draw(config, 1)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update()
        wrong = {**weights, "model.norm.weight": torch.zeros(3)}
        with pytest.raises(wsync.LayoutError, match=r"model\.norm\.weight: .*\(3,\)"):
            sync.update(wrong)
        sync.update()


def test_engines_that_refuse_the_tensors_go_on(config: Any, engine: TensorParallelEngine) -> None:
    weights = draw(config, 1)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.LayoutError) as early:
            sync.update({"no.such.weight": torch.zeros(1)})
        assert not engine.paused
        assert not hasattr(early.value, "__notes__")
    with wsync.connect({"w": torch.zeros(1)}, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.WsyncError, match="has no such tensor") as late:
            sync.update()
        assert not engine.paused
        assert not hasattr(late.value, "__notes__")
        with pytest.raises(wsync.LayoutError, match="connect again for other tensors"):
            sync.update(weights)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update()
    assert not engine.paused


def test_a_trainer_is_told_that_another_one_has_taken_over(
    config: Any, engine: TensorParallelEngine
) -> None:
    weights = draw(config, 1)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as first:
        first.update()
        with wsync.connect(weights, engines=[engine], options=OPTIONS) as second:
            second.update()
            with pytest.raises(wsync.RemoteError, match="another trainer has taken this"):
                first.update()
            first.update()


def test_a_stalled_engine_costs_the_deadline_and_the_next_update_recovers(
    config: Any, engine: TensorParallelEngine
) -> None:
    weights = draw(config, 1)
    # long enough for the updates that are to succeed
    options = wsync.Options(deadline=8.0, progress=False)
    with wsync.connect(weights, engines=[engine], options=options) as sync:
        sync.update()
        os.kill(engine.pids[1], signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(wsync.DeadlineError):
                sync.update()
        finally:
            os.kill(engine.pids[1], signal.SIGCONT)
        # pausing, the first thing that waits for the worker, has the request deadline
        assert time.monotonic() - start < 4 * options.request_deadline
        weights = draw(config, 2)
        sync.update(weights)
    assert same(engine.weights(), weights)


def test_an_engine_that_dies_during_an_update_is_named(config: Any) -> None:
    weights = draw(config, 1)
    options = wsync.Options(
        deadline=60, round_nbytes=1 << 12, ring_nbytes=1 << 13, progress=False, lost="raise"
    )
    with victim_and_survivor(config) as (victim, survivor):
        with wsync.connect(weights, engines=[victim, survivor], options=options) as sync:
            sync.update()
            # stop it so that the update is surely under way when it is killed
            os.kill(victim.pids[0], signal.SIGSTOP)
            killer = threading.Timer(0.5, os.kill, (victim.pids[0], signal.SIGKILL))
            killer.start()
            with pytest.raises(wsync.WsyncError) as caught:
                sync.update()
            killer.join()
        assert isinstance(caught.value, wsync.PeerClosedError | wsync.RemoteError)
        assert str(caught.value).startswith("engine victim: ")
        with wsync.connect(weights, engines=[survivor], options=options) as sync:
            sync.update()
        assert same(survivor.weights(), weights)


def test_updating_before_connecting_is_refused() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match="no engines"):
        wsync.connect({"a": torch.zeros(1)}, engines=[])


@pytest.mark.parametrize(
    ("field", "value"),
    [("deadline", 0), ("threads", 65), ("ring_nbytes", -1), ("exchange", "tcp"), ("delivery", "x")],
)
def test_options_that_make_no_sense_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=f"{field}={value!r}"):
        wsync.Options(**{field: value})


def test_a_report_can_be_written_as_json() -> None:
    report = wsync.Report(version="3", phases={"copy": 0.5})
    assert json.loads(json.dumps(dataclasses.asdict(report)))["phases"] == {"copy": 0.5}


class Given(Mapping[str, torch.Tensor]):
    """Weights by name, by another class than dict."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def share(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.share_memory_()


def plain(weights: dict[str, torch.Tensor]) -> Any:
    return weights


def of_a_module(weights: dict[str, torch.Tensor]) -> Any:
    module = torch.nn.Module()
    for name, tensor in weights.items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    return wsync.fsdp.layout(module)


@pytest.mark.parametrize("delivery", ["wsync", "auto", "direct", "disk"])
@pytest.mark.parametrize("source", [plain, Given, of_a_module])
def test_what_is_closed_keeps_no_weights(source: Any, delivery: str, tmp_path: Path) -> None:
    module = torch.nn.Linear(8, 8)
    weights = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    if delivery != "wsync":
        share(weights)
    options: dict[str, Any] = {"deadline": 60.0, "progress": False}
    given = source(weights)
    if delivery == "disk":
        sync: Any = wsync.DiskSync(given, folder=tmp_path, options=wsync.Options(**options))
    else:
        engines = [ThreadEngine([ModuleLoader(module)])]
        sync = wsync.connect(given, engines, options=wsync.Options(**options, delivery=delivery))
    with sync:
        reports = [sync.update() for _ in range(2)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in weights.values()]
    del weights, given
    gc.collect()
    assert [storage() for storage in storages] == [None, None]
    assert [report.version for report in reports] == ["1", "2"]
    assert "closed" in repr(sync)
    with pytest.raises(wsync.StateError, match="connection was closed"):
        sync.update()
