"""Sends experts that a checkpoint has in one tensor to stock engines one by one.

Such a tensor of Qwen3.5-MoE has 1 GB in 35B-A3B and 8.6 GB in 397B-A17B.  SGLang's classes (0.5.11
to 0.5.23, qwen3_5.py) take both kinds of names, `experts.gate_up_proj` and
`experts.{e}.gate_proj.weight`.  But one fused name changes how SGLang reads all other names in that
load_weights call.  So wsync uses one kind of name for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from wsync import _core
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import FUSED

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # start and extent

_GATE_UP: Final = "gate_up_proj"
_KINDS: Final = {name.rpartition(".")[2] for name in FUSED}


def single_experts(model: _core.Layout, most: int) -> Mapping[int, Sequence[Box]]:
    """The boxes of all experts' projections, by fused tensor.

    This is empty if no fused tensor has more than `most` bytes, or if some have another form: with
    biases or scales, or transposed (gpt-oss, Qwen3-VL-MoE).
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
        both, down = (model.tensor(kinds[kind]) for kind in (_GATE_UP, "down_proj"))
        experts, rows, hidden = (*both.shape, 0, 0, 0)[:3]
        if down.shape != (experts, hidden, rows // 2) or rows % 2 or len(both.shape) != 3:
            return {}
        found[kinds[_GATE_UP]] = list(_boxes(both.name, both.shape))
        found[kinds["down_proj"]] = list(_boxes(down.name, down.shape))
        largest = max(largest, math.prod(both.shape) * dtype_of(both.dtype).itemsize)
    return found if largest > most else {}


def _boxes(fused: str, shape: Sequence[int]) -> Iterator[Box]:
    """The projections of all experts in a fused tensor."""
    experts, rows, columns = shape
    halves = 2 if fused.endswith(_GATE_UP) else 1
    step = rows // halves
    for expert in range(experts):
        for half in range(halves):
            yield (expert, half * step, 0), (1, step, columns)


def single_shapes(fused: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the projections of all experts in a fused tensor, by their names."""
    return {name_of(fused, start): extent[1:] for start, extent in _boxes(fused, shape)}


def name_of(fused: str, start: Sequence[int]) -> str:
    """The name of the expert's projection whose box in a fused tensor starts at `start`."""
    parent, _, kind = fused.rpartition(".")
    if kind == _GATE_UP:
        kind = "up_proj" if start[1] else "gate_proj"
    return f"{parent}.{start[0]}.{kind}.weight"
