"""Models of the Hugging Face hub that lie in this host's cache."""

from __future__ import annotations

import os


def folder_of(name: str, revision: str | None = None) -> str:
    """The folder of a model by its path or its name on the hub ("Qwen/Qwen3-0.6B"); "" where that
    is not here.  Nothing is downloaded."""
    if os.path.isabs(name) or os.path.isdir(name):
        return os.path.abspath(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):  # it is no name
        return ""
    return os.path.dirname(found) if isinstance(found, str) else ""
