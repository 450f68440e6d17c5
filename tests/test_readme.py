"""The README's notebook example runs in a real kernel, and what it and the guide say holds."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbclient
import nbformat
import pytest
from support import guide

from wsync.demo.engines.serve import command_line

OWN_ENGINE = f"""
import sys
sys.path.append({str(guide.ROOT / "tests")!r})
import torch, wsync
from support.workers import ThreadEngine
from wsync.engine.ring_loaders import ModuleLoader
weights = dict(torch.nn.Linear(3, 5).named_parameters())
engine = ThreadEngine([ModuleLoader(torch.nn.Linear(3, 5))])
with wsync.connect(weights, engines=[engine]) as sync:
    report = sync.update(version=41)
report
"""


@pytest.fixture(scope="module")
def outputs() -> list[list[Any]]:
    """What a notebook shows below a cell that has nothing but wsync, and below the README's."""
    cells = [
        nbformat.v4.new_code_cell(text)
        for text in (OWN_ENGINE, *guide.blocks("python", "In a notebook"))
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


def test_the_notebook_example_runs_under_ipykernel(outputs: list[list[Any]]) -> None:
    printed = "".join(output.get("text", "") for output in outputs[1])
    assert re.search(r"version 7: \d+ tensors, [\d,]+ bytes to 1 worker ", printed)
    assert printed.rstrip().endswith("\n7")
    assert "Warning" not in printed  # transformers has some of its own without ipywidgets


def test_a_notebook_shows_a_report_and_no_warning_of_a_bar(outputs: list[list[Any]]) -> None:
    assert [output for output in outputs[0] if "Warning" in output.get("text", "")] == []
    data = outputs[0][-1]["data"]
    assert data["text/plain"].startswith("Report(version='41', tensors=2, model_nbytes=80,")
    shown = ElementTree.fromstring(data["text/html"])
    assert "Weights updated to version 41" in " ".join(shown.itertext())


def test_the_server_is_started_as_it_says() -> None:
    text = guide.GUIDE.joinpath("engines.md").read_text(encoding="utf-8")
    found = re.findall(r"`python -m wsync\.demo\.engines\.transformers ([^`]*)`", text)
    assert [command_line().parse_args(words.split()).port for words in found] == [30000]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [*guide.PAGES, guide.ROOT / "csrc/README.md", guide.ROOT / "benchmarks/README.md"],
    ids=lambda page: str(page.relative_to(guide.ROOT)),
)
def test_what_a_page_refers_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
