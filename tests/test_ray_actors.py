"""Engines that are Ray actors, with a stand-in for Ray."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ray_double
from support.ray_double import Actor
from support.tiny_qwen3 import draw, in_server, sums

import wsync
from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
    UnsupportedError,
)
from wsync.handles.base import handle, handles_of
from wsync.handles.local import LocalHandle, RayHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.layout import from_tensors
from wsync.messages.control import LOAD_FORMAT
from wsync.trainer.roster import RolloutEngine

OPTIONS = wsync.Options(deadline=60.0, progress=False)


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_double.install(monkeypatch)


def updater(weights: Any, **arguments: Any) -> wsync.UpdateWeightFromTensor:
    return wsync.UpdateWeightFromTensor(
        SimpleNamespace(**arguments), from_tensors(weights), None, model_name="any", options=OPTIONS
    )


class SlimesEngine:
    """slime's actor beside a server: what it is asked is noted."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.asked: list[str] = []

    def get_url(self) -> str | None:
        self.asked.append("get_url")
        return self.url

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> Any:
        self.asked.append("update_weights_from_tensor")
        raise AssertionError("weights went through the actor")


class Engine:
    """An actor without a server."""

    def __init__(self, started: dict[str, Any] | None = None) -> None:
        if started is not None:
            self.get_server_info = lambda: started

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], **settings: Any
    ) -> tuple[bool, str]:
        return True, "good"


def test_an_actor_with_a_url_is_its_server(server: str, config: Any) -> None:
    engine = SlimesEngine(server)
    made = handle(Actor(engine))
    assert isinstance(made, HttpHandle)
    assert (made.name, made.workers, made.load_formats) == (server, 1, (LOAD_FORMAT,))
    weights = draw(config, 1)
    told = updater(weights)
    told.connect_rollout_engines([Actor(engine)], None)  # as the README has it
    try:
        told.update_weights()
        assert "wsync/open_seconds" in told.pop_metrics()
        assert handle(server).model_info(30)["weight_version"] == "1"
        assert in_server(server) == sums(weights)
    finally:
        told.disconnect_rollout_engines()
    assert engine.asked == ["get_url", "get_url"]


def test_one_server_behind_two_actors_is_one_engine(server: str) -> None:
    actors = [Actor(SlimesEngine(server)) for _ in range(2)]
    with pytest.raises(InvalidArgumentError, match="is given twice"):
        handles_of(actors, timeout=30)


def test_an_actor_says_how_many_workers_its_engine_has() -> None:
    started = {"tp_size": 4, "pp_size": 1, "custom_weight_loader": [LOAD_FORMAT]}
    made = handle(Actor(Engine(started)), gpus=8)
    assert isinstance(made, RayHandle)
    assert (made.workers, made.load_formats) == (4, (LOAD_FORMAT,))
    with pytest.raises(InvalidArgumentError, match="has 4 workers, not 2"):
        handle(Actor(Engine(started)), workers=2)
    staged = handle(Actor(Engine({"tp_size": 2, "pp_size": 2})), gpus=4)
    with pytest.raises(UnsupportedError, match="pp_size 2"):
        RolloutEngine.of(staged, None, wsync.Options(), 1)
    drafting = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/head"}
    with pytest.raises(UnsupportedError, match="another model, /head, and an actor takes no"):
        handle(Actor(Engine(started | drafting)))


def test_gpus_stand_for_the_workers_that_nobody_says() -> None:
    assert handle(Actor(Engine()), gpus=2).workers == 2
    assert handle(Actor(Engine()), gpus=4, workers=2).workers == 2
    assert handle(Actor(SlimesEngine(None)), gpus=2).workers == 2  # of another node of its engine
    with pytest.raises(InvalidArgumentError, match=r"neither get_url nor server_info; workers="):
        handle(Actor(Engine()))


def test_an_actor_that_does_not_say_its_url_is_named() -> None:
    dead, slow, released = Actor(SlimesEngine("")), SlimesEngine(""), threading.Event()
    dead.dead = True
    with pytest.raises(PeerClosedError, match=r"SlimesEngine, .*: get_url: the actor is dead"):
        handle(dead)
    slow.get_url = lambda: str(released.wait(60))  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="get_url: no answer within"):
        handle(Actor(slow), timeout=0.1)
    released.set()
    slow.get_url = lambda: 1 / 0  # type: ignore[method-assign,return-value]
    with pytest.raises(RemoteError, match=r"get_url: ZeroDivisionError: division by zero$"):
        handle(Actor(slow))


