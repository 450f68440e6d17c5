"""slime, as far as wsync.slime.install asks for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ACTOR = "slime.backends.megatron_utils.actor"


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has `import slime.backends.megatron_utils.actor` find a stand-in, fresh, and returns it."""
    parts = ACTOR.split(".")
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    file = Path(__file__).with_name("slime_actor.py")
    spec = importlib.util.spec_from_file_location(ACTOR, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, ACTOR, made)
    spec.loader.exec_module(made)
    return made
