"""Names of the tensors that quantised checkpoints have for one weight."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Final

# what stands beside or in place of MODULE.weight: codes, their scales, and facts about them
_PARTS: Final = re.compile(
    r"weight(_packed|_scale(_inv|_2)?|_zero_point|_shape|_g_idx|_global_scale)?$"
)
# those of them that engines keep, in fused weights, too
QUANTISED: Final = re.compile(r"weight_(packed|scale(_inv|_2)?|zero_point|g_idx)$")
_SCALES: Final = re.compile(r"weight_(scale(_inv|_2)?|global_scale)$")
_CODES: Final = ("float8", "float4", "uint8", "int8")


def is_note(name: str) -> bool:
    """Whether a tensor says how many rows and columns a packed one has (compressed-tensors).
    Fused parameters keep that of the last one loaded; neither SGLang nor vLLM reads it."""
    return name.endswith(".weight_shape")


def group_of_parts(name: str, dtype: str) -> int:
    """The keep-together group of the codes and scales of one weight, 0 for other tensors.  It goes
    by the tensor alone: ranks that hold different ones agree."""
    stem, _, part = name.rpartition(".")
    if not stem or not _PARTS.match(part):
        return 0
    if part == "weight" and not dtype.startswith(_CODES):
        return 0
    return zlib.crc32(f"{stem}.weight".encode()) or 1


def without_scales(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Weights of (name, dtype) that are codes, and have no scales among them."""
    found = list(tensors)
    stems = {name.rpartition(".")[0] for name, _ in found if _SCALES.search(name)}
    return [
        name
        for name, dtype in found
        if name.endswith(".weight_packed")
        or (name.endswith(".weight") and dtype.startswith(_CODES))
        if name.rpartition(".")[0] not in stems
    ]
