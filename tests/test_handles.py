"""Handles against engines that answer, refuse, die or stall."""

import base64
import dataclasses
import functools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import requests
import torch

import wsync
from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
    UnsupportedError,
)
from wsync.engine import Receiver
from wsync.engine.ring_loaders import ModuleLoader
from wsync.handles.base import EngineHandle, handle, pause_mode, send_control
from wsync.handles.local import LocalHandle
from wsync.handles.sglang_engine import SglangHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.inspection import look
from wsync.messages import payload
from wsync.messages.control import LOAD_FORMAT, Control
from wsync.trainer.roster import RolloutEngine


class FakeServer(ThreadingHTTPServer):
    """Answers each path with (status, body) or with the word "die", "stall" or "half": the
    beginning of an answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {"/server_info": (200, {"tp_size": 2})}
        self.seen: list[tuple[str, Any, str | None]] = []
        self.released = threading.Event()
        self.heard: Callable[[Any], object] = bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        self.server.heard(self.headers)
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        answer = self.server.answers.get(self.path, (404, "no such path"))
        if callable(answer):
            answer = answer()
        if answer == "die":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if answer == "half":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
        if answer in ("stall", "half"):
            self.server.released.wait(90)
            return
        status, content = answer
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    fake.released.set()
    fake.shutdown()
    fake.server_close()
    thread.join()


def update(engine: EngineHandle, timeout: float = 5.0) -> None:
    engine.update_weights(
        [b"\x80one", b"\x80two"], load_format="x.y", weight_version=7, timeout=timeout
    )


def test_a_url_is_driven_by_sglangs_requests(server: FakeServer) -> None:
    for path in ("/pause_generation", "/continue_generation"):
        server.answers[path] = (200, {"message": "ok", "status": "ok"})
    server.answers["/flush_cache"] = (200, "Cache flushed.")
    server.answers["/update_weights_from_tensor"] = (200, {"success": True, "message": "Success"})
    server.answers["/model_info"] = (200, {"weight_version": "7"})
    engine = handle(server.url + "/", api_key="secret")
    assert isinstance(engine, EngineHandle)
    assert (engine.name, engine.workers) == (server.url, 2)
    engine.pause("retract", 5)
    engine.flush(5)
    update(engine)
    engine.resume(5)
    assert engine.model_info(5) == {"weight_version": "7"}
    # this server knows no weight-update sessions, and is asked once
    assert server.seen.pop(3)[0] == "/begin_weight_update"
    one, two = (base64.b64encode(data).decode() for data in (b"\x80one", b"\x80two"))
    assert [entry[:2] for entry in server.seen[1:5]] == [
        ("/pause_generation", {"mode": "retract"}),
        ("/flush_cache", {}),
        (
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [one, two],
                "load_format": "x.y",
                "flush_cache": False,
                "weight_version": "7",
            },
        ),
        ("/continue_generation", {}),
    ]
    assert {entry[2] for entry in server.seen} == {"Bearer secret"}


class Sessions:
    """Gives a server the weight-update sessions of SGLang 0.5.23, which takes no tensors outside
    of one; `open` is the selector of the one that there is."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.open: str | None = None
        self.calls: list[str] = []
        self.loaded: Callable[[Any], object] = bool
        methods = {
            "pause_generation": lambda _: True,
            "continue_generation": lambda _: True,
            "begin_weight_update": self._begin,
            "end_weight_update": self._end,
            "update_weights_from_tensor": self._load,
            "update_weights_from_distributed": self._load,
            "update_weights_from_disk": lambda _: True,
        }
        for name, method in methods.items():
            server.answers[f"/{name}"] = functools.partial(self._answer, name, method)

    def _answer(self, name: str, method: Callable[[Any], bool]) -> Any:
        self.calls.append(name.removesuffix("_generation").removesuffix("_weight_update"))
        good = method(self.server.seen[-1][1])
        body = {"success": good, "message": "must run between begin_weight_update() and ..."}
        if name.endswith("_generation"):
            body = {"status": "ok"}
        return (200 if good else 400, body)

    def _begin(self, body: Any) -> bool:
        was, self.open = self.open, self.open or body.get("selector", "all")
        return was is None

    def _end(self, _: Any) -> bool:
        was, self.open = self.open, None
        return was is not None

    def _load(self, body: Any) -> bool:
        if self.open is not None:
            self.loaded(body)
        return self.open is not None


TENSOR = "update_weights_from_tensor"
DISK = "update_weights_from_disk"


