"""Moves freshly trained weights from sharded trainers into running inference engines.

Each name is imported when it is first used, so `import wsync` needs neither torch nor numpy.
The stub __init__.pyi lists the names and the modules that define them.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("wsync._core") is None:
    raise ImportError(
        f"{__path__[0]} is a source folder without the compiled module wsync._core, and hides an "
        "installed wsync: run Python in another folder, or with -P. Ray's workers import from "
        "the folder that their driver was started in: start the driver in another folder. "
        "`pip install .` installs this source.",
        name="wsync",
    )

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
