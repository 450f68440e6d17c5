"""Engines that are Ray actors, with a stand-in for Ray."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support import ray_double
from support.ray_double import Actor

import wsync
from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
    UnsupportedError,
)
from wsync.handles.base import handle
from wsync.handles.local import RayHandle
from wsync.messages.control import LOAD_FORMAT
from wsync.trainer.roster import RolloutEngine

OPTIONS = wsync.Options(deadline=60.0, progress=False)


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_double.install(monkeypatch)


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


def test_an_actor_says_how_many_workers_its_engine_has() -> None:
    started = {"tp_size": 4, "pp_size": 1, "custom_weight_loader": [LOAD_FORMAT]}
    made = handle(Actor(Engine(started)))
    assert isinstance(made, RayHandle)
    assert (made.workers, made.load_formats) == (4, (LOAD_FORMAT,))
    with pytest.raises(InvalidArgumentError, match="has 4 workers, but workers=2"):
        handle(Actor(Engine(started)), workers=2)
    staged = handle(Actor(Engine({"tp_size": 2, "pp_size": 2})))
    with pytest.raises(UnsupportedError, match="pp_size 2"):
        RolloutEngine.of(staged, None, wsync.Options(), 1)
    drafting = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/head"}
    with pytest.raises(UnsupportedError, match="another model, /head, which updates through"):
        handle(Actor(Engine(started | drafting)))


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