@pytest.mark.parametrize(
    ("now", "kind", "text"),
    [
        (
            {"tp_size": 2, "pp_size": 2},
            wsync.RemoteError,
            "restarted with pp_size 2, 2 ",
        ),
        (
            {"tp_size": 2, "tokenizer_worker_num": 2},
            wsync.UnsupportedError,
            "tokenizer_worker_num 2: each process keeps its own weight version",
        ),
        ({"tp_size": 4}, wsync.RemoteError, r"restarted with 4 workers .*, and had 2 "),
        (
            {"tp_size": 2, "custom_weight_loader": ["wsync.sglang.load_weights"]},
            wsync.RemoteError,
            r"loaders \['wsync\.sglang\.load_weights'\], and had 2 .* \[\] before: connect",
        ),
        ({"tp_size": 2, "pp_size": 1, "random_seed": 7}, None, ""),
    ],
)
def test_a_server_that_was_started_again_with_other_arguments_is_refused(
    server: FakeServer, now: Any, kind: Any, text: str
) -> None:
    engine = HttpHandle(server.url)
    assert (engine.workers, engine.load_formats) == (2, ())
    server.answers["/server_info"] = (200, now)
    if kind is None:
        engine.look_anew(5)
        return
    for _ in range(2):  # also when it is asked once more
        with pytest.raises(kind, match=text):
            engine.look_anew(5)


def test_a_server_that_drafts_when_it_is_started_again_is_refused(server: FakeServer) -> None:
    """Its workers expect as many drafts as it had when the trainer connected."""
    loader: dict[str, Any] = {"custom_weight_loader": ["wsync.sglang.load_weights"]}
    server.answers["/server_info"] = (200, {"tp_size": 2, **loader})
    engine, told = HttpHandle(server.url), HttpHandle(server.url, workers=2)
    assert told.load_formats == engine.load_formats
    started = {"tp_size": 2, "speculative_algorithm": "EAGLE", "model_path": "/m"}
    server.answers["/server_info"] = (200, started | loader)
    for made in (engine, told):
        with pytest.raises(
            wsync.RemoteError, match="and a model that draft with its layers, and had 2"
        ):
            made.look_anew(5)
    server.answers["/server_info"] = (200, {"tp_size": 2})
    stock = HttpHandle(server.url)
    assert stock.load_formats == ()
    server.answers["/server_info"] = (200, started)  # buckets update all layers
    stock.look_anew(5)


@pytest.mark.parametrize(
    ("started", "kind", "text"),
    [
        ({"tp_size": 2, "pp_size": 2}, wsync.UnsupportedError, "pp_size 2"),
        ({"tp_size": 2, "tokenizer_worker_num": 4}, wsync.UnsupportedError, "tokenizer_worker_num"),
        ({"tp_size": 4}, wsync.InvalidArgumentError, "has 4 workers, but workers=2"),
    ],
)
def test_a_number_of_workers_that_is_given_hides_nothing(
    server: FakeServer, started: Any, kind: Any, text: str
) -> None:
    server.answers["/server_info"] = (200, started)
    with pytest.raises(kind, match=text):
        wsync.connect({"w": torch.ones(2)}, [wsync.handle(server.url, workers=2)])


LOCAL = "enable_dp_attention_local_control_broadcast"


