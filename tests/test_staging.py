"""Updates whose bytes come to engines while these generate."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import draw, in_server, same, sums

import wsync
from wsync import _core
from wsync.exchange.remote_session import Introduction

# the ways in which engines may be reached where updates are staged
WAYS: dict[str, dict[str, Any]] = {
    "remote": {"delivery": "distributed", "stage": "on"},
    "same host": {"delivery": "wsync", "stage": "on"},
}
Weights = dict[str, torch.Tensor]


@contextlib.contextmanager
def connected(engine: Any, weights: Weights, **options: Any) -> Iterator[wsync.Sync]:
    """A connection whose first update, which is not staged, has version 1."""
    given: Any = {"deadline": 30.0, "progress": False, "round_nbytes": 1 << 16, **options}
    with wsync.connect(weights, [engine], options=wsync.Options(**given)) as sync:
        sync.update(version=1)
        yield sync


@pytest.mark.parametrize("way", WAYS)
def test_engines_pause_only_to_take_what_they_have(
    way: str, config: Any, engine: TensorParallelEngine
) -> None:
    first, second, third = (draw(config, seed) for seed in (1, 2, 3))
    with connected(engine, first, **WAYS[way]) as sync:
        given = {name: tensor.clone() for name, tensor in second.items()}
        assert sync.stage(given, version=2)
        for tensor in given.values():
            tensor.fill_(3.0)  # engines have the bytes
        assert not engine.paused
        assert engine.model_info(10)["weight_version"] == "1"
        assert same(engine.weights(), first)
        report = sync.commit()
        assert same(engine.weights(), second)
        assert engine.weight_version == report.version == "2"
        assert report.rounds > 1
        assert report.seconds > report.paused[engine.name] > 0
        report = sync.update(third, version=3)  # is staged, too
        assert same(engine.weights(), third)
        assert list(report.phases).index("pause") > list(report.phases).index("copy")
    assert not engine.paused


def test_the_first_update_and_others_where_nothing_is_staged(
    config: Any, engine: TensorParallelEngine
) -> None:
    weights, options = draw(config, 1), wsync.Options(deadline=30.0, progress=False)
    with wsync.connect(weights, [engine], options=options) as sync:
        for version in ("1", "2"):
            assert not sync.stage()
            assert sync.commit().version == engine.weight_version == version
    assert same(engine.weights(), weights)


def test_commit_needs_a_staged_update_and_the_newest_one_counts(
    config: Any, engine: TensorParallelEngine
) -> None:
    second, third = draw(config, 2), draw(config, 3)
    with connected(engine, draw(config, 1), **WAYS["remote"]) as sync:
        with pytest.raises(_core.StateError, match="commit: no update is staged"):
            sync.commit()
        assert sync.stage(second, version=2)
        assert not sync.stage(third, version=3)
        assert sync.commit().version == engine.weight_version == "3"
        assert same(engine.weights(), third)
        assert sync.stage(second, version=4)
        assert sync.update(third, version=5).version == engine.weight_version == "5"
        assert same(engine.weights(), third)


def test_what_has_no_place_for_an_image_is_named(config: Any, server: str) -> None:
    weights = draw(config, 1)
    options = wsync.Options(delivery="stock", stage="on")
    with pytest.raises(_core.UnsupportedError, match=rf"no place for a staged .*: {server}"):
        wsync.connect(weights, [server], options=options)


def test_workers_without_room(
    config: Any, engine: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, weights = Introduction.from_bytes, draw(config, 1)
    little = staticmethod(lambda data: dataclasses.replace(read(data), free_nbytes=1000))
    monkeypatch.setattr(Introduction, "from_bytes", little)
    with connected(engine, weights, delivery="distributed") as sync:
        assert not sync.stage()
        sync.commit()
    half = sum(tensor.nbytes for tensor in weights.values()) / 2  # and norms, which both keep
    text = (
        rf"engine {engine.name}: its workers there need ([\d,]+) bytes to stage .* 1,000 are free"
    )
    with (
        pytest.raises(_core.NoMemoryError, match=text) as caught,
        connected(engine, weights, delivery="distributed", stage="on"),
    ):
        pass
    found = re.search(text, str(caught.value))
    assert found and half < int(found[1].replace(",", "")) < 1.1 * half


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_ends_with_a_staged_update_leaves_engines_as_they_were(
    way: str, config: Any, engine: TensorParallelEngine
) -> None:
    first, second = draw(config, 1), draw(config, 2)
    with connected(engine, first, **WAYS[way]) as sync:
        sync.stage(second)
    assert same(engine.weights(), first)
    assert engine.model_info(10)["weight_version"] == "1"
    assert not engine.paused
    with connected(engine, second, **WAYS[way]) as sync:  # the next trainer finds them free
        sync.stage(first)
        sync.commit()
    assert same(engine.weights(), first)


@pytest.mark.parametrize("way", WAYS)
def test_another_trainer_may_take_the_engine_over(way: str, config: Any, server: str) -> None:
    with connected(server, draw(config, 1), **WAYS[way]) as forgotten:
        forgotten.stage(draw(config, 2))
        with connected(server, draw(config, 3), **WAYS[way]) as sync:
            sync.stage(draw(config, 4))
            sync.commit()
        assert in_server(server) == sums(draw(config, 4))
        with pytest.raises(_core.WsyncError, match="another trainer has taken this engine over"):
            forgotten.commit()
        assert in_server(server) == sums(draw(config, 4))


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_ends_between_stage_and_commit_is_named(way: str, config: Any) -> None:
    weights = draw(config, 1)
    with (
        TensorParallelEngine(config, tp=2) as engine,
        connected(engine, weights, **{**WAYS[way], "deadline": 5.0}) as sync,
    ):
        sync.stage()
        os.kill(engine.pids[1], signal.SIGKILL)
        with pytest.raises(_core.WsyncError, match=f"engine {engine.name}.*worker 1"):
            sync.commit()
