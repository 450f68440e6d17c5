"""The README's notebook example runs in a real kernel, and what it and the guide say holds."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from wsync.demo.engines.serve import command_line

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDE = ROOT / "wsync/README.md"


def notebook_cell() -> str:
    _, found, rest = README.read_text(encoding="utf-8").partition("**In a notebook**")
    assert found
    block = re.search(r"```python\n(.*?)```", rest, re.DOTALL)
    assert block
    return block[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_example_runs_under_ipykernel() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(notebook_cell())])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    assert re.search(r"version 7: \d+ tensors, [\d,]+ bytes to 1 worker ", printed)
    assert printed.rstrip().endswith("\n7")
    assert "Warning" not in printed  # transformers has some of its own without ipywidgets


def test_the_server_is_started_as_it_says() -> None:
    found = re.findall(
        r"`python -m wsync\.demo\.engines\.transformers ([^`]*)`", GUIDE.read_text("utf-8")
    )
    assert [command_line().parse_args(words.split()).port for words in found] == [30000]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "page",
    [README, GUIDE, ROOT / "csrc/README.md", ROOT / "benchmarks/README.md"],
    ids=lambda page: page.parent.name,
)
def test_what_a_page_refers_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