@pytest.mark.parametrize(
    ("started", "options", "text"),
    [
        ({"dp_size": 2}, {}, "dp_size 2: SGLang updates data-parallel replicas"),
        ({"nnodes": 2}, {"delivery": "stock"}, "nnodes 2: workers are on another host"),
        ({"nnodes": 2}, {"delivery": "distributed"}, ""),
        ({LOCAL: True, "attn_dp_size": 2}, {}, f"{LOCAL}: its data-parallel groups"),
        ({"dp_size": 2, "enable_dp_attention": True, "nnodes": 1}, {}, ""),
    ],
)
def test_a_server_that_an_update_would_fail_at_is_refused(
    server: FakeServer, started: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    server.answers["/server_info"] = (200, {"tp_size": 2, **started})
    engine = HttpHandle(server.url)
    if not text:
        assert RolloutEngine.of(engine, None, wsync.Options(**options), 1).workers == 2
        return
    with pytest.raises(UnsupportedError, match=text):
        RolloutEngine.of(engine, None, wsync.Options(**options), 1)


@pytest.mark.parametrize(("started", "sent"), [("dummy", "auto"), ("auto", None)])
def test_a_server_with_made_up_weights_is_told_to_load_files(
    server: FakeServer, started: str, sent: str | None
) -> None:
    server.answers["/server_info"] = (200, {"tp_size": 1, "load_format": started})
    server.answers["/update_weights_from_disk"] = (200, {"success": True, "message": "Success"})
    HttpHandle(server.url).update_weights_from_disk("/v1", weight_version=1, timeout=60)
    assert server.seen[-1][1].get("load_format") == sent


def test_a_version_is_waited_for(server: FakeServer) -> None:
    server.answers["/model_info"] = (200, {"weight_version": "6"})
    engine = HttpHandle(server.url)
    engine.wait_for(6, timeout=60)
    with pytest.raises(wsync.DeadlineError, match=r"it reports version 6, and not 7 within 0\.1 s"):
        engine.wait_for(7, timeout=0.1)
    timer = threading.Timer(
        0.2, server.answers.update, ({"/model_info": (200, {"weight_version": "7"})},)
    )
    timer.start()
    engine.wait_for("7", timeout=60)
    timer.join()


def test_a_url_with_a_password_is_refused_without_it(server: FakeServer) -> None:
    url = server.url.replace("://", "://user:p%40ss@")
    text = f"engine {re.escape(server.url)}: the URL must not contain a user or password; give"
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        handle(url)


def test_an_update_goes_by_what_has_been_started_again_in_the_servers_place(
    server: FakeServer,
) -> None:
    def start(**arguments: Any) -> None:
        server.answers["/server_info"] = (200, {"tp_size": 2, **arguments})

    sessions = Sessions(server)
    server.answers[f"/{DISK}"] = (200, {"success": True, "message": "Success"})
    start(version="0.5.23")
    engine = HttpHandle(server.url)
    during = engine.during()
    during.pause("abort", 60)
    update(during, 60)
    during.resume(60)
    assert "begin" in sessions.calls
    for method in ("begin", "end"):  # an older one, which knows none
        server.answers[f"/{method}_weight_update"] = (404, "Not Found")
    start(version="0.5.17", load_format="dummy")
    during = engine.during()
    during.pause("abort", 60)
    engine.look_anew(60)
    during.update_weights_from_disk("/v1", weight_version=1, timeout=60)
    body = next(body for path, body, _ in server.seen if path == f"/{DISK}")
    assert body["load_format"] == "auto"
    during.resume(60)


def test_an_update_waits_for_who_looks_at_the_engine(server: FakeServer) -> None:
    """A look has a session of its own for a moment."""
    sessions = Sessions(server)
    sessions.open = "draft"
    begin = server.answers["/begin_weight_update"]
    tries: list[int] = []

    def busy() -> Any:
        tries.append(1)
        if len(tries) == 3:
            sessions.open = None  # the look has ended it
        return begin()

    server.answers["/begin_weight_update"] = busy
    trainer = HttpHandle(server.url, workers=2).during()
    trainer.pause("abort", 60)
    update(trainer, 60)
    assert (sessions.open, "end" in sessions.calls) == ("all", False)


def test_an_engine_that_is_let_go_on_by_hand_ends_what_a_trainer_has_left(
    server: FakeServer,
) -> None:
    """In a session that is open SGLang has not processed what it has loaded."""
    sessions = Sessions(server)
    trainer = HttpHandle(server.url, workers=2).during()
    trainer.pause("abort", 60)
    update(trainer, 60)  # and then it is killed
    assert sessions.open is not None
    for _ in range(2):  # the second time there is none, which the engine says
        HttpHandle(server.url, workers=2).resume(60)
        assert sessions.open is None


def test_a_server_without_sessions_is_asked_for_one_once(server: FakeServer) -> None:
    slimes(server)
    engine = HttpHandle(server.url, workers=2)
    for _ in "abc":
        during = engine.during()
        during.pause("abort", 60)
        update(during, 60)
        during.resume(60)
    assert [path for path, _, _ in server.seen].count("/begin_weight_update") == 1


def test_a_weight_update_session_begins_with_the_first_weights(server: FakeServer) -> None:
    sessions = Sessions(server)
    engine = HttpHandle(server.url, workers=2)
    for number in range(2):
        engine.pause("abort", 60)
        update(engine, 60)
        update(engine, 60)
        assert sessions.open == "all"
        engine.resume(60)
        assert sessions.open is None
        expected = ["pause", "begin", TENSOR, TENSOR, "end", "continue"]
        assert sessions.calls[6 * number :] == expected
    engine.pause("abort", 60)
    engine.call("update_weights_from_distributed", {}, 60)
    engine.resume(60)
    assert sessions.calls[13:15] == ["begin", "update_weights_from_distributed"]


@pytest.mark.parametrize("left_open", [False, True])
def test_a_load_from_disk_is_outside_of_a_session(server: FakeServer, left_open: bool) -> None:
    """Its end would process what has been loaded once more."""
    sessions = Sessions(server)
    sessions.open = "all" if left_open else None
    engine = HttpHandle(server.url, workers=2)
    engine.pause("abort", 60)
    engine.update_weights_from_disk("/v1", weight_version=1, timeout=60)
    engine.resume(60)
    assert sessions.calls == ["pause", "end", DISK, "continue"]
    assert sessions.open is None


def test_a_failed_updates_session_goes_on_and_anothers_is_ended(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending it would process what the failed update has left once more."""
    monkeypatch.setattr("wsync.handles.sglang_base._LOOKS_SECONDS", 0.0)
    sessions = Sessions(server)
    sessions.open = "all"
    engine = HttpHandle(server.url, workers=2)
    for _ in "ab":
        told = engine.during()
        told.pause("abort", 60)
        update(told, 60)
    assert sessions.calls == [
        *("pause", "begin", "end", "begin", TENSOR),
        *("pause", "begin", TENSOR),
    ]
    told.resume(60)
    assert (sessions.calls[-2:], sessions.open) == (["end", "continue"], None)


@pytest.mark.parametrize("left_open", [False, True])
def test_a_question_leaves_the_engine_as_it_is(server: FakeServer, left_open: bool) -> None:
    """SGLang 0.5.23 takes it in a session alone: one without the model's weights."""
    receiver, sessions = Receiver(ModuleLoader(torch.nn.Linear(2, 2))), Sessions(server)
    asked: list[str | None] = []

    def load(body: Any) -> None:
        asked.append(sessions.open)
        receiver.answer(base64.b64decode(body["serialized_named_tensors"][0]))

    sessions.loaded = load
    sessions.open = "all" if left_open else None
    server.answers["/server_info"] = (200, {"tp_size": 1, "custom_weight_loader": [LOAD_FORMAT]})
    server.answers["/model_info"] = (200, {"weight_version": "1"})
    receiver.state.lose("an update died half way")
    found = look(server.url, timeout=60).workers
    assert [worker["consistent"] for worker in found] == [False]
    assert not {"pause", "continue"} & set(sessions.calls)
    assert (asked, sessions.open) == ((["all"], "all") if left_open else (["draft"], None))


PROCESS = "post_process_weights"


def slimes(server: FakeServer) -> None:
    """Has a server answer as slime's SGLang does."""
    for method in ("pause_generation", "continue_generation", PROCESS, TENSOR):
        server.answers[f"/{method}"] = (200, {"success": True, "message": "", "status": "ok"})


def told(server: FakeServer) -> list[Any]:
    """What it has been asked since the last time: names of methods, and steps of processing."""
    known = {f"/{PROCESS}", f"/{TENSOR}", "/continue_generation"}
    found = [(path[1:], body) for path, body, _ in server.seen if path in known]
    server.seen.clear()
    return [body if method == PROCESS else method for method, body in found]


def steps(restore: bool) -> dict[str, bool]:
    return {"restore_weights_before_load": restore, "post_process_quantization": not restore}


def test_slimes_server_restores_what_it_has_packed(server: FakeServer) -> None:
    """Once before the first weights; the new ones are packed before it goes on."""
    slimes(server)
    engine = HttpHandle(server.url, workers=2)
    engine.rearranges(True)
    for _ in "ab":
        during = engine.during()
        during.pause("abort", 60)
        update(during, 60)
        update(during, 60)
        during.resume(60)
        packing = [steps(restore=True), TENSOR, TENSOR, steps(restore=False)]
        assert told(server) == [*packing, "continue_generation"]
    engine.rearranges(False)
    engine.pause("abort", 60)
    update(engine, 60)
    engine.resume(60)
    assert told(server) == [TENSOR, "continue_generation"]


def test_a_server_with_sessions_restores_in_these(server: FakeServer) -> None:
    sessions = Sessions(server)
    engine = HttpHandle(server.url, workers=2)
    engine.rearranges(True)
    engine.pause("abort", 60)
    update(engine, 60)
    engine.resume(60)
    assert sessions.calls == ["pause", "begin", TENSOR, "end", "continue"]
    assert steps(restore=True) not in told(server)


def test_a_server_that_cannot_restore_what_it_has_packed_is_sent_nothing(
    server: FakeServer,
) -> None:
    slimes(server)
    del server.answers[f"/{PROCESS}"]
    engine = HttpHandle(server.url, workers=2)
    engine.rearranges(True)
    for _ in range(2):
        engine.pause("abort", 60)
        with pytest.raises(UnsupportedError, match="has neither weight-update sessions"):
            update(engine, 60)
    assert TENSOR not in told(server)
    control = [b"x", b"y"]  # wsync's loader there says itself what it cannot take
    engine.update_weights(control, load_format=LOAD_FORMAT, weight_version=None, timeout=60)
    engine.resume(60)
    assert told(server) == [steps(restore=True), TENSOR, "continue_generation"]
    server.answers[f"/{PROCESS}"] = (400, {"success": False, "message": "no memory"})
    engine.rearranges(True)
    engine.pause("abort", 60)
    text = f"engine {re.escape(server.url)}: {PROCESS}: no memory"
    with pytest.raises(RemoteError, match=text):
        update(engine, 60)


def test_an_actor_restores_what_its_server_has_packed() -> None:
    class Actor:
        def __init__(self) -> None:
            self.called: list[Any] = []

        def pause_generation(self) -> None: ...
        def continue_generation(self) -> None:
            self.called.append("continue")

        def update_weights_from_tensor(self, **_: Any) -> None:
            self.called.append("load")

        def post_process_weights(self, **given: bool) -> dict[str, Any]:
            self.called.append(given)
            return {"success": True, "message": ""}

    actor = Actor()
    engine = LocalHandle(actor, workers=2)
    engine.rearranges(True)
    for _ in range(2):
        engine.pause("abort", 60)
        update(engine, 60)
    engine.resume(60)
    one = [steps(restore=True), "load"]
    assert actor.called == [*one, *one, steps(restore=False), "continue"]


def test_an_engine_of_sglang_without_sessions_is_sent_no_weights_that_it_rearranges() -> None:
    class Sglang:
        def update_weights_from_tensor(self, named_tensors: Any, **_: Any) -> None: ...

    engine = handle(Sglang(), workers=2)
    assert isinstance(engine, SglangHandle)
    engine.rearranges(True)
    engine.pause("abort", 60)
    with pytest.raises(UnsupportedError, match="Sglang object: rearranges weights"):
        update(engine, 60)
    other = handle(SimpleNamespace(update_weights_from_tensor=lambda **_: None), workers=2)
    assert isinstance(other, LocalHandle)
    other.rearranges(True)
    update(other, 60)


def test_an_update_without_version_sends_none(server: FakeServer) -> None:
    server.answers["/update_weights_from_tensor"] = (200, {"success": True, "message": ""})
    engine = HttpHandle(server.url, workers=1)
    engine.update_weights([b"x"], load_format=None, weight_version=None, timeout=60)
    assert "weight_version" not in server.seen[-1][1]


OWN_LAYERS = {"speculative_algorithm": "EAGLE", "model_path": "/model"}
STEPS = {"enable_multi_layer_eagle": True, "speculative_num_steps": 3}
OTHER = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/head"}


@pytest.mark.parametrize(
    ("started", "load_format", "selector"),
    [
        (OTHER, None, "target"),
        (OTHER, LOAD_FORMAT, "target"),
        (OTHER | {"speculative_algorithm": "EAGLE"}, None, "target"),
        (OWN_LAYERS, LOAD_FORMAT, None),
        (OWN_LAYERS | STEPS | {"version": "0.5.20"}, None, "target"),
        (OWN_LAYERS | STEPS | {"version": "0.5.21"}, None, None),
        (OWN_LAYERS, None, None),
        (OWN_LAYERS | {"speculative_draft_model_path": "/model"}, None, None),
        # SGLang 0.5.11 and 0.5.17, after a load from disk
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/m"}
            | {"model_path": "/v1", "tokenizer_path": "/m"},
            *(None, None),
        ),
        ({"speculative_algorithm": "NGRAM"}, None, "target"),
        ({"speculative_algorithm": None}, None, None),
    ],
)
def test_requests_name_the_model_where_its_draft_is_another_one(
    server: FakeServer, started: Any, load_format: str | None, selector: str | None
) -> None:
    server.answers["/server_info"] = (200, {"tp_size": 1, "model_path": "/model"} | started)
    Sessions(server)
    engine = HttpHandle(server.url)
    engine.pause("abort", 60)
    engine.update_weights([b"x"], load_format=load_format, weight_version=None, timeout=60)
    engine.call("update_weights_from_distributed", {"load_format": load_format}, 60)
    engine.resume(60)
    bodies = [body for path, body, _ in server.seen if "weight" in path]
    assert [body.get("selector") for body in bodies] == [selector] * 3 + [None]
    assert bodies[1].get("disable_draft_model") == (selector and True)


def test_a_draft_is_not_processed_for_a_question(server: FakeServer) -> None:
    known = {"tp_size": 1, "custom_weight_loader": [LOAD_FORMAT], "model_path": "/model"}
    server.answers["/server_info"] = (200, known | OTHER)
    sessions = Sessions(server)
    server.answers["/model_info"] = (200, {"weight_version": "1"})
    found = look(server.url, timeout=60)
    assert "drafts tokens: each question would make SGLang" in found.unasked
    assert sessions.calls == []


@pytest.mark.parametrize(
    ("started", "drafts"),
    [
        (OWN_LAYERS, 1),
        (OWN_LAYERS | {"speculative_draft_model_path": "/model"}, 1),
        (OWN_LAYERS | STEPS, 3),
        (OWN_LAYERS | {"speculative_draft_model_path": "/head"}, 0),
        (OWN_LAYERS | {"speculative_algorithm": "NGRAM"}, 0),
        ({"speculative_algorithm": None, "model_path": "/model"}, 0),
    ],
)
def test_an_engine_tells_how_many_drafts_are_updated_with_its_model(
    server: FakeServer, started: Any, drafts: int
) -> None:
    known = {"tp_size": 1, "custom_weight_loader": [LOAD_FORMAT]}
    server.answers["/server_info"] = (200, known | started)
    found = RolloutEngine.of(handle(server.url), None, wsync.Options(), 1)
    assert (found.delivery, found.drafts) == ("wsync", drafts)


@pytest.mark.parametrize(
    ("started", "delivery", "text"),
    [
        (OTHER, "auto", "/head, which updates do not change"),
        (OWN_LAYERS | STEPS | {"version": "0.5.17"}, "auto", "layers of its model, which updates"),
        (OWN_LAYERS, "auto", ""),
    ],
)
def test_a_trainer_is_told_of_a_draft_that_stays(
    server: FakeServer, caplog: pytest.LogCaptureFixture, started: Any, delivery: str, text: str
) -> None:
    known = {"tp_size": 1, "custom_weight_loader": [LOAD_FORMAT], "model_path": "/model"}
    server.answers["/server_info"] = (200, known | started)
    options = wsync.Options(delivery=delivery)
    wsync.connect({"w": torch.zeros(2)}, engines=[server.url], options=options).close()
    said = [message for message in caplog.messages if "drafts" in message]
    assert len(said) == bool(text)
    assert all(f"engine {server.url} drafts tokens with {text}" in message for message in said)


def test_a_url_of_vllm_without_its_name_is_told_how_it_is_given(server: FakeServer) -> None:
    server.answers["/server_info"] = (200, {"vllm_config": "..."})
    told = f"as tp_size, not None; for a vLLM server, give 'vllm+{server.url}'"
    with pytest.raises(wsync.RemoteError, match=re.escape(told)):
        handle(server.url)


def test_older_servers_are_asked_by_their_older_paths(server: FakeServer) -> None:
    del server.answers["/server_info"]
    server.answers["/get_server_info"] = (200, {"tp_size": 4})
    server.answers["/get_model_info"] = (200, {"model_path": "m"})
    engine = handle(server.url)
    assert engine.workers == 4
    assert engine.model_info(5) == {"model_path": "m"}


def test_flush_asks_until_the_engine_is_idle(server: FakeServer) -> None:
    answers = [(400, "busy"), (400, "busy"), (200, "Cache flushed.")]
    server.answers["/flush_cache"] = lambda: answers.pop(0)
    HttpHandle(server.url, workers=1).flush(5)
    assert answers == []


def test_flush_of_an_engine_that_stays_busy_ends_at_the_deadline(server: FakeServer) -> None:
    server.answers["/flush_cache"] = (400, "Pending requests: 3")
    with pytest.raises(DeadlineError, match=r"127.0.0.1.*not be emptied within 1 s.*requests: 3"):
        HttpHandle(server.url, workers=1).flush(1.0)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((400, {"success": False, "message": "shape mismatch of w"}), "shape mismatch of w"),
        ((200, {"success": False, "message": "shape mismatch of w"}), "shape mismatch of w"),
        ((401, {"error": "Unauthorized"}), "HTTP 401: Unauthorized; give the server's key"),
        ((400, {"error": {"message": "bad field"}}), "bad field"),
        ((500, "Internal Server Error"), "HTTP 500: Internal Server Error"),
        ((307, ""), "HTTP 307"),
    ],
)
def test_a_refusal_carries_the_engines_text(server: FakeServer, answer: Any, text: str) -> None:
    server.answers["/update_weights_from_tensor"] = answer
    with pytest.raises(RemoteError, match=text) as caught:
        update(HttpHandle(server.url, workers=2))
    assert server.url in str(caught.value)


