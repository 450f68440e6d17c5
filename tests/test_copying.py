"""An engine is filled with the weights of a running engine of another shape."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_qwen3
from support.distributed_receivers import FusedWorker
from support.fronts import served
from support.fused import BF16, Fused, bytes_of, changed, draw, held
from support.tiny_qwen3 import in_server
from support.worker_processes import WorkersEngine
from support.workers import ThreadEngine

import wsync
from wsync.checkpoints.safetensors_layout import INDEX
from wsync.demo.engines.serve import serve_in_process
from wsync.engine.learn.recorded_loader import RecordedLoader

PATIENCE = 60.0


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def options(**more: Any) -> wsync.Options:
    return wsync.Options(**{"deadline": 20.0, "progress": False, **more})


def processes(tp: int) -> WorkersEngine:
    settings = [{"tp": tp, "rank": rank} for rank in range(tp)]
    return WorkersEngine(FusedWorker, settings, name=f"tp{tp}", path=sys.path)


def update(engine: Any, seed: int) -> None:
    with wsync.connect(draw(seed), [engine], options=options()) as sync:
        sync.update(version=seed)


def loaded(tp: int, seed: int) -> list[dict[str, bytes]]:
    """What load_weights itself puts into each worker."""
    modules = [Fused(tp, rank, ep=True) for rank in range(tp)]
    for module in modules:
        module.load_weights(list(draw(seed).items()))
    return [{name: bytes_of(each) for name, each in held(module).items()} for module in modules]


@pytest.fixture(scope="module")
def source() -> Iterator[WorkersEngine]:
    """Two workers, which hold an update of a trainer that is gone."""
    with processes(2) as engine:
        update(engine, 7)
        yield engine


@pytest.mark.parametrize("way", ["auto", "distributed"])
def test_two_workers_fill_four_byte_for_byte(source: WorkersEngine, way: str) -> None:
    known = options(delivery=way, round_nbytes=2048, ring_nbytes=8192)
    with processes(4) as target, served(target) as front:
        report = wsync.copy_weights(source, front.url, options=known)
        assert target._call("held", None, PATIENCE) == loaded(4, 7)
        assert (target.weight_version, target.paused, front.pauses) == ("7", False, 1)
        assert report.paths == {front.url: "ring" if way == "auto" else "gloo"}
        assert report.redundancy == 1.0
        # what was copied can be copied on, and replaced; the source takes updates as before
        with processes(1) as third, served(third) as last:
            wsync.copy_weights(target, last.url, options=known)
            assert third._call("held", None, PATIENCE) == loaded(1, 7)
        update(source, 8)
        wsync.copy_weights(source, front.url, options=known)
        assert target._call("held", None, PATIENCE) == loaded(4, 8)
        assert target.weight_version == "8"
        update(source, 7)


# by what happens to which worker of the source: the deadline, and words of the error
STRUCK = {
    (signal.SIGKILL, 1): (20.0, "end|close|gone"),
    (signal.SIGKILL, 0): (20.0, r"trainer rank 0 \(pid \d+\) has ended"),
    (signal.SIGSTOP, 1): (3.0, "deadline passed|within"),
}


@pytest.mark.parametrize("struck", [*list(STRUCK)[:1], *map(slow, list(STRUCK)[1:])])
def test_a_source_that_dies_or_stops_leaves_the_target_paused(
    struck: tuple[signal.Signals, int],
) -> None:
    (seconds, text), (sent, worker) = STRUCK[struck], struck
    with processes(2) as engine, processes(4) as target, served(target) as front:
        update(engine, 7)
        front.on_open = lambda: os.kill(engine.pids[worker], sent)
        with pytest.raises(wsync.WsyncError, match="from engine tp2: ") as caught:
            wsync.copy_weights(engine, front.url, options=options(deadline=seconds))
        found = str(caught.value)
        assert re.search(text, found) and front.url in found and "stay paused" in found, found
        assert target.paused
        update(target, 9)  # by a trainer
        assert target._call("held", None, PATIENCE) == loaded(4, 9)
        if sent is signal.SIGSTOP:
            os.kill(engine.pids[worker], signal.SIGCONT)


def test_two_workers_write_a_checkpoint(source: WorkersEngine, tmp_path: Path) -> None:
    report = wsync.copy_weights(source, tmp_path, options=options())
    assert (report.exchange, report.version, report.workers) == ("disk", "7", 0)
    assert os.readlink(tmp_path / "latest") == "weight_v000007"
    (file,) = (tmp_path / "latest").glob("*.safetensors")
    expected = {name: bytes_of(each.to(BF16)) for name, each in draw(7).items()}
    found = load_file(file)
    assert {name: bytes_of(each.to(BF16)) for name, each in found.items()} == expected
    assert found["router"].dtype == torch.float32  # as the engine has it


def threads(*modules: Any) -> ThreadEngine:
    return ThreadEngine([RecordedLoader(module) for module in modules])


def scaled(module: Fused, pairs: Any) -> None:
    for name, tensor in pairs:
        if name == "norm":
            module.norm.data.copy_(tensor * 2 + 1)
    Fused.load_weights(module, [pair for pair in pairs if pair[0] != "norm"])


def test_what_cannot_be_sent_is_refused_before_the_target_pauses() -> None:
    never, computing, stock = threads(Fused()), threads(changed(scaled)), threads(Fused())
    update(computing, 7)
    stock.load_formats = ()  # type: ignore[assignment]
    with served(threads(Fused())) as front:
        for engine, error, text in (
            (never, wsync.StateError, "engine threads.* nothing was learnt: no trainer has asked"),
            (computing, wsync.UnsupportedError, "norm: this worker does not hold it as it was del"),
            (stock, wsync.UnsupportedError, "engine threads: it does not run wsync's loader"),
            (front.url, wsync.InvalidArgumentError, "is given twice"),
        ):
            with pytest.raises(error, match=text):
                wsync.copy_weights(engine, front.url, options=options())
        assert front.pauses == 0
    with pytest.raises(wsync.InvalidArgumentError, match="expected the URL of an engine"):
        wsync.copy_weights(never, computing, options=options())
    with pytest.raises(wsync.InvalidArgumentError, match="a URL starts with http://"):
        wsync.copy_weights(never, "localhost:30000", options=options())


def test_another_model_is_named() -> None:
    update(engine := threads(Fused()), 7)
    other = torch.nn.Module()
    other.norm = torch.nn.Parameter(torch.zeros(3))
    other.load_weights = lambda pairs: [other.norm.data.copy_(v) for n, v in pairs if n == "norm"]
    with (
        served(threads(other)) as front,
        pytest.raises(wsync.WsyncError, match=rf"from engine threads.*engine {front.url}.*norm"),
    ):
        wsync.copy_weights(engine, front.url, options=options())


def test_a_trainer_cannot_update_the_source_meanwhile() -> None:
    engine, target, refused = threads(Fused(2, 0), Fused(2, 1)), Fused(), list[str]()
    with wsync.connect(draw(7), [engine], options=options()) as sync:
        sync.update(version=7)

        def interfere() -> None:
            with pytest.raises(wsync.WsyncError) as caught:
                sync.update(draw(8), version=8)
            refused.append(str(caught.value))

        with served(threads(target)) as front:
            front.on_open = interfere
            wsync.copy_weights(engine, front.url, options=options())
        assert "another update is running" in refused[0]
        reference = Fused()
        reference.load_weights(list(draw(7).items()))
        assert [bytes_of(t) for t in held(target).values()] == [
            bytes_of(t) for t in held(reference).values()
        ]
        sync.update(draw(8), version=8)


def test_the_command_fills_one_server_from_another(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    )

    with serve_in_process(config, seed=1) as one, serve_in_process(config, seed=2) as other:
        command = [sys.executable, "-m", "wsync", "copy", one.url, other.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "no trainer has updated this engine" in done.stderr
        with wsync.connect(tiny_qwen3.draw(config, 3), [one.url], options=options()) as sync:
            sync.update(version=3)
        assert in_server(one.url) != in_server(other.url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        text = rf"{one.url} to {other.url}: version 3: \d+ tensors, .* to 1 worker in "
        assert re.match(text, done.stdout)
        assert in_server(one.url) == in_server(other.url)
        command[-1] = os.fspath(tmp_path / "checkpoints")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{one.url} to {tmp_path}/checkpoints/latest: version 3: ")
        assert (tmp_path / "checkpoints" / "latest" / INDEX).exists()
