"""Updates that engine workers copy out of the trainer's own memory.

Byte-exact updates from sharded trainers are in test_update_ranks.py, faults in
test_fault_matrix.py, and what the core checks in test_lending.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import Weights, draw, same
from torch.multiprocessing.reductions import StorageWeakRef

import wsync
from wsync.machine.lendable import SharedMaps
from wsync.trainer import lending
from wsync.trainer.sessions.worker import WorkerSession

OPTIONS = wsync.Options(deadline=60.0, progress=False, delivery="direct")


def shared(weights: Weights) -> Weights:
    return {name: tensor.share_memory_() for name, tensor in weights.items()}


def overwrite(weights: Weights, others: Weights) -> None:
    for name, tensor in others.items():
        weights[name].copy_(tensor)


@pytest.fixture
def weights(config: Any) -> Weights:
    return shared(draw(config, 1))


@pytest.fixture
def sync(weights: Weights, engine: TensorParallelEngine) -> Iterator[wsync.Sync]:
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        yield sync


def holdings(pid: int) -> tuple[list[str], list[str]]:
    """What a process has mapped of shared memory, and its descriptors."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            links.append(f"{name} {os.readlink(f'/proc/{pid}/fd/{name}')}")
    shared = ("/torch_", "/memfd:")
    return (
        [line for line in maps if any(name in line for name in shared)],
        sorted(link for link in links if any(name in link for name in shared)),
    )


def test_a_steady_update_opens_lends_and_maps_nothing(
    config: Any, weights: Weights, sync: wsync.Sync, engine: TensorParallelEngine
) -> None:
    report = sync.update(version=7)
    assert engine.weight_version == "7"
    assert (report.rounds, report.ring_nbytes, report.sent_nbytes) == (1, 0, 0)
    assert set(report.paths.values()) == {"direct"}
    sync.update()  # looks once more: the connection has mapped memory of its own
    before = [holdings(pid) for pid in engine.pids]
    assert all(len(maps) >= len(weights) for maps, _ in before)
    for seed in (2, 3):
        overwrite(weights, draw(config, seed))
        mine = holdings(os.getpid())
        with (
            mock.patch.object(WorkerSession, "_lend", side_effect=AssertionError("lends")),
            mock.patch.object(SharedMaps, "find", side_effect=AssertionError("finds anew")),
            mock.patch("builtins.open", side_effect=AssertionError("opens")),
            mock.patch("os.open", side_effect=AssertionError("opens")),
            mock.patch("os.listdir", side_effect=AssertionError("looks for descriptors")),
        ):
            sync.update()
        assert holdings(os.getpid()) == mine
        assert same(engine.weights(), weights)
    assert [holdings(pid) for pid in engine.pids] == before


def test_memory_that_has_moved_is_found_again_and_the_old_let_go_of(
    config: Any, sync: wsync.Sync, engine: TensorParallelEngine
) -> None:
    counts = set()
    for seed in (2, 3, 4):
        moved = shared(draw(config, seed))
        sync.update(moved)
        assert same(engine.weights(), moved)
        counts.add(tuple(len(part) for pid in engine.pids for part in holdings(pid)))
    assert len(counts) == 1


def test_private_memory_goes_through_a_ring_in_the_same_update_and_is_named_once(
    config: Any, weights: Weights, engine: TensorParallelEngine, caplog: pytest.LogCaptureFixture
) -> None:
    options = dataclasses.replace(OPTIONS, round_nbytes=1 << 12, ring_nbytes=1 << 13)
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    private = {name: weights[name].clone() for name in names}
    large = private[names[1]].nbytes
    with wsync.connect(weights, engines=[engine], options=options) as sync:
        assert re.search(
            r", 1 round, redundancy [0-9.]+\), read in place, verified$", str(sync.update())
        )
        for seed in (2, 3):
            overwrite(weights, draw(config, seed))
            overwrite(private, {name: weights[name] for name in names})
            report = sync.update({**weights, **private})
            assert same(engine.weights(), weights)
            assert set(report.paths.values()) == {"direct and ring"}
            assert 1 < report.rounds <= large / (1 << 12) and report.ring_nbytes
        overwrite(weights, draw(config, 4))
        everything = sync.update({name: tensor.clone() for name, tensor in weights.items()})
        assert set(everything.paths.values()) == {"ring"}
        assert same(engine.weights(), weights)
        overwrite(weights, draw(config, 5))
        assert set(sync.update().paths.values()) == {"direct"}
        assert same(engine.weights(), weights)
    said = [text for text in caplog.messages if "no other process" in text]
    assert len(said) == 2, said
    assert said[0].startswith(
        f"wsync: {names[1]}, {names[0]}: rank 0 has 2 of {len(weights)} parameters in memory that "
    )
    assert "share_memory_()" in said[0]
    assert said[0].endswith("; weights that engines do not read in place go through rings")


def test_too_many_pieces_go_through_a_ring(
    config: Any, weights: Weights, engine: TensorParallelEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        mock.patch.object(lending, "most_segments", return_value=1),
        wsync.connect(weights, engines=[engine], options=OPTIONS) as sync,
    ):
        for _ in range(2):
            assert set(sync.update().paths.values()) == {"ring"}
    assert same(engine.weights(), weights)
    (said,) = [text for text in caplog.messages if "pieces of shared memory, and can" in text]
    assert said.endswith("go through rings")


def test_an_engine_of_whole_tensors_gets_rings(config: Any, weights: Weights) -> None:
    with (
        TensorParallelEngine(config, tp=1, delivery="full") as whole,
        TensorParallelEngine(config, tp=2) as parts,
        wsync.connect(weights, engines=[whole, parts], options=OPTIONS) as sync,
    ):
        for seed in (2, 3):
            overwrite(weights, draw(config, seed))
            report = sync.update()
            assert sorted(report.paths.values()) in (["direct"], ["direct", "ring"])
            assert same(whole.weights(), weights) and same(parts.weights(), weights)