def test_an_absent_engine_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(PeerClosedError, match=f"{url}: /server_info: .*refused"):
            handle(url, timeout=60)


def test_an_engine_that_dies_during_the_call_is_named(server: FakeServer) -> None:
    server.answers["/update_weights_from_tensor"] = "die"
    with pytest.raises(PeerClosedError, match=server.url):
        update(HttpHandle(server.url, workers=2))


def test_a_stalling_engine_costs_its_deadline(server: FakeServer) -> None:
    server.answers["/update_weights_from_tensor"] = "stall"
    with pytest.raises(DeadlineError, match=r"update_weights_from_tensor: .* within 0"):
        update(HttpHandle(server.url, workers=2), timeout=0.3)


def test_a_wrong_number_of_payloads_never_reaches_the_engine(server: FakeServer) -> None:
    with pytest.raises(InvalidArgumentError, match="2 payloads for 3 workers"):
        update(HttpHandle(server.url, workers=3))
    assert server.seen == []


@pytest.mark.parametrize(
    ("version", "stages", "mode"),
    [
        ("0.5.23.post1", 1, "retract"),
        ("0.5.22", 1, "abort"),
        ("1.0.0", 2, "abort"),
        (None, 1, "abort"),
    ],
)
def test_requests_stay_where_sglang_can_empty_its_cache_beside_them(
    server: FakeServer, version: str | None, stages: int, mode: str
) -> None:
    server.answers["/server_info"] = (200, {"tp_size": 1, "pp_size": stages, "version": version})
    assert pause_mode(handle(server.url), "auto") == mode
    assert pause_mode(handle(server.url), "in_place") == "in_place"


