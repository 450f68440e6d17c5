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
import torch.distributed as dist
import torch.nn.functional as F

from wsync._core import InvalidArgumentError, Layout, LayoutBuilder, LayoutError, UnsupportedError
from wsync.demo.engines.model_worker import check_fit
from wsync.families.blocks import gated, renamed, vocabulary
from wsync.families.registry import read_model
from wsync.families.rules import Cut, Rule, Target
from wsync.layout import contiguous_strides

FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
EXPERTS: Final = ("tp", "ep")
_VOCAB_MULTIPLE: Final = 64


# --- the rules: `*` is cut over all workers, `@` over those whose key and value heads differ ------


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
    yield gated(f"{prefix}gate_up_proj.weight", "ffn", prefix)
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
    """The parameters of worker `rank` of `tp`, and the forward pass over all workers.

    tensors: local parameters by SGLang's names.  boxes: what they hold of the Hugging Face tensors;
    padding belongs to none.  With tp > 1 the forward pass needs a process group of the workers.
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
        _check(config, rank, tp, experts)
        self.config, self.dtype = config, dtype
        self.rank, self.tp, self.experts = rank, tp, experts
        sizes = read_model(config).sizes
        self.head_dim, heads, groups = sizes["d"], sizes["heads"], sizes["g"]
        self.local_heads, self.local_kv_heads = heads // tp, max(1, groups // tp)
        self._sizes = {**sizes, "q": heads * self.head_dim, "kv": groups * self.head_dim}
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

    # --- forward ----------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab] of one prompt; every worker calls it with the same ids."""
        tokens = torch.tensor(list(ids), device="cpu")
        hidden = self._embed(tokens)
        rotation = self._rotation(len(tokens))
        for layer in range(self._sizes["layers"]):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            hidden = hidden + self._attend(normed, prefix + "self_attn.", rotation)
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            mix = self._mix_experts if self._is_sparse(layer) else self._mix
            hidden = hidden + mix(normed, prefix + "mlp.")
        hidden = self._norm(hidden, "model.norm.weight")
        tied = self.config.tie_word_embeddings
        head = self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self._gather(hidden @ head.T)[:, : self._sizes["vocab"]]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.tensors["model.embed_tokens.weight"]
        local = tokens - self.rank * len(table)
        here = (local >= 0) & (local < len(table))
        rows = table[local.clamp(0, len(table) - 1)]
        return self._reduce(rows * here[:, None])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[name]
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, device="cpu").float() / self.head_dim
        frequency = 1.0 / self.config.rope_theta**exponents
        angle = torch.arange(length, device="cpu").float()[:, None] * frequency
        angle = torch.cat([angle, angle], -1)[:, None]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _attend(
        self, x: torch.Tensor, prefix: str, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        length = len(x)
        bias = self.tensors.get(prefix + "qkv_proj.bias")
        fused = F.linear(x, self.tensors[prefix + "qkv_proj.weight"], bias)
        fused = fused.view(length, -1, self.head_dim)
        q, k, v = torch.split(
            fused, [self.local_heads, self.local_kv_heads, self.local_kv_heads], 1
        )
        if prefix + "q_norm.weight" in self.tensors:
            q = self._norm(q, prefix + "q_norm.weight")
            k = self._norm(k, prefix + "k_norm.weight")
        q, k, v = (part.transpose(0, 1) for part in (_rotate(q, rotation), _rotate(k, rotation), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = mixed.transpose(0, 1).reshape(length, -1)
        return self._reduce(mixed @ self.tensors[prefix + "o_proj.weight"].T)

    def _mix(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        fused = x @ self.tensors[prefix + "gate_up_proj.weight"].T
        return self._reduce(_activate(fused) @ self.tensors[prefix + "down_proj.weight"].T)

    def _mix_experts(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.config
        chances = (x @ self.tensors[prefix + "gate.weight"].T).softmax(-1, dtype=torch.float32)
        weights, chosen = chances.topk(int(config.num_experts_per_tok), dim=-1)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(self.dtype)
        w13 = self.tensors[prefix + "experts.w13_weight"]
        w2 = self.tensors[prefix + "experts.w2_weight"]
        total = torch.zeros_like(x)
        first = self.rank * len(w13) if self.experts == "ep" else 0
        for local in range(len(w13)):
            rows, slots = (chosen == first + local).nonzero(as_tuple=True)
            inner = _activate(x[rows] @ w13[local].T) @ w2[local].T
            total.index_add_(0, rows, inner * weights[rows, slots, None])
        return self._reduce(total)

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp > 1:
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.tp)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * rotation[0] + torch.cat([-second, first], -1) * rotation[1]


def _activate(fused: torch.Tensor) -> torch.Tensor:
    gate, up = fused.chunk(2, -1)
    return F.silu(gate) * up


def _check(config: Any, rank: int, tp: int, experts: str) -> None:
    """Refuses what this engine cannot compute or cut, with names and numbers."""
    if config.model_type not in FAMILIES:
        raise UnsupportedError(f"model_type {config.model_type!r}: one of {', '.join(FAMILIES)}")
    if experts not in EXPERTS:
        raise InvalidArgumentError(f"experts {experts!r}: one of {', '.join(EXPERTS)}")
    if not 0 <= rank < tp:
        raise InvalidArgumentError(f"rank {rank} of {tp} workers")
    if getattr(config, "rope_scaling", None) or getattr(config, "use_sliding_window", False):
        raise UnsupportedError("rope_scaling and sliding windows are not computed here")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act {config.hidden_act!r}: only silu")
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        raise UnsupportedError("attention_bias is not computed here")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        raise InvalidArgumentError(f"num_attention_heads {heads} is not a multiple of {tp} workers")
    if groups % tp and tp % groups:
        raise InvalidArgumentError(f"num_key_value_heads {groups} does not fit {tp} workers")
