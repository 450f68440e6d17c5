#!/usr/bin/env python3
"""tree.py ROOT: habits that no other tool checks, over the files git tracks."""

import ast
import hashlib
import re
import subprocess
import sys
from pathlib import Path

TOP_LEVEL = {
    "pyproject.toml",
    "CMakeLists.txt",
    "csrc",
    "wsync",
    "tests",
    "benchmarks",
    "README.md",
}
MAX_FUNCTION_LINES = 60
MAX_README_LINES = 130
MAX_GUIDE_LINES = 560  # wsync/README.md and wsync/guide together
SPDX = "/* SPDX-License-Identifier: Apache-2.0"
README_COMMANDS = ("pip install '.[demo]' && wsync demo", "pip install '.[test]' && pytest")


def long_functions(path: Path) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def check_file(root: Path, name: str) -> list[str]:
    path = root / name
    text = path.read_text(encoding="utf-8", errors="replace")
    wrong = []
    if not text.isascii():
        wrong.append(f"{name}: not ASCII")
    if path.suffix in (".c", ".h") and not text.startswith(SPDX):
        wrong.append(f"{name}: does not start with {SPDX!r}")
    if path.suffix == ".py":
        wrong += long_functions(path)
    if text and not text.endswith("\n"):
        wrong.append(f"{name}: no newline at the end")
    if re.search(r"[ \t]+$", text, re.MULTILINE):
        wrong.append(f"{name}: spaces at the end of a line")
    return wrong


def check_vendored(root: Path) -> list[str]:
    """Every vendored file is the one its ORIGIN names by sha256."""
    wrong = []
    for path in sorted((root / "csrc/third_party").rglob("*.h")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest not in (path.parent / "ORIGIN").read_text():
            wrong.append(f"{path}: sha256 {digest} is not in its ORIGIN")
    return wrong


def main() -> int:
    root = Path(sys.argv[1])
    done = subprocess.run(
        ["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    names = [name for name in done.stdout.split("\0") if name]
    own = [name for name in names if not name.startswith(("csrc/third_party/", "tests/c/corpus/"))]
    wrong = [complaint for name in own for complaint in check_file(root, name)]
    wrong += check_vendored(root)
    wrong += [f"{name}: tests are no package" for name in names if name == "tests/__init__.py"]
    top = {name.split("/")[0] for name in names if not name.startswith(".")}
    wrong += [f"{name}: not among the top level's names" for name in sorted(top - TOP_LEVEL)]
    readme = (root / "README.md").read_text()
    if readme.count("\n") > MAX_README_LINES:
        wrong.append(f"README.md: more than {MAX_README_LINES} lines")
    guide = [name for name in names if name.startswith(("wsync/README.md", "wsync/guide/"))]
    if sum((root / name).read_text().count("\n") for name in guide) > MAX_GUIDE_LINES:
        wrong.append(f"wsync/guide: more than {MAX_GUIDE_LINES} lines")
    wrong += [f"README.md: no `{command}`" for command in README_COMMANDS if command not in readme]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"checked: {len(own)} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
