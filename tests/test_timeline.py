"""The timeline of an update: what processes write down, and what is drawn of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support.weights_only_engine import ProcessEngine

import wsync
from wsync import pages
from wsync.demo.cli import traces
from wsync.machine import trace

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, wsync.Report]:
    """Two updates of eight rounds each, traced: of the last one the records, and its report."""
    folder = tmp_path_factory.mktemp("trace")
    weights = {"large": torch.arange(1 << 16, dtype=torch.float32)}
    options = wsync.Options(deadline=60, round_nbytes=1 << 15, progress=False)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(trace.VARIABLE, str(folder))
        with ProcessEngine({"large": (weights["large"].shape, torch.float32)}) as engine:
            with wsync.connect(weights, engines=[engine], options=options) as sync:
                first = sync.update()
                report = sync.update()
                assert report.rounds == 8
            found = traces(folder, {engine.pids[0]: "the <engine>"})
    assert [record["update"] for record in found] == [2, 2]
    assert first.trace is not report.trace
    return found, report


@pytest.fixture
def records(updated: tuple[Records, wsync.Report]) -> Records:
    return updated[0]


def titles_of(text: str) -> list[str]:
    return [element.get("title", "") for element in ElementTree.fromstring(text).iter()]


def test_every_round_is_seen_in_both_processes_in_order(records: Records) -> None:
    trainer, engine = records
    assert (trainer["name"], engine["name"]) == ("trainer rank 0", "the <engine>")
    copied = [span for span in trainer["spans"] if span[1] == "local"]
    loaded = [span for span in engine["spans"] if span[1] == "load"]
    assert [span[2] for span in copied] == [span[2] for span in loaded] == list(range(8))
    for written, read in zip(copied, loaded, strict=True):
        assert written[3] < written[4] <= read[3] < read[4]


def test_an_engine_says_what_it_waits_for(records: Records) -> None:
    waits = [span[1] for span in records[1]["spans"] if span[0] == "thread"]
    assert waits[0] == "join"
    assert waits[-2:] == ["finish", "verdict"]
    taken = {span[2] for span in records[1]["spans"] if span[1] == "take"}
    assert taken == set(range(8))


def test_a_report_draws_what_its_own_rank_did(updated: tuple[Records, wsync.Report]) -> None:
    records, report = updated
    assert [list(span) for span in report.trace.spans] == records[0]["spans"]
    titles = " ".join(titles_of(report._repr_html_()))
    assert "local of round 7:" in titles  # of rounds in one pixel the last is drawn
    assert "load" not in titles


def test_of_spans_in_one_pixel_the_last_is_drawn() -> None:
    spans = [("stream", "local", n, n * 10**6, n * 10**6 + 500_000) for n in range(8)]
    spans.insert(3, ("stream", "local", 99, 3 * 10**6, 3 * 10**6 + 500_000))
    drawn = pages.fragment(*pages._timeline([{"name": "rank 0", "spans": spans}]))
    titles = [title.partition(":")[0] for title in titles_of(drawn) if title]
    assert titles == [f"local of round {n}" for n in range(8)]


def test_a_trace_that_cannot_be_written_fails_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path / "gone"))
    weights = {"a": torch.ones(4)}
    options = wsync.Options(deadline=60, progress=False)
    with (
        ProcessEngine({"a": ((4,), torch.float32)}) as engine,
        wsync.connect(weights, [engine], options=options) as sync,
    ):
        assert sync.update().version == "1"
    assert "update 1 of this connection is not traced" in caplog.text