def test_pipeline_stages_need_the_loader_or_files(server: FakeServer, tmp_path: Path) -> None:
    known: dict[str, Any] = {"tp_size": 2, "pp_size": 2, "custom_weight_loader": [LOAD_FORMAT]}
    server.answers["/server_info"] = (200, known)
    weights = {"w": torch.ones(2)}
    for delivery in ("stock", "distributed"):
        options = wsync.Options(delivery=delivery, broadcast="bucket")
        with pytest.raises(UnsupportedError, match=r"pp_size 2: .* or use DiskSync"):
            wsync.connect(weights, [server.url], options=options)
    found = [RolloutEngine.of(handle(server.url), gpu, wsync.Options(), 2) for gpu in (None, 0)]
    assert [(each.workers, each.delivery) for each in found] == [(4, "wsync"), (4, "remote")]
    retract = wsync.Options(pause_mode="retract")
    for make in (wsync.connect, functools.partial(wsync.DiskSync, folder=tmp_path)):
        with pytest.raises(UnsupportedError, match=r"pp_size 2: .* give pause_mode='abort'"):
            make(weights, [server.url], options=retract)
    server.answers["/server_info"] = (200, known | {"speculative_algorithm": "EAGLE"})
    with pytest.raises(UnsupportedError, match=r"pp_size 2: .* draft tokens \(EAGLE\)"):
        wsync.connect(weights, [server.url], options=wsync.Options(delivery="wsync"))
    server.answers["/server_info"] = (200, known)
    sessions = Sessions(server)
    server.answers["/flush_cache"] = (200, "Cache flushed.")
    server.answers["/model_info"] = (200, {"weight_version": "1"})
    with wsync.DiskSync(weights, [server.url], folder=tmp_path) as sync:
        sync.update()
    assert sessions.calls.count(DISK) == 1


