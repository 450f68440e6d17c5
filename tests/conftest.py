"""What every test shares.

The tests are about the installed package.  Child processes run with PYTHONSAFEPATH, so that a
`python -m ...` started in the repository root does not find the source folder either.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PYTHONSAFEPATH"] = "1"

import pytest

import wsync

_ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    origin = Path(wsync.__file__).resolve()
    if origin.is_relative_to(_ROOT / "wsync"):
        raise pytest.UsageError(
            f"wsync was imported from its source folder ({origin}), but the tests are about the "
            "installed package: `pip install '.[test]'`, then run `pytest` or `python -P -m pytest`"
        )


def _device_count() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more CUDA devices than there are, with the numbers."""
    needs = {"gpu": 1, "multigpu": 2}
    wanted = [
        (item, need)
        for item in items
        for mark, need in needs.items()
        if item.get_closest_marker(mark)
    ]
    if not wanted:
        return
    count = _device_count()
    for item, need in wanted:
        if count < need:
            reason = f"needs {need} CUDA device(s), this machine has {count}"
            item.add_marker(pytest.mark.skip(reason=reason))
