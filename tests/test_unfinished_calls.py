"""What an update that failed has left under way at an engine: the next one comes after it, whoever
asks for that."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import ray_double
from support.ray_double import Actor

import wsync
from wsync._core import DeadlineError
from wsync.handles.local import LocalHandle, RayHandle
from wsync.handles.sglang_engine import SglangHandle
from wsync.handles.vllm import VllmHandle, VllmServer
from wsync.messages.control import LOAD_FORMAT, Control
from wsync.trainer.requests import EngineRequests

GOES_ON = "what an update that failed has asked of it goes on"


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_double.install(monkeypatch)


class Engine:
    """Any engine.  Its methods wait for `released` once it `hangs`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.hangs = False
        self.done: list[Any] = []

    def _do(self, what: Any) -> bool:
        if self.hangs:
            assert self.released.wait(60)
        self.done.append(what)
        return True


class Sglang(Engine):
    def server_info(self) -> dict[str, int]:
        return {"tp_size": 1}

    def pause_generation(self) -> bool:
        return self._do("pause")

    def continue_generation(self) -> bool:
        return self._do("go on")

    def flush_cache(self) -> None: ...

    def post_process_weights(self, **steps: bool) -> bool:
        return self._do("process")

    def update_weights_from_tensor(self, **request: Any) -> bool:
        return request.get("load_format") == LOAD_FORMAT or self._do("weights")


class Vllm(Engine):
    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        facts = {"rank": 0, "workers": 1, "engines": 1, "weight_version": "1"}
        return [json.dumps(facts) if method == "wsync_describe" else [True, "good"]]

    def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self._do("pause")

    def resume_generation(self) -> None:
        self._do("go on")

    def update_weight_version(self, new_version: str) -> None:
        self._do("version")


@pytest.fixture
def sglang() -> Iterator[Sglang]:
    yield (engine := Sglang())
    engine.released.set()


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    yield (engine := Vllm())
    engine.released.set()


def update(handle: Any, timeout: float) -> None:
    handle.update_weights([b"x"], load_format=None, weight_version="1", timeout=timeout)


def process(handle: Any, timeout: float) -> None:
    handle.rearranges(True)
    update(handle, timeout)


def close(handle: Any, timeout: float) -> None:
    message = Control(op="close", session="0a", update=3, deadline=5.0)
    handle.send_control([message], weight_version="1", timeout=timeout)


def check(engine: Engine, make: Callable[[], Any], leave: Callable[[Any, float], Any]) -> None:
    """Has an update fail in a call, and another one come after it, by handles of their own."""
    first, second = make().during("1"), make().during("2")
    assert not second.unfinished(0.0)
    engine.hangs = True
    with pytest.raises(DeadlineError, match="no answer within"):
        leave(first, 0.2)
    engine.hangs = False
    left = list(engine.done)
    with pytest.raises(DeadlineError, match=GOES_ON):
        second.resume(0.2)
    assert engine.done == left
    assert second.unfinished(0.0)
    engine.released.set()
    second.resume(60)
    assert len(engine.done) == len(left) + 2
    assert engine.done[-1] == "go on"
    assert not second.unfinished(60)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "leave", [lambda h, t: h.pause("abort", t), lambda h, t: h.resume(t), update, process]
)
def test_engines_of_slime(sglang: Sglang, leave: Any, remote: bool) -> None:
    actor = Actor(sglang)
    check(sglang, lambda: RayHandle(actor, timeout=60) if remote else LocalHandle(sglang), leave)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "leave", [lambda h, t: h.pause("abort", t), lambda h, t: h.resume(t), close]
)
def test_engines_of_vllm(vllm: Vllm, leave: Any, remote: bool) -> None:
    actor = Actor(vllm)
    check(vllm, lambda: VllmHandle(actor if remote else vllm), leave)


def test_vllms_own_server_is_one_engine_whoever_has_its_url(vllm: Vllm) -> None:
    class Server(VllmServer):
        def __init__(self, engine: Vllm) -> None:
            super().__init__("http://127.0.0.1:1")
            for method in ("collective_rpc", "pause_generation", "resume_generation"):
                setattr(self, method, getattr(engine, method))

        def wake_up(self, tags: Sequence[str]) -> None:
            """As versions that do not say whether they are awake."""

    check(vllm, lambda: VllmHandle(Server(vllm)), lambda h, t: h.pause("abort", t))


def test_an_engine_of_sglang_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    requests = SimpleNamespace(UpdateWeightsFromTensorReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", requests)
    loop = asyncio.new_event_loop()
    released, seen = threading.Event(), []

    async def load(request: Any, _: None) -> bool:
        seen.append(request.weight_version)
        assert released.wait(60)
        return True

    manager = SimpleNamespace(update_weights_from_tensor=load)
    engine = SimpleNamespace(loop=loop, tokenizer_manager=manager)
    with pytest.raises(DeadlineError, match="no answer within"):
        update(SglangHandle(engine, workers=1), 0.2)
    with pytest.raises(DeadlineError, match=GOES_ON):
        update(SglangHandle(engine, workers=1), 0.2)
    released.set()
    update(SglangHandle(engine, workers=1), 60)
    assert len(seen) == 2
    loop.close()


def test_a_connection_comes_after_what_the_one_before_has_left(
    sglang: Sglang, caplog: pytest.LogCaptureFixture
) -> None:
    options = wsync.Options(deadline=60.0, progress=False, delivery="stock")
    before = LocalHandle(sglang)
    sglang.hangs = True
    with pytest.raises(DeadlineError):
        before.pause("abort", 0.2)
    sglang.hangs = False
    EngineRequests([before], options).settle()
    said = "did not end what they were asked in an update that failed: Sglang object"
    assert said in caplog.text
    with wsync.connect({"w": torch.ones(4)}, [sglang], options=options) as sync:
        threading.Timer(0.5, sglang.released.set).start()
        sync.update(version=2)
    assert sglang.done == ["pause", "pause", "weights", "go on"]
