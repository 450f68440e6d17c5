"""Methods of verl's classes whose modules cannot be imported without a GPU's packages: cut out of
verl's source as they are, and run."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).resolve().parents[2] / "wsync/guide/trainers.md"


def text(path: str) -> str:
    """A file of the installed verl."""
    found = importlib.util.find_spec("verl")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0], path).read_text(encoding="utf-8")


def class_of(path: str, name: str) -> ast.ClassDef:
    """A class of a file."""
    (found,) = (
        node
        for node in ast.parse(text(path)).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return found


def methods_of(path: str, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The methods of a class of a file, by name."""
    return {
        node.name: node
        for node in class_of(path, name).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def borrowed(
    path: str, name: str, wanted: Mapping[str, Mapping[str, str]], **known: Any
) -> dict[str, Any]:
    """Methods of a class, as functions.

    wanted: their names, and for each what is to be replaced in its text, which has to be there
    once.  known: the global names that they use.
    """
    made: dict[str, Any] = {}
    for method, changes in wanted.items():
        node = methods_of(path, name)[method]
        body = ast.unparse(node)
        for old, new in changes.items():
            assert body.count(old) == 1, f"{path}: {method} has no single {old!r}"
            body = body.replace(old, new)
        space = {"__name__": __name__, **known}
        exec(compile("from __future__ import annotations\n" + body, path, "exec"), space)
        made[method] = space[method]
    return made