def test_a_server_that_is_no_engine_is_named(server: FakeServer) -> None:
    server.answers["/server_info"] = (200, "<html>")
    with pytest.raises(RemoteError, match="expected a JSON object, but it answered: <html>"):
        handle(server.url)


class LocalEngine:
    """slime's engine methods, in this process."""

    name = "local"
    workers = 2

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.answer: Any = {"success": True, "message": ""}

    def _note(self, method: str, arguments: dict[str, Any]) -> Any:
        self.seen.append((method, arguments))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer

    def pause_generation(self, **arguments: Any) -> Any:
        return self._note("pause", arguments)

    def flush_cache(self) -> Any:
        return self._note("flush", {})

    def continue_generation(self) -> Any:
        return self._note("continue", {})

    def update_weights_from_tensor(self, **arguments: Any) -> Any:
        return self._note("update", arguments)

    def get_weight_version(self) -> str:
        return "6"


def test_a_local_engine_is_called_directly() -> None:
    local = LocalEngine()
    engine = handle(local)
    assert isinstance(engine, LocalHandle)
    assert (engine.name, engine.workers) == ("local", 2)
    engine.pause("abort", 5)
    engine.pause("retract", 5)
    engine.flush(5)
    update(engine)
    engine.resume(5)
    assert engine.model_info(5) == {"weight_version": "6"}
    assert [name for name, _ in local.seen] == ["pause", "pause", "flush", "update", "continue"]
    assert [arguments for _, arguments in local.seen[:2]] == [{}, {"mode": "retract"}]
    assert local.seen[3][1]["flush_cache"] is False


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ({"success": False, "message": "no room"}, RemoteError, "no room"),
        ((False, "no room"), RemoteError, "no room"),
        (KeyError("w"), RemoteError, "KeyError: 'w'"),
        (ConnectionResetError("peer gone"), PeerClosedError, "peer gone"),
        (TimeoutError("slow"), DeadlineError, "slow"),
    ],
)
def test_a_local_engines_failure_is_translated(
    answer: Any, kind: type[Exception], text: str
) -> None:
    local = LocalEngine()
    local.answer = answer
    with pytest.raises(kind, match=f"engine local: update_weights_from_tensor: .*{text}"):
        update(handle(local))


