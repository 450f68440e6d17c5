"""What somebody who is new here gets wrong, and what is said about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import wsync
from wsync.demo import cli
from wsync.doctor import importable
from wsync.layout import from_tensors


def test_one_url_is_not_a_list_of_engines() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=r"a list is wanted, \['http://x'\]"):
        wsync.connect({}, engines="http://x")


def test_engines_that_are_no_list_are_named() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=r"engines=None: a list is wanted"):
        wsync.connect({}, engines=None)  # type: ignore[arg-type]


def test_an_engine_that_is_given_twice_is_named(server: str) -> None:
    weights = {"w": torch.ones(1)}
    with pytest.raises(wsync.InvalidArgumentError, match=f"engine {server} is given twice"):
        wsync.connect(weights, engines=[server, server])
    handle = wsync.handle(server)
    with pytest.raises(wsync.InvalidArgumentError, match="is given twice"):
        wsync.Sync(from_tensors(weights), [handle, handle])


@pytest.mark.parametrize("wrong", [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).parameters()])
def test_a_model_is_not_a_mapping(wrong: Any) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=r"tensors by name are wanted"):
        wsync.connect(wrong, engines=["http://x"])


@pytest.mark.parametrize(
    ("name", "value"), [("deadline", "3"), ("threads", 2.5), ("round_nbytes", "1M")]
)
def test_an_option_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=f"{name}={value!r} is no "):
        wsync.Options(**{name: value})


def test_a_folder_that_an_uninstaller_left_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leftover_of_wsync_tests" / "core").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert not importable("leftover_of_wsync_tests")
    assert not importable("leftover_of_wsync_tests.core")
    assert not importable("never_there_in_wsync_tests.core")
    assert importable("wsync.demo")


def test_a_report_that_cannot_be_written_is_said_before_the_demo_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--json", str(tmp_path / "no" / "facts.json")])
    assert "No such file or directory" in capsys.readouterr().err


def test_zero_expert_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--model", "qwen3-moe", "--ep", "0"])
    assert "--ep 0: must divide 8" in capsys.readouterr().err