AUTO = dataclasses.replace(OPTIONS, delivery="auto")


def test_auto_reads_in_place_what_lies_in_shared_memory_wholly(
    config: Any, weights: Weights, engine: TensorParallelEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with wsync.connect(weights, engines=[engine], options=AUTO) as sync:
        for seed in (2, 3):
            overwrite(weights, draw(config, seed))
            assert set(sync.update().paths.values()) == {"direct"}
            assert same(engine.weights(), weights)
        name = "model.norm.weight"
        others = {**weights, name: weights[name].clone()}
        for seed in (4, 5):
            overwrite(others, draw(config, seed))
            assert set(sync.update(others).paths.values()) == {"ring"}
            assert same(engine.weights(), others)
    assert not any("no other process" in text for text in caplog.messages)


@pytest.mark.parametrize("delivery", ["auto", "direct"])
def test_a_parked_update_leaves_nothing_mapped(
    delivery: str, config: Any, engine: TensorParallelEngine
) -> None:
    """So that a trainer can offload its weights, or free them."""
    options = dataclasses.replace(OPTIONS, delivery=delivery, park=True)
    weights = shared(draw(config, 1))
    files = {os.fstat(t.untyped_storage()._share_fd_cpu_()[0]).st_ino for t in weights.values()}
    with wsync.connect(weights, engines=[engine], options=options) as sync:
        for seed in (2, 3):
            moved = weights if seed == 2 else shared(draw(config, seed))
            overwrite(moved, draw(config, seed))
            report = sync.update(moved)
            assert set(report.paths.values()) == {"direct"}
            assert same(engine.weights(), moved)
            for pid in engine.pids:
                maps, links = holdings(pid)
                assert not [line for line in maps if int(line.split()[4]) in files], maps
                assert not [line for line in links if "/torch_" in line], links
                files |= {
                    os.fstat(t.untyped_storage()._share_fd_cpu_()[0]).st_ino for t in moved.values()
                }


def test_memory_is_mapped_before_engines_pause(
    config: Any, weights: Weights, engine: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, pause = [], engine.pause

    def pausing(mode: str, timeout: float) -> None:
        mapped.extend(sum("/torch_" in link for link in holdings(pid)[1]) for pid in engine.pids)
        pause(mode, timeout)

    with wsync.connect(
        weights, engines=[engine], options=dataclasses.replace(OPTIONS, park=True)
    ) as sync:
        sync.update()
        monkeypatch.setattr(engine, "pause", pausing)
        sync.update()
    assert mapped == [len(weights)] * 2


def test_memory_that_is_never_let_go_of_fails_the_update(
    config: Any, weights: Weights, engine: TensorParallelEngine
) -> None:
    """With park=True the trainer would free it when update() returns."""
    options = dataclasses.replace(OPTIONS, park=True)
    with wsync.connect(weights, engines=[engine], options=options) as sync:
        sync.update()
        commit, park = WorkerSession.commit, WorkerSession.park

        def stopped(self: WorkerSession, *rest: Any) -> None:
            os.kill(engine.pids[1], signal.SIGSTOP)
            commit(self, *rest)

        def hurried(self: WorkerSession, timeout: float, check: Any) -> None:
            park(self, 1.0, check)

        try:
            with (
                mock.patch.object(WorkerSession, "commit", stopped),
                mock.patch.object(WorkerSession, "park", hurried),
                pytest.raises(wsync.DeadlineError, match="parking of the ring"),
            ):
                sync.update()
        finally:
            os.kill(engine.pids[1], signal.SIGCONT)
        overwrite(weights, draw(config, 7))
        sync.update()
        assert same(engine.weights(), weights)


def test_the_trainer_waits_until_the_workers_have_copied(
    config: Any, sync: wsync.Sync, engine: TensorParallelEngine, weights: Weights
) -> None:
    """A worker that is stopped before it has read anything gets the weights of the update, which
    the trainer changes as soon as that has returned."""
    sync.update()
    wanted, later = draw(config, 8), draw(config, 9)
    worker, posted = engine.pids[1], threading.Event()
    original = WorkerSession.post

    def post(self: WorkerSession, *rest: Any) -> None:
        if not posted.is_set():
            os.kill(worker, signal.SIGSTOP)
        original(self, *rest)
        posted.set()

    def update() -> None:
        sync.update()
        overwrite(weights, later)

    overwrite(weights, wanted)
    thread = threading.Thread(target=update)
    try:
        with mock.patch.object(WorkerSession, "post", post):
            thread.start()
            assert posted.wait(60)
            thread.join(0.5)  # who does not wait has changed them by now
    finally:
        os.kill(worker, signal.SIGCONT)
        thread.join(120)
    assert same(engine.weights(), wanted)


def test_memory_is_kept_until_the_workers_have_read_it(
    config: Any, sync: wsync.Sync, engine: TensorParallelEngine
) -> None:
    """Though nobody else has the tensors any more: a storage that is freed early is given to the
    next tensor of its size."""
    expected, kept = draw(config, 6), list[bool]()
    held = list[Any]()
    original = WorkerSession.wait

    def given() -> Weights:
        fresh = shared(draw(config, 6))
        held.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in fresh.values())
        return fresh

    def wait(self: WorkerSession, *rest: Any) -> None:
        gc.collect()
        kept.append(not any(reference.expired() for reference in held))
        original(self, *rest)

    with mock.patch.object(WorkerSession, "wait", wait):
        sync.update(given)
    assert kept == [True] * 4  # by two workers, which also compare
    assert same(engine.weights(), expected)
