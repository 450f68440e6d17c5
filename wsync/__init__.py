"""Moves freshly trained weights from sharded trainers into running inference engines.

Names are imported when they are first used, so that `import wsync` needs neither torch nor numpy.
The stub beside this file says which there are, and where each is defined.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wsync' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = import_module(f"wsync.{name}") if _HOMES[name] == "wsync" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
