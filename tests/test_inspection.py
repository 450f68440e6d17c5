"""`wsync inspect`: people see what an engine's workers keep."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from support.fused import Fused, changed, draw
from support.workers import ThreadEngine

import wsync
from wsync import inspection
from wsync.demo.engines.serve import ServerProcess, serve_in_process
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import ModuleLoader
from wsync.messages.control import UPDATING

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
    head, *rows = inspection.table(found).splitlines()
    assert head.split("  ")[0] == "worker"
    assert [row.split()[0] for row in rows[:2]] == ["0", "1"]
    note, *verified = rows[2:]
    assert verified and all(row.endswith(" equal in part") for row in verified)
    assert f"{found[0]['kept_nbytes']:,} (" in rows[0]
    assert note.startswith("worker 0, 1: norm goes through load_weights: norm is no")


def test_workers_that_have_learnt_nothing_say_why() -> None:
    module = Fused()
    engine = ThreadEngine([RecordedLoader(module), ModuleLoader(module)])
    text = inspection.table(inspection.look(engine).workers)
    assert "worker 0: wsync has not learnt what it keeps: no trainer has asked what the" in text
    assert "worker 1: its loader takes whole tensors: there is nothing to learn" in text


def test_an_engine_without_wsync_is_named() -> None:
    class Stock:
        name, workers = "stock", 1

        def update_weights_from_tensor(self, **_: Any) -> None: ...

    said = inspection.look(Stock()).unasked
    assert re.fullmatch(r"it does not run wsync's loader\W.* \(\)", said)


def test_an_engine_that_does_not_answer_costs_the_timeout() -> None:
    engine, _ = learnt_engine()
    engine.update_weights = lambda *_, **__: None
    with pytest.raises(wsync.DeadlineError, match="a worker has not answered"):
        inspection.look(engine, timeout=0.3)


class Member(ThreadEngine):
    """One engine of a fleet.  asked: how often its workers were asked."""

    def __init__(self, name: str) -> None:
        super().__init__([RecordedLoader(Fused())])
        self.name, self.asked = name, 0

    def update_weights(self, *content: Any, **request: Any) -> None:
        self.asked += 1
        super().update_weights(*content, **request)

    def update(self, version: int, seed: int = 0) -> wsync.Verification:
        with wsync.connect(draw(seed), engines=[self], options=OPTIONS) as sync:
            sync.update(version=version)
            return sync.verify()


def rows(engines: inspection.Engines, *, workers: bool = True) -> tuple[list[str], list[str]]:
    """The states in a table, and the lines below it."""
    found = engines.look(20.0, workers=workers)
    head, *lines = inspection.overview(found).splitlines()
    assert head.split()[:4] == ["engine", "version", "workers", "state"]
    cells = [re.split(" {2,}", line) for line in lines[: len(found)]]
    assert [row[0] for row in cells] == [each.name for each in found]
    assert [row[3] in ("consistent", "answers") for row in cells] == [r.good for r in found]
    return [row[3] for row in cells], lines[len(found) :]


def test_a_fleet_is_a_table_that_names_lost_engines() -> None:
    first, other, gone, late = map(Member, ("first", "other", "gone", "late"))
    assert first.update(7) and other.update(7)

    def refuse(timeout: float) -> dict[str, Any]:
        raise wsync.PeerClosedError("engine gone: connection refused")

    never = threading.Event()
    gone.model_info = refuse  # type: ignore[method-assign]
    late.model_info = lambda _: {"late": never.wait(60)}  # type: ignore[assignment, method-assign]
    engines = inspection.Engines([first, other, gone])
    states = ["consistent", "consistent", "lost"]
    assert rows(engines) == (states, ["engine gone: lost: connection refused"])
    assert first.update(10)
    assert rows(engines)[0] == ["consistent", "behind", "lost"]
    assert "engine other: behind: others report version 10" in rows(engines)[1]
    other.version = f"{UPDATING}12ab"
    asked = other.asked
    assert rows(engines)[0] == ["consistent", "updating", "lost"] and other.asked == asked
    found = inspection.Engines([late, first]).look(0.2, workers=False)
    assert [each.lost for each in found] == ["lost: no answer within 0.2 s", ""]
    never.set()


def test_versions_without_an_order_are_compared_with_most_engines() -> None:
    engines = [*map(Member, "abc")]
    for engine, version in zip(engines, ["step-9", "step-10", "step-10"], strict=True):
        engine.version = version
    assert rows(inspection.Engines(engines))[0] == ["behind", "consistent", "consistent"]


def test_workers_remember_the_last_verification() -> None:
    engine = Member("one")
    (found,) = (engines := inspection.Engines([engine])).look(20.0, workers=True)
    assert inspection.overview([found]).splitlines()[1].endswith("  -")
    engine.update(1)
    (found,) = engines.look(20.0, workers=True)
    assert re.search(r"consistent  \d{4}-.* equal$", inspection.overview([found]), re.M)
    with wsync.connect(draw(1), engines=[engine], options=OPTIONS) as sync:
        for version in (2, 3):  # only a connection's first update is verified
            sync.update(version=version)
        (found,) = engines.look(20.0, workers=True)
        assert inspection.overview([found]).endswith(" equal, older weights")
        engine.receivers[0]._loader._module.o[1, 3] += 1  # type: ignore[attr-defined]
        assert not sync.verify()
    states, notes = rows(engines)
    assert states == ["different"] and notes == ["engine one: worker 0: other values in o[1, 3]"]


def test_only_the_first_table_of_a_watch_disturbs_requests() -> None:
    engine = Member("one")
    engine.update(1)
    before, engines = engine.asked, inspection.Engines([engine])
    assert rows(engines)[0] == ["consistent"] and engine.asked > before
    before = engine.asked
    assert rows(engines, workers=False)[0] == ["consistent"]
    engine.version = 2
    assert rows(engines, workers=False)[0] == ["answers"]
    assert engine.asked == before


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wsync", "inspect", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def follow(server: ServerProcess) -> None:
    """Follows an engine that ends, and one that never was, until Ctrl-C."""
    nobody = "http://127.0.0.1:9"
    words = [sys.executable, "-m", "wsync", "inspect", server.url, nobody, "--watch", "0.1"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as watching:
        assert watching.stdout is not None
        try:
            lines = iter(watching.stdout.readline, "")
            for state in ("seventh +1 +consistent", "- +- +lost"):
                assert any(re.match(f"{server.url} +{state} +-$", line) for line in lines)
                assert any(re.match(f"engine .*{nobody}: lost: .* refused", line) for line in lines)
                server.close()
            watching.send_signal(signal.SIGINT)
            assert watching.communicate(timeout=60)[1] == ""
        finally:
            watching.kill()
    assert watching.returncode == 0


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
        assert "its loader takes whole tensors: there is nothing to learn" in done.stdout
        model = AutoModelForCausalLM.from_config(config)
        stock = dataclasses.replace(OPTIONS, delivery="stock")
        with wsync.connect(dict(model.named_parameters()), [server.url], options=stock) as sync:
            sync.update(version="seventh")
        done = run(server.url, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert found["weight_version"] == "seventh"
        assert found["workers"][0]["loader"] == "ModuleLoader"
        follow(server)
    done = run(server.url, nobody := "http://127.0.0.1:9", "--json", "--no-workers")
    assert (done.returncode, done.stderr) == (1, "")
    assert [each["name"] for each in json.loads(done.stdout)] == [server.url, nobody]
    gone = run(server.url, "--timeout", "5")
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"wsync inspect: engine {server.url}")
