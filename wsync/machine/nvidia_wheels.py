"""Shared libraries in pip packages."""

import importlib.util
from pathlib import Path


def bundled(pattern: str) -> list[str]:
    """Returns files of the packages `nvidia/...` that match a glob, the last names first."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = (path for folder in folders for path in Path(folder).glob(pattern))
    return [str(path) for path in sorted(found, key=lambda path: path.name, reverse=True)]


def nccl_libraries() -> list[str]:
    """Returns where pip's packages have NCCL, which is tried besides the system's folders."""
    return bundled("nccl/lib/libnccl.so.*")
