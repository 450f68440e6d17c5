"""`wsync inspect`: people see what an engine's workers keep."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.fused import Fused, changed, draw
from support.workers import ThreadEngine

import wsync
from wsync import inspection
from wsync.demo.engines.serve import serve_in_process
from wsync.engine.learn.recorded_loader import RecordedLoader
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
    assert [said["worker"] for said in found] == [0, 1]
    assert sum(said["kept_nbytes"] for said in found) == report.delivered_nbytes
    for rank, said in enumerate(found):
        assert (said["update"], said["consistent"], said["module"]) == (1, True, "Fused")
        assert said["model_nbytes"] == report.model_nbytes
        kept = {tensor["name"] for tensor in said["tensors"]}
        assert kept.isdisjoint(said["skipped"])
        assert kept | {*said["skipped"]} == draw(0).keys()
        module = Fused(2, rank, ep=True)
        assert {box["into"] for tensor in said["tensors"] for box in tensor["boxes"]} <= {
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
    assert f"{found[0]['kept_nbytes']:,} (" in rows[0]
    assert note.startswith("worker 0, 1: norm goes through load_weights: norm is no")


def test_workers_that_have_learnt_nothing_say_why() -> None:
    module = Fused()
    engine = ThreadEngine([RecordedLoader(module), ModuleLoader(module)])
    text = inspection.table(inspection.look(engine).workers)
    assert "worker 0: wsync has not learnt what it keeps: no trainer has asked what the" in text
    assert "worker 1: wsync has not learnt what it keeps: its loader does not need this" in text


def test_an_engine_without_wsync_is_named() -> None:
    class Stock:
        name, workers = "stock", 1

        def update_weights_from_tensor(self, **_: Any) -> None: ...

    said = inspection.look(Stock()).unasked
    assert re.fullmatch(r"does not run wsync's loader\W.* \(\)", said)


def test_an_engine_that_does_not_answer_costs_the_timeout() -> None:
    engine, _ = learnt_engine()
    engine.update_weights = lambda *_, **__: None
    with pytest.raises(wsync.DeadlineError, match="a worker has not answered"):
        inspection.look(engine, timeout=0.3)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wsync", "inspect", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_asks_a_url() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    )
    with serve_in_process(config) as server:
        done = run(server.url, "--timeout", "100")
        assert (done.returncode, done.stderr) == (0, "")
        assert "weight version: default\n" in done.stdout
        assert "wsync has not learnt what it keeps: its loader does not need this" in done.stdout
        model = AutoModelForCausalLM.from_config(config)
        stock = dataclasses.replace(OPTIONS, delivery="stock")
        with wsync.connect(dict(model.named_parameters()), [server.url], options=stock) as sync:
            sync.update(version="seventh")
        done = run(server.url, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert found["weight_version"] == "seventh"
        assert found["workers"][0]["loader"] == "ModuleLoader"
    gone = run(server.url, "--timeout", "5")
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"wsync inspect: engine {server.url}")
