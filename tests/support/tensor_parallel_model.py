"""One tensor-parallel worker's share of a dense or MoE decoder, in SGLang's parameter layout.

Parameters are fused and cut the way SGLang keeps them: `qkv_proj` (key and value heads are
replicated where there are more workers than heads), `gate_up_proj`, row-parallel `o_proj` and
`down_proj`, vocabulary-parallel embedding and head padded to a multiple of 64 rows with zeros,
experts `w13_weight` / `w2_weight` cut by column ("tp") or dealt out whole ("ep").  Rules say so,
in the language of wsync.families.rules.

Families: llama, qwen2, qwen3, qwen3_moe.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from wsync._core import Layout, LayoutBuilder, LayoutError
from wsync.boxes import contiguous_strides
from wsync.demo.engines.model_worker import check_fit
from wsync.families.blocks import renamed, vocabulary
from wsync.families.registry import read_model
from wsync.families.rules import Cut, Rule, Target

_VOCAB_MULTIPLE: Final = 64


def _kept(name: str, view: str) -> Rule:
    return renamed(name, view, name)


def _attention(config: Any) -> Iterator[Rule]:
    prefix = "model.layers.{layer}.self_attn."
    kinds = {"weight": " h", "bias": ""} if config.model_type == "qwen2" else {"weight": " h"}
    for kind, width in kinds.items():
        targets = [Target(f"{prefix}{part}_proj.{kind}", part + width) for part in "qkv"]
        yield Rule(f"{prefix}qkv_proj.{kind}", f"(*q | @k:kv | @v:kv){width}", *targets)
    yield _kept(f"{prefix}o_proj.weight", "h *q")
    for part in "qk" if config.model_type.startswith("qwen3") else "":
        yield _kept(f"{prefix}{part}_norm.weight", "d")


def _dense() -> Iterator[Rule]:
    prefix = "model.layers.{layer}.mlp."
    halves = (f"{prefix}{name}_proj.weight {name} h" for name in ("gate", "up"))
    yield renamed(f"{prefix}gate_up_proj.weight", "(*gate:ffn | *up:ffn) h", *halves)
    yield _kept(f"{prefix}down_proj.weight", "h *ffn")


def _sparse(experts: str) -> Iterator[Rule]:
    prefix = "model.layers.{layer}.mlp."
    each = prefix + "experts.{experts}."
    whole, part = ("", "*") if experts == "tp" else ("*", "")
    yield _kept(f"{prefix}gate.weight", "experts h")
    yield Rule(
        f"{prefix}experts.w13_weight",
        f"{whole}experts ({part}gate:moe_ffn | {part}up:moe_ffn) h",
        Target(f"{each}gate_proj.weight", "gate h"),
        Target(f"{each}up_proj.weight", "up h"),
    )
    down = Target(f"{each}down_proj.weight", "h moe_ffn")
    yield Rule(f"{prefix}experts.w2_weight", f"{whole}experts h {part}moe_ffn", down)


class HeldBox(NamedTuple):
    """A box of a Hugging Face tensor, and the part of a parameter that holds it."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    held: torch.Tensor


def box_at(start: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in its whole tensor."""
    return tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))


class ShardedModel(torch.nn.Module):
    """The parameters of worker `rank` of `tp`.

    tensors: local parameters by SGLang's names.  boxes: what they hold of the Hugging Face tensors;
    padding belongs to none.
    """

    def __init__(
        self,
        config: Any,
        *,
        rank: int = 0,
        tp: int = 1,
        experts: str = "tp",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.rank, self.tp, self.experts = rank, tp, experts
        sizes = read_model(config).sizes
        head_dim, heads, groups = sizes["d"], sizes["heads"], sizes["g"]
        self._sizes = {**sizes, "q": heads * head_dim, "kv": groups * head_dim}
        self.tensors: dict[str, torch.Tensor] = {}
        self._layout = self._build()
        self.boxes = list(self._find_boxes())
        generator = torch.Generator().manual_seed(seed + rank)
        for box in self.boxes:  # random values wherever a weight belongs; padding stays zero
            box.held.copy_(torch.randn(box.held.shape, generator=generator, device="cpu") * 0.02)

    def layout(self) -> Layout:
        """This worker's boxes; buffer i is the i-th of `tensors`."""
        return self._layout

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies from whole Hugging Face tensors, as an engine's own loader does."""
        facts = {box.name: (box.shape, self.dtype) for box in self.boxes}
        mine = [(n, t) for n, t in weights if n in facts or not self._elsewhere(n)]
        check_fit(mine, facts, self.config.model_type)
        whole = dict(mine)
        for box in self.boxes:
            if box.name in whole:
                box.held.copy_(whole[box.name][box_at(box.start, box.held.shape)])

    def _elsewhere(self, name: str) -> bool:
        """Whether other workers hold it, or it is the head of a tied model."""
        if name == "lm_head.weight":
            return bool(self.config.tie_word_embeddings)
        return ".mlp.experts." in name and self.experts == "ep"

    def _is_sparse(self, layer: int) -> bool:
        config = self.config
        if config.model_type != "qwen3_moe" or layer in (config.mlp_only_layers or ()):
            return False
        return (layer + 1) % int(config.decoder_sparse_step) == 0

    def _rules(self) -> Iterator[tuple[Rule, dict[str, int]]]:
        """Every parameter's rule, and the numbers in its name."""
        layer = "model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm")
        attention = [_kept(f"{layer}{norm}.weight", "h") for norm in norms]
        attention += _attention(self.config)
        dense, sparse = list(_dense()), list(_sparse(self.experts))
        yield vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight"), {}
        for number in range(self._sizes["layers"]):
            for rule in (*attention, *(sparse if self._is_sparse(number) else dense)):
                yield rule, {"layer": number}
        yield _kept("model.norm.weight", "h"), {}
        if not self.config.tie_word_embeddings:
            yield vocabulary("lm_head.weight", "lm_head.weight"), {}

    def _build(self) -> Layout:
        """Makes the parameters, of zeros; returns their layout."""
        builder = LayoutBuilder()
        dtype = str(self.dtype).removeprefix("torch.")
        padding = -self._sizes["vocab"] % _VOCAB_MULTIPLE
        ranks = min(self.tp, self._sizes["g"])
        cuts = Cut(self.rank, self.tp), Cut(self.rank * ranks // self.tp, ranks)
        for rule, numbers in self._rules():
            name = rule.name.format(**numbers)
            expansion = rule.expand(self._sizes, padding)
            try:
                placement = expansion.place(*cuts)
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from None
            maps = expansion.maps(placement, numbers)
            strides = contiguous_strides(placement.shape)
            builder.add_parameter(name, len(self.tensors), dtype, strides, placement.regions, maps)
            self.tensors[name] = torch.zeros(placement.shape, dtype=self.dtype, device="cpu")
        return builder.build()

    def _find_boxes(self) -> Iterator[HeldBox]:
        parameters, size = list(self.tensors.values()), self.dtype.itemsize
        for index in range(self._layout.tensor_count):
            name, _, shape, _ = self._layout.tensor(index)
            for shard in self._layout.shards(index):
                strides = [stride // size for stride in shard.strides]
                held = parameters[shard.buffer].as_strided(
                    shard.extent, strides, shard.offset // size
                )
                yield HeldBox(name, shape, shard.start, held)
