"""What SGLang needs of DeepGEMM to pack scales for it: its layout function is SGLang's own copy."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def align(value: int, to: int) -> int:
    return -(-value // to) * to


def modules(pack: Callable[..., Any] | None = None) -> dict[str, ModuleType]:
    """For sys.modules.  pack: the layout function."""
    package, utils = ModuleType("deep_gemm"), ModuleType("deep_gemm.utils")
    layout = ModuleType("deep_gemm.utils.layout")
    vars(package)["utils"] = utils
    vars(utils).update(
        layout=layout, align=align, get_tma_aligned_size=lambda rows, size: align(rows, 16 // size)
    )
    vars(layout)["get_mn_major_tma_aligned_packed_ue8m0_tensor"] = pack
    return {module.__name__: module for module in (package, utils, layout)}
