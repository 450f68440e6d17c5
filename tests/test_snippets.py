"""The examples in docstrings and in the guide do what they say."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from support import guide, megatron_cases, snippets, tiny_qwen3
from support.procs import Ranks
from support.servers import await_that
from support.vllm_engine import VllmEngine
from support.weights_only_engine import ProcessEngine
from support.workers import ThreadEngine

import wsync
from wsync.demo.engines.serve import serve_in_process
from wsync.engine.ring_loaders import ModuleLoader
from wsync.sglang import load_weights
from wsync.slime import install
from wsync.vllm import WorkerExtension

# What runs each block of the README and the guide, by its beginning; or why nothing does.
RUN_BY = {
    "def generate": "test_the_two_halves_of_an_update",
    "pip install '.[demo]' && wsync demo": "nothing: .ci/run installs it; tests/test_demo.py",
    "pip install .  ": "nothing: .ci/run installs it",
    "--custom-megatron-init-path": "tests/test_slime.py",
    "layout = wsync.megatron.layout": "test_a_training_loop_of_megatron",
    "import wsync\nfrom wsync.demo": "tests/test_readme.py",
    "python train.py": "test_slime_s_flags, which names what it names; slime needs GPUs",
    "python -m pydoc": "test_a_command_of_the_guide",
    "model = build_model()": "test_weights_are_read_in_place",
    "checkpoint_engine:": "tests/test_verl.py",
    "python -m sglang.launch_server": "test_a_server_of_sglang, its words; tests/test_servers.py",
    "python3 -m venv": "nothing: downloads gigabytes; its versions: tests/test_mistakes.py",
    "import sys": "tests/test_servers.py, tests/test_servers_vllm.py",
    "sync = wsync.DiskSync": "test_versions_on_disk",
    "wsync doctor": "test_a_command_of_the_guide",
    "found = sync.verify()": "test_weights_are_verified",
    "wsync families": "test_a_command_of_the_guide",
    "fp8 = ": "test_weights_are_quantised",
    "python own_engine.py": "test_an_engine_of_ones_own",
    "import multiprocessing": "test_an_engine_of_ones_own",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serve_in_process(tiny_qwen3.dense(), dtype="float32") as started:
        yield started.url


def in_the_guide(start: str) -> list[str]:
    """The words of the guide's one command that begins so."""
    (text,) = [block for block in guide.all_blocks() if block.startswith(start)]
    return shlex.split(text.replace("\\\n", " "), comments=True)


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_block_of_the_guide_is_run_or_says_why_not() -> None:
    blocks = guide.all_blocks()
    unknown = [block for block in blocks if not block.startswith(tuple(RUN_BY))]
    assert unknown == [] and len(blocks) == len(RUN_BY)
    for start, runner in RUN_BY.items():
        print(f"{start!r}: {runner}")
        named_there = re.findall(r"tests/\w+\.py|\btest_\w+", runner)
        assert named_there or runner.startswith("nothing: ")

        assert all(name in globals() or (guide.ROOT / name).exists() for name in named_there)


def test_the_two_halves_of_an_update(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has tokens of the old weights before and after the new ones are staged."""
    (block,) = (each for each in guide.all_blocks() if each.startswith("def generate"))
    weights = tiny_qwen3.draw(tiny_qwen3.dense(), 8)
    options = wsync.Options(delivery="distributed", progress=False)
    names: dict[str, Any] = {"requests": requests, "ThreadPoolExecutor": ThreadPoolExecutor}
    with wsync.connect(weights, [server], options=options) as sync:
        sync.update(version=7)
        stage = sync.stage

        def between_tokens(**given: Any) -> bool:
            await_tokens(3)
            brought = stage(**given)
            await_tokens(len(names["versions"]) + 3)
            return brought

        def await_tokens(count: int) -> None:
            await_that(lambda: len(names["versions"]) >= count, f"{count} tokens have come")

        monkeypatch.setattr(sync, "stage", between_tokens)
        names |= {"url": server, "sync": sync}
        exec(block, names)
    assert names["report"].staged
    versions = names["versions"]
    assert versions[:6] == ["7"] * 6 and versions[-1] == "8" and versions == sorted(versions)
    assert len(names["tokens"]) == 3 + len(versions)


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
    assert words == in_the_guide("python -m sglang.launch_server")
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


def test_an_engine_of_ones_own(tmp_path: Path) -> None:
    first, last = guide.run("An engine of your own", tmp_path / "own_engine.py").splitlines()
    assert first.startswith("version 7: 2 tensors, 8,320 bytes to 1 worker in ")
    assert last == "equal: True"


def test_weights_are_read_in_place(capfd: pytest.CaptureFixture[str]) -> None:
    engine = ThreadEngine([ModuleLoader(torch.nn.Linear(3, 5))])
    names = {"build_model": lambda: torch.nn.Linear(3, 5), "engines": [engine]}
    guide.execute("Read in place", {}, **names)["sync"].close()
    assert capfd.readouterr().out == "{'threads': 'direct'}\n"


def test_weights_are_quantised() -> None:
    name, codes = "model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn
    shapes = {name: ((256, 128), codes), name + "_scale_inv": ((2, 1), torch.float32)}
    engine = ProcessEngine(shapes)
    try:
        weights = {name: torch.full((256, 128), 7.0)}
        guide.execute("Quantised weights", {}, weights=weights, engines=[engine])
        held = engine.weights()
        scales = held[name + "_scale_inv"].repeat_interleave(128, 0)
        assert torch.equal(held[name].float() * scales, weights[name])
    finally:
        engine.close()


def test_versions_on_disk(server: str, tmp_path: Path) -> None:
    weights = tiny_qwen3.draw(tiny_qwen3.dense(), 11)
    names = {"layout": weights, "engines": [server], "hf_checkpoint": tiny_qwen3.dense()}
    given = guide.execute("Through the disk", {"/shared/run7": tmp_path}, **names)
    given["sync"].close()
    assert given["path"] == tmp_path / "weight_v000001"
    assert tiny_qwen3.in_server(server) == tiny_qwen3.sums(weights)


def test_weights_are_verified(server: str) -> None:
    with wsync.connect(tiny_qwen3.draw(tiny_qwen3.dense(), 12), engines=[server]) as sync:
        sync.update()
        assert guide.execute("Checking weights", {}, sync=sync)["found"]


@pytest.mark.parametrize("start", ["wsync doctor", "wsync families", "python -m pydoc"])
def test_a_command_of_the_guide(start: str, tmp_path: Path) -> None:
    program, *words = in_the_guide(start)
    module = ["-m", "wsync"] if program == "wsync" else []
    done = subprocess.run(
        [sys.executable, *module, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    assert start != "python -m pydoc" or done.stdout.count("wsync.connect(layout") == 2


def test_slime_s_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    words = snippets.command(install, "python train.py")
    assert words == in_the_guide("python train.py")
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert named(given["--custom-megatron-init-path"]) is install
    assert named(given["--sglang-custom-weight-loader"]) is load_weights
    for name, value in json.loads(given["--train-env-vars"]).items():
        monkeypatch.setenv(name, value)
    assert wsync.Options(**json.loads(os.environ["WSYNC_OPTIONS"])).deadline == 300
