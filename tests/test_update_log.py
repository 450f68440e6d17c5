"""What an update leaves behind for people: a line in the log, warnings, metrics, a report."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fused import Fused, changed, draw
from support.weights_only_engine import ProcessEngine
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
REMOTE = dataclasses.replace(OPTIONS, delivery="distributed", broadcast="wsync")


def scaled(module: Fused, pairs: Any) -> None:
    for name, tensor in pairs:
        if name == "norm":
            module.norm.data.copy_(tensor * 2 + 1)
    Fused.load_weights(module, [pair for pair in pairs if pair[0] != "norm"])


def all_scaled(module: Fused, pairs: Any) -> None:
    Fused.load_weights(module, [(name, tensor * 2) for name, tensor in pairs])


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    found = [record for record in caplog.records if record.name == "wsync"]
    return [record.getMessage() for record in found if record.levelno == level]


class Files:
    """An engine of this process that is given files."""

    name = "files"

    def __init__(self) -> None:
        self.version = "0"

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...

    def get_weight_version(self) -> str:
        return self.version

    def update_weights_from_tensor(self, **request: Any) -> bool:
        return False

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> None:
        self.version = weight_version


def test_each_update_is_a_line_that_says_how_engines_were_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    weights = {"w": torch.ones(3, 5)}
    shapes = {"w": ((3, 5), torch.float32)}
    with ProcessEngine(shapes, name="first") as first, ProcessEngine(shapes, name="other") as other:
        with wsync.connect(weights, [first, other], options=OPTIONS) as sync:
            reports = [sync.update(version=number) for number in (7, 8)]
            way = "first, other by wsync's receiver"
            assert repr(sync) == f"<Sync version 8: rank 0 of 1 with 1 tensor; {way}>"
    assert repr(sync) == f"<Sync closed: rank 0 of 1 with 1 tensor; {way}>"
    lines = said(caplog, logging.INFO)
    for line, report in zip(lines, reports, strict=True):
        assert line.startswith(f"wsync: version {report.version}: 1 tensor, 120 bytes to 2 workers")
        assert f" in {report.seconds:.3f} s (" in line
        assert line.endswith(f"; {way}")
        assert report.ways == {"wsync's receiver": ["first", "other"]}
    assert said(caplog, logging.WARNING) == []


@pytest.mark.parametrize(
    ("learning", "said"),
    [
        (5.2, "in 6.000 s (5.2 s of it to learn where weights go, once a connection; 0.5 MB/s, "),
        (0.5, "(0.5 MB/s"),
    ],
)
def test_a_line_says_what_learning_took_where_that_is_much(learning: float, said: str) -> None:
    report = wsync.Report(delivered_nbytes=3_000_000, seconds=6.0, learning_seconds=learning)
    assert said in str(report)


def test_an_update_by_files_is_a_line_too(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO")
    weights, way = {"w": torch.ones(3, 5)}, f"the files of {tmp_path}"
    with wsync.DiskSync(weights, [Files()], folder=tmp_path, options=OPTIONS) as sync:
        report = sync.update(version=9)
        assert repr(sync) == f"<DiskSync version 9: rank 0 of 1 with 1 tensor; files by {way}>"
    (line,) = said(caplog, logging.INFO)
    assert line.startswith("wsync: version 9: 1 tensor, 60 bytes to 1 worker in ")
    assert line.endswith(f"; files by {way}")
    assert report.ways == {way: ["files"]}


@pytest.mark.parametrize("options", [OPTIONS, REMOTE], ids=["local", "remote"])
@pytest.mark.parametrize(("load", "which"), [(scaled, "norm: "), (all_scaled, "all tensors: ")])
def test_an_engines_own_loading_is_reported_and_told_once(
    load: Any, which: str, options: wsync.Options, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ThreadEngine([RecordedLoader(changed(load))])
    with wsync.connect(draw(0), engines=[engine], options=options) as sync:
        for _ in range(2):
            report = sync.update()
            assert report.own_loading["threads"].startswith(which)
            assert "own load_weights in threads" in str(report)
            assert json.loads(json.dumps(report.facts()))["own_loading"] == report.own_loading
    for receiver in engine.receivers:
        receiver.close()
    begins = "wsync: engine threads gets every weight, but some by its own load_weights, which"
    (text,) = (text for text in said(caplog, logging.WARNING) if text.startswith(begins))
    assert report.own_loading["threads"] in text


def test_a_user_sees_that_engines_learn(capsys: pytest.CaptureFixture[str]) -> None:
    options = dataclasses.replace(OPTIONS, progress=True)
    engine = ThreadEngine([RecordedLoader(changed(Fused.load_weights))])
    with wsync.connect(draw(0), engines=[engine], options=options) as sync:
        sync.update()
        text = capsys.readouterr().err
        assert "weights v1: engines learn where weights go" in text
        assert f"/{len(draw(0))} [" in text
        sync.update()
    assert "learn" not in capsys.readouterr().err


@pytest.mark.parametrize("options", [OPTIONS, REMOTE], ids=["local", "remote"])
def test_learning_that_takes_too_long_is_named(options: wsync.Options) -> None:
    """It goes on, and the next update finds what it has learnt."""
    going_on, module = threading.Event(), changed(Fused.load_weights)

    def slow(pairs: Any) -> None:
        going_on.wait(60)
        Fused.load_weights(module, pairs)

    engine = ThreadEngine([RecordedLoader(module, slow)])
    short = dataclasses.replace(options, deadline=2)
    late = r"did not learn within .* where its load_weights puts tensors; Options"
    with wsync.connect(draw(0), engines=[engine], options=short) as sync:
        with pytest.raises(wsync.WsyncError, match=late):
            sync.update()
        going_on.set()
        time.sleep(1)
        assert sync.update().learning_seconds < 1
    for receiver in engine.receivers:
        receiver.close()


@pytest.mark.parametrize("options", [OPTIONS, REMOTE], ids=["local", "remote"])
def test_a_report_says_what_the_audit_took(options: wsync.Options) -> None:
    engine = ThreadEngine([RecordedLoader(changed(Fused.load_weights))])
    with wsync.connect(draw(0), engines=[engine], options=options) as sync:
        learning, audited = sync.update(), sync.update()
    for receiver in engine.receivers:
        receiver.close()
    assert learning.audit_seconds == 0 < audited.audit_seconds < audited.seconds
    assert audited.metrics()["wsync/audit_seconds"] == audited.audit_seconds
    assert "of this, in the slowest worker" in audited._repr_html_()


def test_metrics_have_names_of_slime_and_of_wsync() -> None:
    engine = ThreadEngine([RecordedLoader(changed(Fused.load_weights))])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        report = sync.update()
    metrics = report.metrics()
    assert metrics["perf/update_weights_time"] == metrics["wsync/update_seconds"] > 0
    for phase, seconds in report.phases.items():
        assert metrics[f"perf/update_weights_{phase}_time"] == seconds
        assert metrics[f"wsync/{phase}_seconds"] == seconds
    assert metrics["perf/update_weights_wire_bytes"] == report.delivered_nbytes
    assert metrics["wsync/learning_seconds"] == report.learning_seconds
    assert metrics.keys() - report.metrics(whole=False).keys() == {"perf/update_weights_time"}
