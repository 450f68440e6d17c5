"""Where a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from wsync import _core


class Skipped(Exception):
    """A benchmark that this machine cannot run; the text says why."""


def check_memory(what: str, nbytes: int) -> None:
    """Raises Skipped where less memory is left than `what` needs: the kernel would kill others."""
    available = _core.host().memory_available()
    if available < nbytes:
        raise Skipped(
            f"{what} needs about {nbytes:,} bytes of memory, and {available:,} are available"
        )


def missing(error: ModuleNotFoundError) -> Skipped:
    """Says what is not installed."""
    return Skipped(f"{error.name} is not installed: pip install '.[test]'")


def environment() -> dict[str, Any]:
    """Machine, versions and git hash, as every JSON line carries them."""
    versions = {}
    for package in ("wsync", "torch", "sglang", "megatron-core", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "git": _git_hash(),
        **versions,
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _git_hash() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            cwd=os.path.dirname(os.path.abspath(__file__)),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