def test_counts_of_gpus_are_no_counts_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"w": torch.ones(4)}
    told = updater(weights)
    caplog.set_level("INFO")
    actor = Actor(Engine({"tp_size": 2}))
    told.connect_rollout_engines([actor], None, engine_gpu_counts=[4])
    assert caplog.messages == [f"wsync: UpdateWeightFromTensor: {actor} by broadcasts"]
    told.connect_rollout_engines([actor], None, [4], [0], [{"tp_size": 2, "pp_size": 1}])
    with pytest.raises(InvalidArgumentError, match="has 2 workers, not 4"):
        told.connect_rollout_engines([actor], None, [4], [0], [{"tp_size": 4}])
    with pytest.raises(UnsupportedError, match="engine_parallel_configs: pp_size 2"):
        told.connect_rollout_engines([actor], None, [4], [0], [{"tp_size": 2, "pp_size": 2}])
    told.disconnect_rollout_engines()


def test_slimes_arguments_say_the_gpus_of_actors_that_do_not() -> None:
    told = updater({"w": torch.ones(4)}, rollout_num_gpus_per_engine=1)
    told.connect_rollout_engines([Actor(Engine())], None)
    told.disconnect_rollout_engines()


class Together:
    """An actor that says it has stopped, or dropped its cache, when all of them have been asked."""

    def __init__(self, all_asked: dict[str, threading.Barrier]) -> None:
        self._all_asked = all_asked
        self.version = "0"

    def pause_generation(self) -> None:
        self._all_asked["pause"].wait(60)

    def flush_cache(self) -> None:
        self._all_asked["flush"].wait(60)

    def continue_generation(self) -> None:
        pass

    def get_weight_version(self) -> str:
        return self.version

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], weight_version: str, **settings: Any
    ) -> tuple[bool, str]:
        self.version = weight_version
        return True, "good"

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> tuple[bool, str]:
        self.version = weight_version
        return True, "good"


@pytest.mark.parametrize("way", ["tensor", "disk"])
def test_actors_pause_and_flush_at_the_same_time_and_it_is_measured(
    way: str, tmp_path: Path
) -> None:
    all_asked = {name: threading.Barrier(3) for name in ("pause", "flush")}
    engines = [Actor(Together(all_asked)) for _ in range(3)]
    make = wsync.UpdateWeightFromTensor if way == "tensor" else wsync.UpdateWeightFromDisk
    told = make(
        SimpleNamespace(rollout_num_gpus_per_engine=1, update_weight_disk_dir=str(tmp_path)),
        from_tensors({"w": torch.ones(4)}),
        None,
        model_name="any",
        options=OPTIONS,
    )
    told.connect_rollout_engines(engines, None, engine_gpu_offsets=[0, 0, 0])
    told.update_weights()
    metrics = told.pop_metrics()
    told.disconnect_rollout_engines()
    assert metrics["wsync/engine_pause_seconds"] > 0
    assert metrics["wsync/engine_flush_seconds"] > 0


class Slow(Engine):
    """An actor that has not yet taken what it was sent."""

    def __init__(self) -> None:
        super().__init__({"tp_size": 1})
        self.released = threading.Event()
        self.taken: list[str | None] = []

    def pause_generation(self) -> None: ...

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], **settings: Any
    ) -> tuple[bool, str]:
        if settings.get("load_format") != LOAD_FORMAT:
            assert self.released.wait(60)
            self.taken.append(settings["weight_version"])
        return True, "good"


def test_a_bucket_that_nobody_waits_for_comes_before_those_of_the_next_update() -> None:
    """Ray itself keeps the order of an actor's calls."""
    engine = Slow()
    shared = LocalHandle(engine)
    first, second = shared.during("1"), shared.during("2")
    send = {"load_format": None, "timeout": 0.2}
    for _ in range(2):
        with pytest.raises(DeadlineError, match="no answer within"):
            first.update_weights([b"x"], weight_version="1", **send)
    with pytest.raises(DeadlineError, match="not answered since an update that failed asked"):
        second.pause("abort", 0.2)
    second.update_weights([b"x"], load_format=LOAD_FORMAT, weight_version=None, timeout=60)
    engine.released.set()
    second.pause("abort", 60)
    second.update_weights([b"x"], load_format=None, weight_version="2", timeout=60)
    assert engine.taken == ["1", "1", "2"]
