"""A layer's experts that are one tensor of a checkpoint, and one by one to a stock engine.

Such a tensor of Qwen3.5-MoE has 1 GB in 35B-A3B and 8.6 GB in 397B-A17B.  SGLang's classes (0.5.11
to 0.5.23, qwen3_5.py) take both spellings, `experts.gate_up_proj` and
`experts.{e}.gate_proj.weight`, but a fused name changes how the rest of its call is read.  So all
layers have one spelling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from wsync import _core
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import FUSED

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # start and extent

_KINDS: Final = {name.rpartition(".")[2] for name in FUSED}
_SINGLE: Final = re.compile(r"(.*\.experts\.)\d+\.(?:(gate|up)|down)_proj\.weight")


def single_experts(model: _core.Layout, most: int) -> Mapping[int, Sequence[Box]]:
    """By tensor: a box for each projection of each expert; nothing where no fused tensor has more
    than `most` bytes, or some are of another form.

    Another form: with biases or scales, or transposed, as those of gpt-oss and Qwen3-VL-MoE are.
    """
    layers: dict[str, dict[str, int]] = {}
    for index, name in enumerate(model.names()):
        parent, _, kind = name.rpartition(".")
        if parent.endswith(".mlp.experts"):
            layers.setdefault(parent, {})[kind] = index
    found: dict[int, Sequence[Box]] = {}
    largest = 0
    for kinds in layers.values():
        if kinds.keys() != _KINDS:
            return {}
        both, down = (model.tensor(kinds[kind]) for kind in ("gate_up_proj", "down_proj"))
        experts, rows, hidden = (*both.shape, 0, 0, 0)[:3]
        if down.shape != (experts, hidden, rows // 2) or rows % 2 or len(both.shape) != 3:
            return {}
        half = (1, rows // 2, hidden)
        found[kinds["gate_up_proj"]] = [
            ((expert, first, 0), half) for expert in range(experts) for first in (0, rows // 2)
        ]
        one = (1, *down.shape[1:])
        found[kinds["down_proj"]] = [((expert, 0, 0), one) for expert in range(experts)]
        largest = max(largest, math.prod(both.shape) * dtype_of(both.dtype).itemsize)
    return found if largest > most else {}


def name_of(fused: str, start: Sequence[int]) -> str:
    """The name of a projection of one expert, whose box of a fused tensor starts there."""
    parent, _, kind = fused.rpartition(".")
    if kind == "gate_up_proj":
        kind = "up_proj" if start[1] else "gate_proj"
    return f"{parent}.{start[0]}.{kind}.weight"


def fused_of(name: str) -> str:
    """The name of the fused tensor that a projection of one expert lies in; "" for other names."""
    found = _SINGLE.fullmatch(name)
    return f"{found[1]}{'gate_up' if found[2] else 'down'}_proj" if found else ""
