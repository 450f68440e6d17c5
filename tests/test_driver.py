"""One suite for the CUDA driver and for what plays it: what wsync takes it to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import driver_cases, fakecuda
from support.procs import Ranks


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("case", "count"),
    [
        (driver_cases.pointers, 1),
        (driver_cases.streams, 1),
        (driver_cases.mappings, 1),
        (driver_cases.processes, 2),
    ],
)
def test_the_driver_does_what_is_documented(
    case: Callable[[], dict[str, Any]], count: int, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real:
        monkeypatch.delenv("WSYNC_CUDA_LIB", raising=False)
    else:
        monkeypatch.setenv("WSYNC_CUDA_LIB", fakecuda.fake_driver())
    with Ranks(count, path=sys.path) as ranks:
        assert ranks.run(case, timeout=60) == [{}] * count
