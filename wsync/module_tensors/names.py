"""Names of tensors: which belong together, and how a message lists them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
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


# --- codes and scales, which quantised checkpoints have for one weight --------------------------

# what stands beside or in place of MODULE.weight: codes, their scales, and facts about them
_PARTS: Final = re.compile(
    r"weight(_packed|_scale(_inv|_2)?|_zero_point|_shape|_g_idx|_global_scale)?$"
)
# those of them that engines keep, in fused weights, too
QUANTISED: Final = re.compile(r"(weight_(packed|scale(_2)?|zero_point|g_idx)|_scale_inv)$")
# of weights that are parameters of their own, as many experts in one: NAME, NAME_scale_inv
_SCALE: Final = "_scale_inv"
_SCALES: Final = re.compile(r"(weight_(scale(_2)?|global_scale)|_scale_inv)$")
_CODES: Final = ("float8", "float4", "uint8", "int8")
_OWN_CODES: Final = ("float8_e4m3", "float8_e5m2", "float4")


def is_note(name: str) -> bool:
    """Whether a tensor says how many rows and columns a packed one has (compressed-tensors).
    Fused parameters keep that of the last one loaded; neither SGLang nor vLLM reads it."""
    return name.endswith(".weight_shape")


def weight_of(name: str, dtype: str) -> str:
    """The name of the weight that a tensor is codes or scales of, "" for other tensors."""
    stem, _, part = name.rpartition(".")
    if not stem:
        return ""
    if _PARTS.match(part):
        return "" if part == "weight" and not dtype.startswith(_CODES) else f"{stem}.weight"
    if part.endswith(_SCALE):
        return name.removesuffix(_SCALE)
    return name if dtype.startswith(_OWN_CODES) else ""


def group_of_parts(name: str, dtype: str) -> int:
    """The keep-together group of the codes and scales of one weight, 0 for other tensors.  It goes
    by the tensor alone: ranks that hold different ones agree."""
    weight = weight_of(name, dtype)
    return group_of_weight(weight) if weight else 0


def group_of_weight(name: str) -> int:
    """The group of all that a weight becomes which is in no other."""
    return zlib.crc32(name.encode()) or 1


def without_scales(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Weights of (name, dtype) that are codes, and have no scales among them."""
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
    """The first few names in order, and how many more."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def unfused(names: Iterable[str]) -> str:
    """What helps where an engine does not know some names, as the end of a message; or ""."""
    if any(name.endswith(FUSED) for name in names):
        return "; wsync.fsdp.layout(model) gives fused experts the names that checkpoints have"
    return ""
