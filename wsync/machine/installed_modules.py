"""Which modules Python finds."""

import importlib.util


def importable(module: str) -> bool:
    """Whether `module` is installed; a bare folder, as `pip uninstall` may leave, is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its parent, or one that says nothing of itself
        return False
    return spec is not None and spec.origin is not None
