"""Where benchmarks find an engine's own Python files."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.environment import Skipped, missing

SGLANG = "0.5.17"
TESTS = Path(__file__).parent.parent / "tests"


def sglang_path(version: str = SGLANG) -> tuple[str, str]:
    """The folders of SGLang and of what it imports, fetched as the tests fetch them.

    Raises Skipped with the reason where they cannot be had.
    """
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    try:
        from support.engines import find_packages, find_tree
    except ModuleNotFoundError as error:
        raise missing(error) from error

    tree, reason = find_tree("sglang", version)
    packages, other = find_packages()
    if tree is None or packages is None:
        raise Skipped(f"SGLang {version}: {reason or other}")
    return str(tree), str(packages)