def _response(status: int) -> requests.Response:
    """What slime's actors answer to pause_generation."""
    response = requests.Response()
    response.status_code = status
    return response


@dataclasses.dataclass
class Flushed:
    """As SGLang's FlushCacheReqOutput."""

    success: bool
    message: str = ""


@pytest.mark.parametrize(
    "answer",
    [
        *(None, True, (True,), (True, "Success"), (True, "Success", 0), [True, True]),
        {"success": True, "message": "Success", "num_paused_requests": 0},
        {"message": "Generation paused successfully.", "status": "ok"},
        *([(True, "ok"), (True, "ok")], [None, {"success": True}], Flushed(True), _response(200)),
    ],
)
def test_what_engines_answer_of_success(answer: Any) -> None:
    local = LocalEngine()
    local.answer = answer
    engine = handle(local)
    engine.pause("abort", 60)
    engine.flush(60)
    update(engine)
    engine.resume(60)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *((False, "refused"), ((False, "no", 1, 2), "no")),
        *(({"success": value, "message": "no"}, "no") for value in (None, 0, "false")),
        *(({"error": "no"}, "no"), ({"status": "error", "message": "no"}, "no")),
        ([(True, "ok"), (False, "worker 1 failed")], "worker 1 failed"),
        ([{"success": True}, {"success": False, "message": "no"}], "no"),
        *(([True, False], "refused"), ([], r"\[\]"), ({}, r"\{\}"), ("error: no", "error: no")),
        (Flushed(False, "busy"), "busy"),
        *((_response(500), "500"), ({"message": "no"}, "no")),
        # as SGLang's error handlers have it, handed on by an object that does not look at it
        ({"object": "error", "message": "too large", "type": "E", "code": 413}, "too large"),
    ],
)
def test_whatever_else_an_engine_answers_is_a_refusal(answer: Any, text: str) -> None:
    local = LocalEngine()
    local.answer = lambda: answer
    with pytest.raises(RemoteError, match=f"engine local: update_weights_from_tensor: .*{text}"):
        update(handle(local))


