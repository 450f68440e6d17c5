"""Names of tensors: which tensors belong together, and how a message lists names."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

# Some of SGLang's classes (sarashina2_vision.py, minimax_vl_common.py, dots3_common) join these
# tensors within one call of load_weights.  If one is missing, they drop the others, or raise.
JOINED: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
)


def group_of(name: str, together: Sequence[Sequence[str]]) -> int:
    """Returns the number of a tensor's keep-together group, which is the same on every rank.  If
    the tensor is in no group, returns 0.

    All tensors of the listed modules in one parent, weights and scales, are one group.
    """
    for modules in together:
        parent, module, _ = ("", "", *name.rsplit(".", 2))[-3:]
        if module in modules:
            return zlib.crc32(f"{parent}.{modules[0]}".encode()) or 1
    return 0


def key_of(name: str) -> str:
    """A name with every number replaced by `#`."""
    return re.sub(r"\d+", "#", name)


# --- codes and scales that quantised checkpoints have for one weight ----------------------------

# names that come with or instead of MODULE.weight: codes, their scales, and facts about them
_PARTS: Final = re.compile(
    r"weight(_packed|_scale(_inv|_2)?|_zero_point|_shape|_g_idx|_global_scale)?$"
)
# names among these that engines keep, also in fused weights
QUANTISED: Final = re.compile(r"(weight_(packed|scale(_2)?|zero_point|g_idx)|_scale_inv)$")
# weights that are parameters of their own, as several experts in one: NAME, NAME_scale_inv
_SCALE: Final = "_scale_inv"
_SCALES: Final = re.compile(r"(weight_(scale(_2)?|global_scale)|_scale_inv)$")
_CODES: Final = ("float8", "float4", "uint8", "int8")
_OWN_CODES: Final = ("float8_e4m3", "float8_e5m2", "float4")


def is_note(name: str) -> bool:
    """Whether a tensor holds the shape of a packed one (compressed-tensors).  A fused parameter
    keeps the shape that was loaded last; neither SGLang nor vLLM reads it."""
    return name.endswith(".weight_shape")


def weight_of(name: str, dtype: str) -> str:
    """Returns the weight's name if a tensor is codes or scales of a weight, else ""."""
    stem, _, part = name.rpartition(".")
    if not stem:
        return ""
    if _PARTS.match(part):
        return "" if part == "weight" and not dtype.startswith(_CODES) else f"{stem}.weight"
    if part.endswith(_SCALE):
        return name.removesuffix(_SCALE)
    return name if dtype.startswith(_OWN_CODES) else ""


def group_of_parts(name: str, dtype: str) -> int:
    """Returns the keep-together group of one weight's codes and scales.  For other tensors, returns
    0.  The group depends only on the tensor, so ranks that hold different tensors agree."""
    weight = weight_of(name, dtype)
    return group_of_weight(weight) if weight else 0


def group_of_weight(name: str) -> int:
    """Returns the group of all codes and scales of a weight that is in no other group."""
    return zlib.crc32(name.encode()) or 1


def without_scales(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the weights among (name, dtype) that are codes without scales."""
    given = dict(tensors)
    found = [(name, weight) for name, dtype in given.items() if (weight := weight_of(name, dtype))]
    scaled = {weight for name, weight in found if _SCALES.search(name)}
    return [
        name
        for name, weight in found
        if name == weight or name.endswith(".weight_packed")
        if weight not in scaled and f"{weight}_scale" not in given
    ]


# --- messages -----------------------------------------------------------------------------------

FUSED: Final = (".experts.gate_up_proj", ".experts.down_proj")

_LISTED: Final = 5


def listed(names: Iterable[str]) -> str:
    """Lists the first few names in order, and counts the others."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def unfused(names: Iterable[str]) -> str:
    """Returns advice for the end of a message about names that an engine does not know; "" if there
    is none."""
    if any(name.endswith(FUSED) for name in names):
        return "; wsync.fsdp.layout(model) gives fused experts the names that checkpoints have"
    return ""
