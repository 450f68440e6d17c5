"""Options.prometheus: what a Prometheus server reads of a trainer's updates."""

from __future__ import annotations

import dataclasses
import socket
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from support.local_servers import Packing
from support.servers import free_ports

import wsync
from wsync.layout import from_tensors
from wsync.trainer import prometheus

OPTIONS = wsync.Options(deadline=60, progress=False, prometheus=True)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"wsync_{name}", labels)


def change(name: str, before: float | None, **labels: str) -> float:
    return (value(name, **labels) or 0.0) - (before or 0.0)


class Member(Packing):
    """An engine whose pause raises an error while `refuses`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.refuses = name, False

    def pause_generation(self) -> None:
        if self.refuses:
            raise RuntimeError("a planted failure")

    def get_weight_version(self) -> str:
        if self.refuses:
            raise ConnectionError("gone")
        return super().get_weight_version()


def test_updates_are_counted_and_lost_engines_named() -> None:
    names = ["update_duration_seconds_count", "update_duration_seconds_sum"]
    before = {name: value(name) for name in [*names, "delivered_bytes_total"]}
    paused = value("engine_paused_seconds_total", engine="first")
    first, other = Member("first"), Member("other")
    engines, weights = [first, other], {"w": torch.ones(3, 5)}
    with wsync.connect(weights, lambda: engines, options=OPTIONS) as sync:
        reports = [sync.update(version=7)]
        assert [value("engine_lost", engine=each.name) for each in engines] == [0, 0]
        other.refuses = True
        reports.append(sync.update(version=8))
        assert [value("engine_lost", engine=each.name) for each in engines] == [0, 1]
        del engines[1]
        reports.append(sync.update(version="named"))
        assert value("engine_lost", engine="other") is None
        assert value("weight_version") == 8
        failed = value("failures_total", call="update")
        assert failed is not None  # it is there before the first failure
        first.refuses = True
        with pytest.raises(wsync.WsyncError):
            sync.update()
        assert change("failures_total", failed, call="update") == 1
    seconds, nbytes = (sum(getattr(r, n) for r in reports) for n in ("seconds", "delivered_nbytes"))
    found = [change(name, former) for name, former in before.items()]
    assert found == [3, pytest.approx(seconds), nbytes]
    pauses = sum(report.paused["first"] for report in reports)
    assert change("engine_paused_seconds_total", paused, engine="first") == pytest.approx(pauses)
    assert value("last_update_timestamp_seconds") > 0  # type: ignore[operator]


def test_slimes_updaters_serve_metrics_without_a_line_of_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("WSYNC_OPTIONS", f'{{"prometheus": {port}, "progress": false}}')
    source = from_tensors({"w": torch.ones(2)})
    args = SimpleNamespace(hf_checkpoint="", update_weight_disk_dir=str(tmp_path))
    for kind in (wsync.UpdateWeightFromTensor, wsync.UpdateWeightFromDisk):
        updater = kind(args, source, None, model_name="any")
        for _ in range(2):  # slime connects again when engines change
            updater.connect_rollout_engines([Packing()])
            updater.update_weights()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            families = [*text_string_to_metric_families(answer.read().decode())]
        said = {s.name: s.value for f in families for s in f.samples if not s.labels}
        assert said["wsync_weight_version"] == updater.weight_version == 2
        updater.disconnect_rollout_engines()


def test_what_is_missing_is_named_at_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: Any = {"w": torch.ones(1)}

    def connect(**chosen: Any) -> None:
        options = dataclasses.replace(OPTIONS, **chosen)
        wsync.connect(weights, [Packing()], options=options).close()

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(wsync.InvalidArgumentError, match=f"prometheus={port}: cannot listen"):
            connect(prometheus=port)
    monkeypatch.setattr(prometheus, "_collectors", prometheus._collectors.__wrapped__)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(wsync.InvalidArgumentError, match="pip install prometheus-client"):
        connect()
    connect(prometheus=False)
    for port in (0, 70000, "9105"):
        with pytest.raises(wsync.InvalidArgumentError, match="neither True, False nor a port"):
            connect(prometheus=port)
