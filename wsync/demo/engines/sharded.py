"""One tensor-parallel worker's share of a dense or MoE decoder, in SGLang's parameter layout.

Parameters are fused and cut the way SGLang keeps them: `qkv_proj` (key and value heads are
replicated where there are more workers than heads), `gate_up_proj`, row-parallel `o_proj` and
`down_proj`, vocabulary-parallel embedding and head padded to a multiple of 64 rows with zeros,
experts `w13_weight` / `w2_weight` cut by column ("tp") or dealt out whole ("ep").

Families: llama, qwen2, qwen3, qwen3_moe.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from wsync._core import InvalidArgumentError, Layout, LayoutBuilder, UnsupportedError
from wsync.demo.engines.worker import check_fit

FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
EXPERTS: Final = ("tp", "ep")
_VOCAB_MULTIPLE: Final = 64


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """A box of a Hugging Face tensor and where it lies in a parameter: `local` is the first
    index of the box there, with the box's axes last."""

    parameter: str
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of the whole model, and this worker's place in it."""

    config: Any
    rank: int
    tp: int
    experts: str

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        given = getattr(self.config, "head_dim", None)
        return int(given or self.config.hidden_size // self.heads)

    @property
    def local_heads(self) -> int:
        return self.heads // self.tp

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.kv_heads // self.tp

    @property
    def vocab_rows(self) -> int:
        padded = -(-int(self.config.vocab_size) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if padded % self.tp:
            raise InvalidArgumentError(f"padded vocabulary of {padded} rows, {self.tp} workers")
        return padded // self.tp

    @property
    def expert_range(self) -> range:
        count = int(self.config.num_experts)
        if self.experts == "tp":
            return range(count)
        return range(self.rank * count // self.tp, (self.rank + 1) * count // self.tp)

    def sparse(self, layer: int) -> bool:
        if self.config.model_type != "qwen3_moe" or layer in (self.config.mlp_only_layers or ()):
            return False
        return (layer + 1) % int(self.config.decoder_sparse_step) == 0


class ShardedModel(torch.nn.Module):
    """The parameters of worker `rank` of `tp`, and the forward pass over all workers.

    tensors: local parameters by SGLang's names.  pieces: which boxes of which Hugging Face
    tensors they hold.  group: gloo group of the tp workers (None: no forward with tp > 1).
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
        self.config = config
        self.dtype = dtype
        self.sizes = _Sizes(config, rank, tp, experts)
        _check(self.sizes)
        self.tensors: dict[str, torch.Tensor] = {}
        self.pieces: list[ModelPiece] = []
        self._by_name: dict[str, list[ModelPiece]] = {}
        self._build()
        self._draw(seed)

    # --- parameters -------------------------------------------------------------------------

    def layout(self) -> Layout:
        """This worker's boxes; buffer i is the i-th of `tensors`.  Padding is no part of it."""
        builder = LayoutBuilder()
        buffers = {name: index for index, name in enumerate(self.tensors)}
        dtype = str(self.dtype).removeprefix("torch.")
        for piece in self.pieces:
            tensor = self.tensors[piece.parameter]
            size = tensor.element_size()
            strides = [stride * size for stride in tensor.stride()]
            offset = sum(a * b for a, b in zip(piece.local, strides, strict=True))
            builder.add_shard(
                piece.name,
                dtype,
                piece.shape,
                piece.start,
                piece.extent,
                buffers[piece.parameter],
                offset,
                strides[len(strides) - len(piece.extent) :],
                origin=piece.parameter,
            )
        return builder.build()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies from whole Hugging Face tensors, as an engine's own loader does."""
        mine = [(n, t) for n, t in weights if n in self._by_name or not self._elsewhere(n)]
        facts = {name: (pieces[0].shape, self.dtype) for name, pieces in self._by_name.items()}
        check_fit(mine, facts, self.config.model_type)
        for name, tensor in mine:
            for piece in self._by_name[name]:
                box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent, strict=True))
                self.box(piece).copy_(tensor[box])

    def box(self, piece: ModelPiece) -> torch.Tensor:
        """The part of a parameter that holds a piece."""
        tensor = self.tensors[piece.parameter]
        outer = len(piece.local) - len(piece.extent)
        for index in piece.local[:outer]:
            tensor = tensor[index]
        for axis, (start, count) in enumerate(zip(piece.local[outer:], piece.extent, strict=True)):
            tensor = tensor.narrow(axis, start, count)
        return tensor

    def _elsewhere(self, name: str) -> bool:
        """Whether other workers hold it, or it is the head of a tied model."""
        if name == "lm_head.weight":
            return bool(self.config.tie_word_embeddings)
        return ".mlp.experts." in name and self.sizes.experts == "ep"

    def _build(self) -> None:
        sizes, config = self.sizes, self.config
        hidden, depth = int(config.hidden_size), int(config.num_hidden_layers)
        self._vocabulary("model.embed_tokens.weight")
        for layer in range(depth):
            prefix = f"model.layers.{layer}."
            self._attention(prefix + "self_attn.")
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._whole(f"{prefix}{norm}.weight", (hidden,))
            if sizes.sparse(layer):
                self._experts(prefix + "mlp.")
            else:
                self._dense(prefix + "mlp.")
        self._whole("model.norm.weight", (hidden,))
        if not config.tie_word_embeddings:
            self._vocabulary("lm_head.weight")

    def _new(self, name: str, shape: Sequence[int]) -> None:
        self.tensors[name] = torch.zeros(tuple(shape), dtype=self.dtype)

    def _add(self, piece: ModelPiece) -> None:
        if all(piece.extent):
            self.pieces.append(piece)
            self._by_name.setdefault(piece.name, []).append(piece)

    def _whole(self, name: str, shape: tuple[int, ...]) -> None:
        self._new(name, shape)
        zero = (0,) * len(shape)
        self._add(ModelPiece(name, name, shape, zero, shape, zero))

    def _vocabulary(self, name: str) -> None:
        vocab, hidden = int(self.config.vocab_size), int(self.config.hidden_size)
        rows = self.sizes.vocab_rows
        start = min(self.sizes.rank * rows, vocab)
        self._new(name, (rows, hidden))
        extent = (min(rows, vocab - start), hidden)
        self._add(ModelPiece(name, name, (vocab, hidden), (start, 0), extent, (0, 0)))

    def _rows(self, parameter: str, parts: Sequence[tuple[str, int, int, int]], width: int) -> None:
        """A parameter of row blocks: (name, rows of the whole tensor, first row, rows here);
        width 0: a bias."""
        self._new(parameter, (sum(part[3] for part in parts), *((width,) if width else ())))
        at = 0
        for name, rows, start, count in parts:
            tail: tuple[int, ...] = (width,) if width else ()
            zero = (0,) * len(tail)
            piece = ModelPiece(
                parameter, name, (rows, *tail), (start, *zero), (count, *tail), (at, *zero)
            )
            self._add(piece)
            at += count

    def _columns(self, name: str, rows: int, columns: int) -> None:
        """A row-parallel weight: a block of columns."""
        count = columns // self.sizes.tp
        self._new(name, (rows, count))
        start = (0, self.sizes.rank * count)
        self._add(ModelPiece(name, name, (rows, columns), start, (rows, count), (0, 0)))

    def _attention(self, prefix: str) -> None:
        sizes, dim = self.sizes, self.sizes.head_dim
        q = (sizes.heads * dim, sizes.rank * sizes.local_heads * dim, sizes.local_heads * dim)
        kv = (sizes.kv_heads * dim, sizes.first_kv_head * dim, sizes.local_kv_heads * dim)
        hidden = int(self.config.hidden_size)
        kinds = ("weight", "bias") if self.config.model_type == "qwen2" else ("weight",)
        for kind in kinds:
            parts = [
                (f"{prefix}{letter}_proj.{kind}", *rows)
                for letter, rows in (("q", q), ("k", kv), ("v", kv))
            ]
            self._rows(f"{prefix}qkv_proj.{kind}", parts, hidden if kind == "weight" else 0)
        self._columns(f"{prefix}o_proj.weight", hidden, sizes.heads * dim)
        if self.config.model_type in ("qwen3", "qwen3_moe"):
            self._whole(f"{prefix}q_norm.weight", (dim,))
            self._whole(f"{prefix}k_norm.weight", (dim,))

    def _dense(self, prefix: str) -> None:
        hidden, inner = int(self.config.hidden_size), int(self.config.intermediate_size)
        count = inner // self.sizes.tp
        rows = (inner, self.sizes.rank * count, count)
        parts = [(f"{prefix}{half}_proj.weight", *rows) for half in ("gate", "up")]
        self._rows(f"{prefix}gate_up_proj.weight", parts, hidden)
        self._columns(f"{prefix}down_proj.weight", hidden, inner)

    def _experts(self, prefix: str) -> None:
        config, sizes = self.config, self.sizes
        hidden, inner = int(config.hidden_size), int(config.moe_intermediate_size)
        self._whole(prefix + "gate.weight", (int(config.num_experts), hidden))
        count = inner // sizes.tp if sizes.experts == "tp" else inner
        first = sizes.rank * count if sizes.experts == "tp" else 0
        w13, w2 = prefix + "experts.w13_weight", prefix + "experts.w2_weight"
        self._new(w13, (len(sizes.expert_range), 2 * count, hidden))
        self._new(w2, (len(sizes.expert_range), hidden, count))
        for local, expert in enumerate(sizes.expert_range):
            name = f"{prefix}experts.{expert}."
            for at, half in ((0, "gate"), (count, "up")):
                self._add(
                    ModelPiece(
                        w13,
                        f"{name}{half}_proj.weight",
                        (inner, hidden),
                        (first, 0),
                        (count, hidden),
                        (local, at, 0),
                    )
                )
            down = f"{name}down_proj.weight"
            at_down = (local, 0, 0)
            self._add(ModelPiece(w2, down, (hidden, inner), (0, first), (hidden, count), at_down))

    def _draw(self, seed: int) -> None:
        """Random values wherever a weight belongs; padding stays zero."""
        generator = torch.Generator().manual_seed(seed + self.sizes.rank)
        for piece in self.pieces:
            values = torch.randn(piece.extent, generator=generator) * 0.02
            self.box(piece).copy_(values)

    # --- forward ----------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab] of one prompt; every worker calls it with the same ids."""
        tokens = torch.tensor(list(ids))
        config = self.config
        hidden = self._embed(tokens)
        rotation = self._rotation(len(tokens))
        for layer in range(int(config.num_hidden_layers)):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            hidden = hidden + self._attend(normed, prefix + "self_attn.", rotation)
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            mix = self._mix_experts if self.sizes.sparse(layer) else self._mix
            hidden = hidden + mix(normed, prefix + "mlp.")
        hidden = self._norm(hidden, "model.norm.weight")
        tied = config.tie_word_embeddings
        head = self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self._gather(hidden @ head.T)[:, : int(config.vocab_size)]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.tensors["model.embed_tokens.weight"]
        local = tokens - self.sizes.rank * self.sizes.vocab_rows
        here = (local >= 0) & (local < self.sizes.vocab_rows)
        rows = table[local.clamp(0, self.sizes.vocab_rows - 1)]
        return self._reduce(rows * here[:, None])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.tensors[name] * (wide * scale).to(self.dtype)

    def _rotation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.sizes.head_dim
        frequency = 1.0 / self.config.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
        angle = torch.arange(length).float()[:, None] * frequency
        angle = torch.cat([angle, angle], -1)[:, None]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _attend(
        self, x: torch.Tensor, prefix: str, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        sizes, length = self.sizes, len(x)
        bias = self.tensors.get(prefix + "qkv_proj.bias")
        fused = F.linear(x, self.tensors[prefix + "qkv_proj.weight"], bias)
        fused = fused.view(length, -1, sizes.head_dim)
        q, k, v = torch.split(
            fused, [sizes.local_heads, sizes.local_kv_heads, sizes.local_kv_heads], 1
        )
        if prefix + "q_norm.weight" in self.tensors:
            q = self._norm(q, prefix + "q_norm.weight")
            k = self._norm(k, prefix + "k_norm.weight")
        repeats = sizes.local_heads // sizes.local_kv_heads
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * sizes.head_dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1, dtype=torch.float32)
        mixed = torch.einsum("hqk,khd->qhd", weights.to(self.dtype), v).reshape(length, -1)
        return self._reduce(mixed @ self.tensors[prefix + "o_proj.weight"].T)

    def _mix(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        fused = x @ self.tensors[prefix + "gate_up_proj.weight"].T
        return self._reduce(_gated(fused) @ self.tensors[prefix + "down_proj.weight"].T)

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
        for local, expert in enumerate(self.sizes.expert_range):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            inner = _gated(x[rows] @ w13[local].T) @ w2[local].T
            total.index_add_(0, rows, inner * weights[rows, slots, None])
        return self._reduce(total)

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.sizes.tp > 1:
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.sizes.tp == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.sizes.tp)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * rotation[0] + torch.cat([-second, first], -1) * rotation[1]


def _gated(fused: torch.Tensor) -> torch.Tensor:
    gate, up = fused.chunk(2, -1)
    return F.silu(gate) * up


def _check(sizes: _Sizes) -> None:
    """Refuses what this engine cannot compute or cut, with names and numbers."""
    config, tp = sizes.config, sizes.tp
    if config.model_type not in FAMILIES:
        raise UnsupportedError(f"model_type {config.model_type!r}: one of {', '.join(FAMILIES)}")
    if sizes.experts not in EXPERTS:
        raise InvalidArgumentError(f"experts {sizes.experts!r}: one of {', '.join(EXPERTS)}")
    if not 0 <= sizes.rank < tp:
        raise InvalidArgumentError(f"rank {sizes.rank} of {tp} workers")
    if getattr(config, "rope_scaling", None) or getattr(config, "use_sliding_window", False):
        raise UnsupportedError("rope_scaling and sliding windows are not computed here")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act {config.hidden_act!r}: only silu")
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        raise UnsupportedError("attention_bias is not computed here")
    for name, count in (
        ("num_attention_heads", sizes.heads),
        ("intermediate_size", int(config.intermediate_size)),
        ("moe_intermediate_size", int(getattr(config, "moe_intermediate_size", 0) or 0)),
        ("num_experts", int(getattr(config, "num_experts", 0) or 0)),
    ):
        cut = not (name == "num_experts" and sizes.experts == "tp")
        cut = cut and not (name == "moe_intermediate_size" and sizes.experts == "ep")
        if cut and count % tp:
            raise InvalidArgumentError(f"{name} {count} is not a multiple of {tp} workers")
    if sizes.kv_heads % tp and tp % sizes.kv_heads:
        raise InvalidArgumentError(
            f"num_key_value_heads {sizes.kv_heads} does not fit {tp} workers"
        )
    _ = sizes.vocab_rows
