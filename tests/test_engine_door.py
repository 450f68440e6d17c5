"""What the transformers engine lets in: its key, and the bounds of its requests' bodies."""

import asyncio
import base64
import json
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import torch
from support import tiny_qwen3
from transformers import AutoModelForCausalLM

from wsync.demo.engines import request_bodies
from wsync.demo.engines.transformers import create_app
from wsync.messages.control import LOAD_FORMAT

KEY = {"Authorization": "Bearer k"}
JSON = {**KEY, "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(AutoModelForCausalLM.from_config(tiny_qwen3.dense()), api_key="k")


async def send(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", timeout=60
    ) as client:
        return await client.request(method, path, **request)


def ask(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, past sockets and clients that would mend it."""
    return asyncio.run(send(app, method, path, **request))


class Loop:
    """An event loop in a thread, so that requests of one application can be under way at once."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def post(self, path: str, body: object) -> Future[httpx.Response]:
        request = send(self._app, "POST", path, json=body, headers=KEY)
        return asyncio.run_coroutine_threadsafe(request, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def loop(app: Any) -> Iterator[Loop]:
    running = Loop(app)
    yield running
    running.close()


# --- the key --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["engine", "engine/health?", "engine/health#", "/health?", ""])
def test_no_host_header_stands_for_the_key(app: Any, host: str) -> None:
    answer = ask(app, "GET", "/model_info", headers={"Host": host})
    assert answer.status_code == 401
    assert ask(app, "GET", "/model_info", headers={"Host": host, **KEY}).status_code == 200


@pytest.mark.parametrize("path", ["/healthy", "/health/", "/health/../model_info", "/health%2f"])
def test_no_path_but_healths_own_is_open(app: Any, path: str) -> None:
    assert ask(app, "GET", path).status_code == 401
    assert ask(app, "GET", "/health").status_code == 200


# --- bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_is_bounded_as_a_whole(
    app: Any, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(request_bodies, "MAX_NBYTES", 1000)

    def content(count: int) -> Any:
        text = json.dumps({"input_ids": [1] * count}).encode()
        return text if announced else parts(text)

    async def parts(text: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(text), 100):
            yield text[at : at + 100]

    answer = ask(app, "POST", "/wsync/logits", content=content(1000), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "body: more than the 1000 bytes that are taken"
    assert ask(app, "POST", "/wsync/logits", content=content(10), headers=JSON).status_code == 200


BIG = 2**63
GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "gloo",
}
BUCKET = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
PROMPT = {"input_ids": [1]}


def sampling(**chosen: object) -> dict[str, object]:
    return {**PROMPT, "sampling_params": chosen}


# path, body (bytes are sent as they are), what the text has to name
BAD: list[tuple[str, object, str]] = [
    ("/generate", b"", "body"),
    ("/generate", b"{", "body"),
    ("/generate", b"[" * 100_000 + b"]" * 100_000, "body"),
    ("/generate", b"\xff\xfe{}", "body"),
    ("/generate", [], "body"),
    ("/generate", {**PROMPT, "strange": 1}, "strange"),
    ("/generate", {**PROMPT, "\ud800": 1}, "unicode"),
    ("/generate", {**PROMPT, "rid": "r" * 10_000}, "rid"),
    ("/generate", {**PROMPT, "rid": "\0"}, "rid"),
    ("/generate", {**PROMPT, "stream": "maybe"}, "stream"),
    ("/generate", {"input_ids": [BIG]}, "input_ids"),
    ("/generate", {"input_ids": [1.5]}, "input_ids"),
    ("/generate", {"input_ids": [True]}, "input_ids"),
    ("/generate", {"input_ids": [[[1]]]}, "input_ids"),
    ("/generate", {"text": "9" * 5000}, "text"),
    ("/generate", {"text": "\0"}, "text"),
    ("/generate", sampling(temperature="hot"), "temperature"),
    ("/generate", sampling(temperature=float("nan")), "temperature"),
    ("/generate", sampling(temperature=float("inf")), "temperature"),
    ("/generate", sampling(temperature=10**400), "temperature"),
    ("/generate", sampling(temperature=-1e-320), "temperature"),
    ("/generate", sampling(max_new_tokens=BIG), "max_new_tokens"),
    ("/generate", sampling(max_new_tokens="7"), "max_new_tokens"),
    ("/generate", sampling(max_new_tokens=True), "max_new_tokens"),
    ("/generate", sampling(top_p=0.5), "top_p"),
    ("/wsync/logits", {"input_ids": []}, "empty"),
    ("/wsync/logits", {"input_ids": [-1]}, "input_ids"),
    ("/pause_generation", {"mode": "nap\udc80"}, "mode"),
    ("/pause_generation", {"mode": 3}, "mode"),
    ("/abort_request", {"rid": ["a"]}, "rid"),
    ("/weights_checker", {"action": "\udc80"}, "action"),
    ("/weights_checker", {"action": "x" * 100_000}, "action"),
    ("/update_weight_version", {"new_version": "v" * 10_000}, "new_version"),
    ("/update_weight_version", {"new_version": "\0"}, "new_version"),
    ("/update_weight_version", {"new_version": 7}, "new_version"),
    ("/update_weights_from_disk", {"model_path": "a\0b"}, "model_path"),
    ("/update_weights_from_disk", {"model_path": "a" * 100_000}, "model_path"),
    ("/update_weights_from_disk", {"model_path": ""}, "model_path"),
    ("/update_weights_from_disk", {"model_path": "/dev/null"}, "/dev/null"),
    ("/update_weights_from_disk", {"model_path": "/nowhere", "strange": 1}, "strange"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [""]}, "payload"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["\u20ac"]}, "serialized"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "serialized"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": "AA=="}, "serialized"),
    ("/init_weights_update_group", {**GROUP, "master_port": 1 << 16}, "master_port"),
    ("/init_weights_update_group", {**GROUP, "master_port": 0}, "master_port"),
    ("/init_weights_update_group", {**GROUP, "world_size": BIG}, "world_size"),
    ("/init_weights_update_group", {**GROUP, "world_size": 1}, "world_size"),
    ("/init_weights_update_group", {**GROUP, "rank_offset": BIG}, "rank_offset"),
    ("/init_weights_update_group", {**GROUP, "rank_offset": 2}, "rank 2 "),
    ("/init_weights_update_group", {**GROUP, "rank_offset": "1"}, "rank_offset"),
    ("/init_weights_update_group", {**GROUP, "group_name": "a\0b"}, "group_name"),
    ("/init_weights_update_group", {**GROUP, "group_name": ""}, "group_name"),
    ("/init_weights_update_group", {**GROUP, "master_address": "a\0b"}, "master_address"),
    ("/init_weights_update_group", {**GROUP, "backend": "mpi"}, "backend"),
    ("/init_weights_update_group", {**GROUP, "timeout": 1e400}, "timeout"),
    ("/destroy_weights_update_group", {"group_name": "\udc80"}, "group_name"),
    ("/update_weights_from_distributed", {**BUCKET, "shapes": [[BIG]]}, "shapes"),
    ("/update_weights_from_distributed", {**BUCKET, "shapes": [[-1]]}, "shapes"),
    ("/update_weights_from_distributed", {**BUCKET, "shapes": [[1.5]]}, "shapes"),
    ("/update_weights_from_distributed", {**BUCKET, "names": ["a\0"]}, "names"),
    ("/update_weights_from_distributed", {**BUCKET, "names": ["a" * 10_000]}, "names"),
]


@pytest.mark.parametrize(("path", "body", "named"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_body_is_refused_by_name(app: Any, path: str, body: object, named: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    engine = app.state.engine
    before = engine.checksums()
    headers = {**KEY, "Content-Type": "application/json"}
    answer = ask(app, "POST", path, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    said = answer.json()
    text = said["message"] if "success" in said else said["error"]["message"]
    assert named in text
    assert len(text) < 3000
    assert not said.get("success")
    assert (engine.weight_version, engine.gate.paused) == ("default", False)
    assert (engine.receiver.consistent, engine.checksums()) == (True, before)


@pytest.mark.parametrize(
    ("load_format", "content"),
    [
        ("flattened_bucket", {"flattened_tensor": 3, "metadata": []}),
        ("flattened_bucket", {"flattened_tensor": torch.zeros(4), "metadata": 5}),
        ("flattened_bucket", {"flattened_tensor": None, "metadata": [1]}),
        (None, [("model.norm.weight", torch.zeros(64, dtype=torch.complex64))]),
        (None, [("\ud800", torch.zeros(1))]),
        (None, [(1, torch.zeros(1))]),
        (LOAD_FORMAT, [("model.norm.weight", torch.zeros(64))]),
        ("strange", [("model.norm.weight", torch.zeros(64))]),
        (None, [("model.norm.weight" * 1000, torch.zeros(64))]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_payload_that_is_none_is_refused(app: Any, load_format: str, content: object) -> None:
    text = base64.b64encode(pickle.dumps(content)).decode()
    body = {"serialized_named_tensors": [text], "load_format": load_format, "weight_version": "9"}
    engine = app.state.engine
    before = engine.checksums()
    answer = ask(app, "POST", "/update_weights_from_tensor", json=body, headers=KEY)
    assert (answer.status_code, answer.json()["success"]) == (400, False), answer.text
    assert 0 < len(answer.json()["message"]) < 3000
    assert (engine.weight_version, engine.checksums()) == ("default", before)


def test_what_sglangs_clients_send_beside_is_taken(app: Any) -> None:
    usual = {"top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": [], "temperature": 1e-320}
    body = {**sampling(**usual, max_new_tokens=2), "return_logprob": True, "image_data": None}
    assert ask(app, "POST", "/generate", json=body, headers=KEY).status_code == 200
    body = {"group_name": "none", "flush_cache": False}
    answer = ask(app, "POST", "/destroy_weights_update_group", json=body, headers=KEY)
    assert "is in none of that name" in answer.json()["message"]


def test_joins_that_wait_lock_nobody_out(
    app: Any, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Semaphore(0), threading.Event()

    def wait(**_: object) -> None:
        begun.release()
        assert over.wait(120)

    monkeypatch.setattr(app.state.engine, "init_weights_update_group", wait)
    joins = [loop.post("/init_weights_update_group", GROUP) for _ in range(8)]
    try:
        assert all(begun.acquire(timeout=60) for _ in joins)
        assert loop.post("/pause_generation", {}).result(60).status_code == 200
        assert loop.post("/continue_generation", {}).result(60).status_code == 200
    finally:
        over.set()
    assert [join.result(60).status_code for join in joins] == [200] * len(joins)
