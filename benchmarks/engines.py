"""Where benchmarks find an engine's own Python files, and what plays GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


def played(*, devices: int = 1) -> dict[str, str]:
    """Settings of GPUs that are played, read the host's memory and take no time of their own.

    Raises Skipped where the stand-in for the driver cannot be built.
    """
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    try:
        from support import fakecuda

        settings: dict[str, Any] = fakecuda.coherent(devices=devices)
    except ModuleNotFoundError as error:
        raise missing(error) from error
    except BaseException as reason:  # pytest's way to skip
        if type(reason).__name__ != "Skipped":
            raise
        raise Skipped(str(reason)) from None
    return {**settings, "WSYNC_FAKE_CUDA_DELAY_US": "0"}
