"""The examples in docstrings and in the guide do what they say."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import guide, megatron_cases, snippets, tiny_qwen3
from support.procs import Ranks
from support.vllm_engine import VllmEngine

import wsync
from wsync.demo.engines.serve import serve_in_process
from wsync.sglang import load_weights
from wsync.slime import install
from wsync.vllm import WorkerExtension


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serve_in_process(tiny_qwen3.dense(), dtype="float32") as started:
        yield started.url


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_a_training_loop_of_megatron(server: str) -> None:
    with Ranks(2, path=sys.path, setup=megatron_cases.use_cpu) as ranks:
        found = ranks.run(snippets.megatron, server)
    assert all(len(logged) == 2 and min(logged) > 0 for logged, _ in found)
    assert tiny_qwen3.in_server(server) == found[0][1]
    assert wsync.handle(server).model_info(30)["weight_version"] == "2"


def test_a_trainer_of_fsdp(server: str) -> None:
    with Ranks(2, path=sys.path) as ranks:
        found = ranks.run(snippets.fsdp, server)
    assert tiny_qwen3.in_server(server) == found[0]


def test_a_server_of_sglang(server: str) -> None:
    weights = tiny_qwen3.draw(tiny_qwen3.dense(), 9)
    snippets.run(load_weights, server, weights=weights)
    assert tiny_qwen3.in_server(server) == tiny_qwen3.sums(weights)
    words = snippets.command(load_weights, "python -m sglang.launch_server")
    assert words[words.index("--custom-weight-loader") + 1] == "wsync.sglang.load_weights"
    assert words[words.index("--port") + 1] == snippets.URL.rpartition(":")[2]


def test_an_engine_of_vllm() -> None:
    engine = VllmEngine(tp=1)
    try:
        engine.prepare("qwen3")

        def llm(model: str, *, worker_extension_cls: str) -> VllmEngine:
            assert named(worker_extension_cls) is WorkerExtension
            return engine

        snippets.run(WorkerExtension, "", LLM=llm, weights=engine.weights(5))
        assert engine.differing(5) == [[]]
    finally:
        engine.close()
    words = snippets.command(WorkerExtension, "vllm serve")
    assert named(words[words.index("--worker-extension-cls") + 1]) is WorkerExtension


def test_an_engine_of_ones_own_and_direct_delivery(tmp_path: Path) -> None:
    first, last = guide.run("An engine of your own", tmp_path / "own_engine.py").splitlines()
    assert first.startswith("version 7: 2 tensors, 8,320 bytes to 1 worker in ")
    assert last == "equal: True"
    direct = guide.run("Direct delivery", tmp_path / "direct.py")
    assert direct == "{'my engine': 'direct'}\n"


def test_slime_s_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    words = snippets.command(install, "python train.py")
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert named(given["--custom-megatron-init-path"]) is install
    assert named(given["--sglang-custom-weight-loader"]) is load_weights
    for name, value in json.loads(given["--train-env-vars"]).items():
        monkeypatch.setenv(name, value)
    assert wsync.Options(**json.loads(os.environ["WSYNC_OPTIONS"])).deadline == 300
