"""Shared libraries that pip packages bring."""

import importlib.util
from pathlib import Path


def bundled(pattern: str) -> list[str]:
    """Files of the packages `nvidia/...` that a glob names, newest first by their names."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = (path for folder in folders for path in Path(folder).glob(pattern))
    return [str(path) for path in sorted(found, key=lambda path: path.name, reverse=True)]


def nccl_libraries() -> list[str]:
    """Where NCCL may lie beside the system's folders."""
    return bundled("nccl/lib/libnccl.so.*")
