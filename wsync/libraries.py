"""Shared libraries that pip packages bring."""

import importlib.util
from pathlib import Path


def bundled(pattern: str) -> list[str]:
    """Files of the packages `nvidia/...` that a glob names, newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = (str(path) for folder in folders for path in Path(folder).glob(pattern))
    return sorted(found, reverse=True)
