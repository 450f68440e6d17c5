"""Moves freshly trained weights from sharded trainers into running inference engines.

Names are imported when they are first used, so that `import wsync` needs neither torch nor numpy.
The stub beside this file says which there are, and where each is defined.
"""

from importlib import import_module
from typing import Any

with open(f"{__file__}i", encoding="ascii") as _stub:  # "from HOME import NAME as NAME"
    _HOMES = {line.split()[3]: line.split()[1] for line in _stub if line.startswith("from ")}

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
