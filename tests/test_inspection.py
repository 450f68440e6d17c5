"""`wsync inspect`: people see what an engine's workers keep."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fused import Fused, changed, draw
from support.workers import ThreadEngine

import wsync
from wsync import inspection
from wsync.demo.engines.serve import serve_in_process
from wsync.engine.learn.loader import RecordedLoader
from wsync.engine.ring_loaders import ModuleLoader

OPTIONS = wsync.Options(deadline=60, progress=False)


def scaled(module: Fused, pairs: Any) -> None:
    for name, tensor in pairs:
        if name == "norm":
            module.norm.data.copy_(tensor * 2 + 1)
    Fused.load_weights(module, [pair for pair in pairs if pair[0] != "norm"])


def learnt_engine() -> tuple[ThreadEngine, wsync.Report]:
    engine = ThreadEngine([RecordedLoader(Fused(2, rank, ep=True)) for rank in range(2)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        return engine, sync.update()


def test_what_workers_keep_is_what_they_are_sent() -> None:
    engine, report = learnt_engine()
    found = inspection.look(engine).workers
    assert [worker.worker for worker in found] == [0, 1]
    assert sum(worker.kept_nbytes for worker in found) == report.delivered_nbytes
    for rank, worker in enumerate(found):
        assert (worker.update, worker.consistent, worker.module) == (1, True, "Fused")
        assert worker.model_nbytes == report.model_nbytes
        kept = {tensor["name"] for tensor in worker.tensors}
        assert kept.isdisjoint(worker.skipped)
        assert kept | set(worker.skipped) == draw(0).keys()
        module = Fused(2, rank, ep=True)
        assert {box["into"] for tensor in worker.tensors for box in tensor["boxes"]} <= {
            *(name for name, _ in module.named_parameters()),
            *(name for name, value in vars(module).items() if isinstance(value, torch.Tensor)),
            *(name for name, _ in module.named_buffers()),
        }


def test_looking_changes_nothing() -> None:
    engine, _ = learnt_engine()
    first = inspection.look(engine).workers
    assert inspection.look(engine).workers == first
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        inspection.look(engine)
        sync.update(draw(3), version=9)
        inspection.look(engine)
        sync.update(draw(4), version=10)
    assert engine.version == "10"


def test_the_table_has_a_line_a_worker_and_names_what_is_unusual_once() -> None:
    engine = ThreadEngine([RecordedLoader(changed(scaled)), RecordedLoader(changed(scaled))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update()
    found = inspection.look(engine).workers
    head, *rows, note = inspection.table(found).splitlines()
    assert head.split("  ")[0] == "worker"
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert f"{found[0].kept_nbytes:,} (" in rows[0]
    assert note.startswith("worker 0, 1: norm goes through load_weights: norm is no")
    lines = inspection.listing(found, "^o$").splitlines()
    assert lines
    assert all("  o[0:" in line and " -> o" in line for line in lines)


def test_workers_that_have_learnt_nothing_say_why() -> None:
    module = Fused()
    engine = ThreadEngine([RecordedLoader(module), ModuleLoader(module)])
    text = inspection.table(inspection.look(engine).workers)
    assert "worker 0: nothing learnt: no trainer has asked for it yet; updates by buckets" in text
    assert "worker 1: nothing learnt: its loader knows by itself what it takes" in text


def test_an_engine_without_wsync_is_named() -> None:
    class Stock:
        name, workers = "stock", 1

        def update_weights_from_tensor(self, **_: Any) -> None: ...

    assert "does not run wsync's loader" in inspection.look(Stock()).unasked


def test_a_server_of_vllm_without_the_extension_says_what_it_is() -> None:
    answers = {
        ("POST", "/collective_rpc"): (500, {"error": "no attribute 'wsync_describe'"}),
        ("GET", "/version"): (200, {"version": "0.32.0"}),
        ("GET", "/weight_info"): (200, {"weight_version": "seventh"}),
    }
    with answering(answers) as url:
        found = inspection.look(f"vllm+{url}", timeout=30)
    assert (found.server, found.weight_version) == ("vLLM 0.32.0", "seventh")
    assert "wsync_describe" in found.unasked and "--worker-extension-cls" in found.unasked


@contextlib.contextmanager
def answering(answers: dict[tuple[str, str], tuple[int, Any]]) -> Iterator[str]:
    """The URL of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answers.get((self.command, self.path), (404, {}))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_an_engine_that_does_not_answer_costs_the_timeout() -> None:
    engine, _ = learnt_engine()
    engine.update_weights = lambda *_, **__: None
    with pytest.raises(wsync.DeadlineError, match="worker 0 does not answer; is it on this host"):
        inspection.look(engine, timeout=0.3)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wsync", "inspect", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_asks_a_url(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    )
    path = tmp_path / "found.json"
    with serve_in_process(config) as server:
        done = run(server.url, "--json", str(path), "--tensors")
        assert (done.returncode, done.stderr) == (0, "")
        assert "nothing learnt: its loader knows by itself what it takes" in done.stdout
        found = json.loads(path.read_text())
        assert found["workers"][0]["loader"] == "ModuleLoader"
        assert f"server: wsync {wsync.__version__}\nweight version: default" in done.stdout
        model = AutoModelForCausalLM.from_config(config)
        stock = dataclasses.replace(OPTIONS, delivery="stock")
        with wsync.connect(dict(model.named_parameters()), [server.url], options=stock) as sync:
            sync.update(version="seventh")
        done = run(server.url, "--json", "-")
        found = json.loads(done.stdout)
        assert found["weight_version"] == "seventh"
    gone = run(server.url, "--timeout", "5")
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"wsync inspect: engine {server.url}")
    assert run(server.url, "--tensors", "(").returncode == 2