def test_a_handle_stays_itself_and_strangers_are_refused() -> None:
    engine = handle(LocalEngine())
    assert handle(engine) is engine
    with pytest.raises(InvalidArgumentError, match="2 workers, but workers=3"):
        handle(engine, workers=3)
    with pytest.raises(InvalidArgumentError, match="neither a URL"):
        handle(object())
    for url in ("127.0.0.1:30000", "vllm+127.0.0.1:8000"):
        with pytest.raises(InvalidArgumentError, match=r"http://, https:// or vllm\+http://$"):
            handle(url)
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        handle("http://127.0.0.1:1", workers=0)


def test_a_server_without_tls_is_asked_about(server: FakeServer) -> None:
    url = server.url.replace("http:", "https:")
    with pytest.raises(PeerClosedError, match=r"/server_info: .*; is this an http:// server\?"):
        handle(url)


@pytest.mark.parametrize("kind", ["", "vllm+"])
def test_a_url_with_a_path_is_asked_about(kind: str, server: FakeServer) -> None:
    """As clients of OpenAI's API want it."""
    text = f"HTTP 404: no such path; is the server's root URL {server.url}\\?"
    with pytest.raises(RemoteError, match=text):
        handle(f"{kind}{server.url}/v1")
    server.answers.clear()
    with pytest.raises(RemoteError) as caught:
        handle(f"{kind}{server.url}/")
    assert "root URL" not in str(caught.value)


def test_a_control_message_reaches_a_vllm_engine_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only SGLang takes it as a pickled tensor."""

    class Llm:
        seen: ClassVar[list[Any]] = []

        def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
            facts = {"rank": 0, "workers": 1, "engine": 0, "engines": 1, "weight_version": None}
            self.seen.append((method, *args))
            return [json.dumps(facts) if method == "wsync_describe" else [True, "good"]]

    monkeypatch.setattr(payload, "control", None)
    message = Control(op="close", session="0a", update=3, deadline=5.0)
    send_control(handle(Llm()), [message], weight_version=7, timeout=5)
    assert Llm.seen[-1] == ("wsync_update", [message.to_bytes().decode()], "7", 0)
