"""The transformers engine over HTTP: SGLang's shapes and codes, generation, stock payloads."""

import base64
import pickle
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch
from support import fsdp_cases
from support.trainer import Trainer
from transformers import AutoModelForCausalLM, Qwen3Config

import wsync
from wsync._core import DeadlineError, PeerClosedError
from wsync.bucket import FlattenedTensorBucket
from wsync.demo.engines.serve import ServerProcess, serve_in_process
from wsync.demo.engines.serve import main as serve_main
from wsync.demo.engines.server import EngineServer
from wsync.demo.engines.transformers import Engine
from wsync.handles.base import handle
from wsync.machine.deadline import Deadline
from wsync.messages import payload
from wsync.messages.control import LOAD_FORMAT

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def config(**changes: Any) -> Qwen3Config:
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**{**fields, **changes})


def model_of(seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(**changes), dtype=torch.float32)


class Server:
    """The endpoints in a thread of the test."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.engine = Engine(model, **options)
        self._server = EngineServer(self.engine, 0)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.port}"

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=30, **options)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=30)

    def generate(self, **sampling: Any) -> Any:
        body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, **sampling}}
        return self.post("/generate", body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server whose weights no test changes."""
    server = Server(model_of(0), model_path="tiny")
    yield server
    server.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*arguments: Any, **options: Any) -> Server:
        servers.append(Server(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("delivery", ["wsync", "stock"])
def test_experts_that_transformers_5_fuses(serve: Callable[..., Server], delivery: str) -> None:
    """In a trainer's dict, in an engine's model, or in both: names are those of checkpoints."""
    models = {kind: fsdp_cases.build(kind)[0] for kind in ("moe", "fused")}
    options = wsync.Options(progress=False, deadline=30, delivery=delivery)
    for kind, model in models.items():
        trained, state = fsdp_cases.build("fused", initializer_range=0.5)
        wanted = state if kind == "moe" else trained.state_dict()
        server = serve(model)
        with wsync.connect(dict(trained.named_parameters()), [server.url], options=options) as sync:
            for version in (1, 2):
                sync.update(version=version)
        held = model.state_dict()
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def pickled(content: Any) -> str:
    return base64.b64encode(pickle.dumps(content)).decode()


def update(server: Server, content: Any, load_format: str | None = None, **more: Any) -> Any:
    body = {
        "serialized_named_tensors": [content if isinstance(content, str) else pickled(content)],
        "load_format": load_format,
        "flush_cache": False,
        **more,
    }
    return server.post("/update_weights_from_tensor", body)


def steer(server: Server, message: bytes, **more: Any) -> requests.Response:
    content = base64.b64encode(payload.control(message)).decode()
    answer: requests.Response = update(server, content, LOAD_FORMAT, **more)
    return answer


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_server_says_what_it_is(shared: Server) -> None:
    info = shared.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == ("tiny", "default")
    assert info["architectures"] == ["Qwen3ForCausalLM"]
    assert shared.get("/server_info").json()["tp_size"] == 1
    assert shared.get("/health").status_code == 200


@pytest.mark.parametrize("load_format", ["flattened_bucket", None, "direct"])
def test_stock_payloads_replace_the_weights(
    serve: Callable[..., Server], load_format: str | None
) -> None:
    server, other = serve(model_of(0)), model_of(1)
    before = server.get("/weights_checker").json()
    pairs = list(other.state_dict().items())
    server.post("/pause_generation", {})
    for part in (pairs[:7], pairs[7:]):
        content: Any = part
        if load_format == "flattened_bucket":
            data = payload.bucket(FlattenedTensorBucket(named_tensors=part))
            content = base64.b64encode(data).decode()
        answer = update(server, content, load_format, weight_version="1")
        assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    assert server.get("/model_info").json()["weight_version"] == "1"
    for name, tensor in server.engine.model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    after = server.get("/weights_checker").json()
    assert after["ranks"][0]["checksums"].keys() == other.state_dict().keys()
    assert after != before


def test_wsyncs_update_arrives_over_http(serve: Callable[..., Server]) -> None:
    server, weights = serve(model_of(0)), model_of(1).state_dict()
    names = list(weights)
    trainer = Trainer(weights, [names[:9], names[9:]])
    with ThreadPoolExecutor() as pool:
        opened = pool.submit(steer, server, trainer.control(1))
        trainer.accept()
        trainer.update(1, weights)
        assert opened.result().json() == {
            "success": True,
            "status": "ok",
            "message": "update 1 of this connection",
        }
    info = server.get("/model_info").json()
    assert (info["weight_version"], info["consistent"]) == ("default", False)
    assert "its version has not been given yet" in info["reason"]
    assert server.post(CONTINUE, {}).status_code == 400
    assert server.generate().status_code == 400
    assert steer(server, trainer.control(1, "close"), weight_version="7").status_code == 200
    assert server.get("/model_info").json()["consistent"]
    assert server.get("/model_info").json()["weight_version"] == "7"
    for name, tensor in server.engine.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


PAUSE, CONTINUE = "/pause_generation", "/continue_generation"


class Wrapped:
    """slime's methods around an engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model_info = engine.model_info

    def pause_generation(self) -> None:
        self.engine.gate.pause("abort")

    def continue_generation(self) -> None:
        self.engine.continue_generation()

    def flush_cache(self) -> bool:
        return True

    def update_weights_from_tensor(self, *, flush_cache: bool, **given: Any) -> tuple[bool, str]:
        return True, self.engine.update_weights_from_tensor(**given, end=Deadline(30))


def test_an_engine_of_this_process_takes_buckets() -> None:
    served, options = model_of(0), wsync.Options(progress=False, bucket_nbytes=4096, deadline=30)
    for number in (1, 2):  # connections
        weights = dict(model_of(number).named_parameters())
        with wsync.connect(weights, [Wrapped(Engine(served))], options=options) as sync:
            for _ in range(2):
                assert sync.update().rounds > 1
        assert all(torch.equal(served.get_parameter(name), weights[name]) for name in weights)


def test_pause_ends_running_requests_and_holds_new_ones(serve: Callable[..., Server]) -> None:
    server = serve(model_of(0))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.generate, max_new_tokens=4000)
        wait_until(lambda: server.engine.gate._running)
        paused = server.post("/pause_generation", {"mode": "abort"})
        assert (paused.status_code, paused.json()["status"]) == (200, "ok")
        assert running.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.post("/flush_cache").status_code == 200
        held = pool.submit(server.generate)
        time.sleep(0.1)
        assert not held.done()
        assert server.post("/continue_generation", {}).json()["status"] == "ok"
        assert held.result().json()["output_ids"]


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are started as users start them, and not by the tests' nursery."""
    monkeypatch.setattr("wsync.demo.engines.serve.Popen", subprocess.Popen)


def test_an_engine_process_serves_and_ends_with_its_parent(interpreters: None) -> None:
    with serve_in_process(config(), dtype="float32", seed=0) as server:
        assert isinstance(server, ServerProcess)
        engine = handle(server.url)
        assert engine.workers == 1
        body = {"input_ids": PROMPT}
        answer = requests.post(server.url + "/wsync/logits", json=body, timeout=30)
        with torch.no_grad():
            expected = model_of(0)(torch.tensor([PROMPT])).logits[0]
        assert torch.equal(torch.tensor(answer.json()["logits"]), expected)
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait(30)
        with pytest.raises(PeerClosedError):
            engine.model_info(5)


def test_an_engine_that_cannot_start_says_why(tmp_path: Any, interpreters: None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(
        PeerClosedError, match=r"(?s)ended with exit status 2; .*nonesuch"
    ) as caught:
        serve_in_process(tmp_path)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(DeadlineError, match="it did not listen within"):
        serve_in_process(config(), timeout=0.05)


def test_what_the_server_cannot_have_is_one_line_and_status_2(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            serve_main([*map(str, words)])
        assert ended.value.code == 2
        return capfd.readouterr().err

    program = "python -m wsync.demo.engines.transformers: "
    free = ("--port", 0)
    where = tmp_path / "nowhere"
    for folder in (where, tmp_path):
        assert (
            said("--model", folder, *free)
            == f"{program}{folder}: there is no config.json in this folder\n"
        )
    config().save_pretrained(tmp_path)
    text = said("--model", tmp_path, *free, "--dtype", "float13")
    assert re.fullmatch(rf"{program}torch \S+ has no dtype 'float13'\n", text)
    text = said("--model", tmp_path, *free)
    found = rf"{program}Error no file named .*model\.safetensors.* {tmp_path}\.?\n"
    assert re.fullmatch(found, text)
    link = tmp_path / "latest"  # may lead to another folder when the next file is read
    link.symlink_to(".")
    assert re.fullmatch(found, said("--model", link, *free))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = said("--model", tmp_path, "--seed", 1, "--port", port)
        assert text == f"{program}127.0.0.1:{port}: [Errno 98] Address already in use\n"
