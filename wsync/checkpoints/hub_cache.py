"""Models of the Hugging Face hub in this host's cache."""

from __future__ import annotations

import os


def folder_of(name: str, revision: str | None = None) -> str:
    """The folder of a model, by its path or its name on the hub ("Qwen/Qwen3-0.6B").  Returns "" if
    this host does not have it: nothing is downloaded."""
    if os.path.isabs(name) or os.path.isdir(name):
        return os.path.abspath(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):  # the name is not valid
        return ""
    return os.path.dirname(found) if isinstance(found, str) else ""
