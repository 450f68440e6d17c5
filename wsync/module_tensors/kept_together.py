"""Which tensors of a model have to come to an engine in one bucket, by their names."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

# Some of SGLang's classes (sarashina2_vision.py, minimax_vl_common.py, dots3_common) join these
# within one call of load_weights, and drop what comes without the others, or raise.
JOINED: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
)


def group_of(name: str, together: Sequence[Sequence[str]]) -> int:
    """The keep-together group of a tensor, 0 for none: the same number on every rank.

    The tensors of some modules in one parent, weights, scales and all, are one group.
    """
    for modules in together:
        parent, module, _ = ("", "", *name.rsplit(".", 2))[-3:]
        if module in modules:
            return zlib.crc32(f"{parent}.{modules[0]}".encode()) or 1
    return 0
