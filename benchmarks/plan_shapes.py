"""Who holds what in two large trainers, and what their engines keep.

Shapes are those of the published configurations (`config.json` of Qwen/Qwen3-30B-A3B and
moonshotai/Kimi-K2-Instruct), cuts those of Megatron-Core and SGLang.  A shard is described as
the trainer or the engine would; no weight exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from wsync import _core

DTYPE = "bfloat16"
ITEM_NBYTES = 2
WHOLE, ROWS, COLUMNS, EXPERT = "whole", "rows", "columns", "expert"


@dataclass(frozen=True)
class Weight:
    """A tensor, its layer (-1: before all, `layers`: after all), and how ranks share it."""

    name: str
    shape: tuple[int, ...]
    layer: int
    cut: str
    expert: int = 0
    group: int = 0


@dataclass(frozen=True)
class Trainer:
    """Megatron's order of ranks: tp fastest, then dp, then pp; ep spans tp and dp."""

    tp: int
    pp: int
    ep: int
    ranks: int

    def holders(self, weight: Weight, layers: int, experts: int) -> Iterator[tuple[int, int, int]]:
        """(rank, part, parts) of all ranks that hold something of a weight."""
        per_stage = self.ranks // self.pp
        layers_per_stage = -(-layers // self.pp)
        first = min(max(weight.layer, 0) // layers_per_stage, self.pp - 1) * per_stage
        for rank in range(per_stage):
            if weight.cut == EXPERT:
                if rank % self.ep == weight.expert // (experts // self.ep):
                    yield first + rank, 0, 1
            elif weight.cut == WHOLE:
                yield first + rank, 0, 1
            else:
                yield first + rank, rank % self.tp, self.tp


@dataclass(frozen=True)
class Engine:
    """Workers that cut dense layers by tp, and experts by ep, or by tp where ep is 1."""

    tp: int
    ep: int

    def part(self, weight: Weight, worker: int, experts: int) -> tuple[int, int] | None:
        """(part, parts) of a weight that a worker keeps; None if nothing."""
        if weight.cut == WHOLE:
            return 0, 1
        if weight.cut != EXPERT:
            return worker, self.tp
        if weight.expert // (experts // self.ep) != worker // (self.tp // self.ep):
            return None
        return worker % (self.tp // self.ep), self.tp // self.ep


def qwen3_moe(
    layers: int = 48, experts: int = 128, hidden: int = 2048, vocab: int = 151936
) -> list[Weight]:
    """Qwen3-30B-A3B: 18,867 tensors."""
    heads, groups, channels, inner = 32, 4, 128, 768
    made = [Weight("model.embed_tokens.weight", (vocab, hidden), -1, ROWS)]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        made += [
            Weight(f"{at}input_layernorm.weight", (hidden,), layer, WHOLE),
            Weight(f"{at}self_attn.q_proj.weight", (heads * channels, hidden), layer, ROWS),
            Weight(f"{at}self_attn.k_proj.weight", (groups * channels, hidden), layer, ROWS),
            Weight(f"{at}self_attn.v_proj.weight", (groups * channels, hidden), layer, ROWS),
            Weight(f"{at}self_attn.o_proj.weight", (hidden, heads * channels), layer, COLUMNS),
            Weight(f"{at}self_attn.q_norm.weight", (channels,), layer, WHOLE),
            Weight(f"{at}self_attn.k_norm.weight", (channels,), layer, WHOLE),
            Weight(f"{at}post_attention_layernorm.weight", (hidden,), layer, WHOLE),
            Weight(f"{at}mlp.gate.weight", (experts, hidden), layer, WHOLE),
            *_experts(at, layer, experts, hidden, inner),
        ]
    return [
        *made,
        Weight("model.norm.weight", (hidden,), layers, WHOLE),
        Weight("lm_head.weight", (vocab, hidden), layers, ROWS),
    ]


def kimi_k2(
    layers: int = 61, experts: int = 384, hidden: int = 7168, inner: int = 2048
) -> list[Weight]:
    """Kimi-K2: multi-head latent attention, one dense layer, one shared expert."""
    heads, nope, rope, value, q_rank, kv_rank = 64, 128, 64, 128, 1536, 512
    made = [Weight("model.embed_tokens.weight", (163840, hidden), -1, ROWS)]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        attention = f"{at}self_attn."
        made += [
            Weight(f"{at}input_layernorm.weight", (hidden,), layer, WHOLE),
            Weight(f"{attention}q_a_proj.weight", (q_rank, hidden), layer, WHOLE, group=layer + 1),
            Weight(
                f"{attention}kv_a_proj_with_mqa.weight",
                (kv_rank + rope, hidden),
                layer,
                WHOLE,
                group=layer + 1,
            ),
            Weight(f"{attention}q_a_layernorm.weight", (q_rank,), layer, WHOLE),
            Weight(f"{attention}kv_a_layernorm.weight", (kv_rank,), layer, WHOLE),
            Weight(f"{attention}q_b_proj.weight", (heads * (nope + rope), q_rank), layer, ROWS),
            Weight(f"{attention}kv_b_proj.weight", (heads * (nope + value), kv_rank), layer, ROWS),
            Weight(f"{attention}o_proj.weight", (hidden, heads * value), layer, COLUMNS),
            Weight(f"{at}post_attention_layernorm.weight", (hidden,), layer, WHOLE),
        ]
        if layer == 0:
            made += _gated(f"{at}mlp.", layer, hidden, 18432)
            continue
        made += [
            Weight(f"{at}mlp.gate.weight", (experts, hidden), layer, WHOLE),
            Weight(f"{at}mlp.gate.e_score_correction_bias", (experts,), layer, WHOLE),
            *_gated(f"{at}mlp.shared_experts.", layer, hidden, inner),
            *_experts(at, layer, experts, hidden, inner),
        ]
    return [
        *made,
        Weight("model.norm.weight", (hidden,), layers, WHOLE),
        Weight("lm_head.weight", (163840, hidden), layers, ROWS),
    ]


def _gated(at: str, layer: int, hidden: int, inner: int) -> list[Weight]:
    return [
        Weight(f"{at}gate_proj.weight", (inner, hidden), layer, ROWS),
        Weight(f"{at}up_proj.weight", (inner, hidden), layer, ROWS),
        Weight(f"{at}down_proj.weight", (hidden, inner), layer, COLUMNS),
    ]


def _experts(at: str, layer: int, experts: int, hidden: int, inner: int) -> Iterator[Weight]:
    for expert in range(experts):
        for name in ("gate", "up", "down"):
            shape = (hidden, inner) if name == "down" else (inner, hidden)
            path = f"{at}mlp.experts.{expert}.{name}_proj.weight"
            yield Weight(path, shape, layer, EXPERT, expert)


def cut(weight: Weight, part: int, parts: int) -> tuple[list[int], list[int]]:
    """Start and extent of one of equal parts: along columns where a layer's input is split."""
    down = weight.cut == COLUMNS or (weight.cut == EXPERT and "down_proj" in weight.name)
    start, extent = [0] * len(weight.shape), list(weight.shape)
    if parts > 1:
        extent[down] //= parts
        start[down] = part * extent[down]
    return start, extent


def add(builder: _core.LayoutBuilder, weight: Weight, part: int, parts: int, buffer: int) -> int:
    """Adds a part, contiguous in a buffer of its own; returns its bytes."""
    start, extent = cut(weight, part, parts)
    strides = [ITEM_NBYTES] * len(extent)
    if len(extent) == 2:
        strides[0] *= extent[1]
    builder.add_shard(
        weight.name, DTYPE, weight.shape, start, extent, buffer, 0, strides, "", weight.group
    )
    return math.prod(extent) * ITEM_NBYTES


def trainer_layouts(weights: list[Weight], trainer: Trainer) -> list[_core.Layout]:
    """What every rank describes of its own."""
    layers = max(weight.layer for weight in weights)
    experts = max(weight.expert for weight in weights) + 1
    builders = [_core.LayoutBuilder(rank) for rank in range(trainer.ranks)]
    buffers = [0] * trainer.ranks
    for weight in weights:
        for rank, part, parts in trainer.holders(weight, layers, experts):
            add(builders[rank], weight, part, parts, buffers[rank])
            buffers[rank] += 1
    return [builder.build() for builder in builders]


def engine_layouts(weights: list[Weight], engine: Engine) -> tuple[list[_core.Layout], list[int]]:
    """What every worker of an engine keeps, and how many bytes that is."""
    experts = max(weight.expert for weight in weights) + 1
    layouts, sizes = [], []
    for worker in range(engine.tp):
        builder, nbytes = _core.LayoutBuilder(), 0
        for buffer, weight in enumerate(weights):
            part = engine.part(weight, worker, experts)
            if part is not None:
                nbytes += add(builder, weight, *part, buffer)
        layouts.append(builder.build())
        sizes.append(nbytes)
    return layouts, sizes


def local_nbytes(weights: list[Weight], trainer: Trainer, engine: Engine | None) -> int:
    """Bytes that workers, number r on rank r, find on their own rank; engine None: they keep all.

    Counted from the shapes alone: a shard and what is kept of its tensor are cut along one axis.
    """
    layers = max(weight.layer for weight in weights)
    experts = max(weight.expert for weight in weights) + 1
    total = 0
    for weight in weights:
        nbytes = math.prod(weight.shape) * ITEM_NBYTES
        for rank, part, parts in trainer.holders(weight, layers, experts):
            keeps = (0, 1) if engine is None else engine.part(weight, rank % engine.tp, experts)
            if keeps is not None:
                first = max(part * keeps[1], keeps[0] * parts)
                last = min((part + 1) * keeps[1], (keeps[0] + 1) * parts)
                total += nbytes * max(last - first, 0) // (parts * keeps[1])
    return total
