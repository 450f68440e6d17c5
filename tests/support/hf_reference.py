"""An independent conversion of a sharded Megatron model to Hugging Face tensors.

Gathers every parameter whole and reshapes it, the way trainers do it without wsync.  It shares
no code with wsync's rules and planner, so that each can be checked against the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.megatron_cpu import named_weights

Part = tuple[str, int, int, torch.Tensor]


def hf_state_dict(chunks: Sequence[torch.nn.Module], config: Any) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names; collective, and every rank gets all.

    Args:
        chunks: this rank's modules, one per virtual pipeline stage.
        config: the Hugging Face configuration (llama, qwen2, qwen3 or qwen3_moe family).
    """
    everyone: list[list[Part] | None] = [None] * dist.get_world_size()
    mine = [(*place, tensor.detach()) for *place, tensor in own_parameters(chunks, config)]
    dist.all_gather_object(everyone, mine)
    shards: dict[str, dict[int, torch.Tensor]] = {}
    stages: dict[str, int] = {}
    for parts in everyone:
        for name, stage, cut, tensor in parts or []:
            if stages.setdefault(name, stage) == stage:
                shards.setdefault(name, {})[cut] = tensor
    result = {}
    for name, pieces in shards.items():
        ordered = [pieces[cut] for cut in sorted(pieces)]
        for target, tensor in convert(name, join(name, ordered), config):
            result[target] = tensor.contiguous()
    return result


def own_parameters(chunks: Sequence[torch.nn.Module], config: Any) -> Iterator[Part]:
    """(global name, pipeline stage, index of the tensor-parallel piece, parameter)."""
    from megatron.core import parallel_state as ps

    stage = ps.get_pipeline_model_parallel_rank()
    for name, tensor in named_weights(chunks, getattr(config, "num_experts", 0) or 0):
        expert = ".experts." in name
        rank = (
            ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
        )
        if isinstance(tensor, torch.nn.Parameter):
            yield name, stage, rank, tensor


def is_replicated(name: str) -> bool:
    """Whether every tensor-parallel rank holds the whole parameter."""
    return re.search(r"norm|router|shared_experts\.gate_weight", name) is not None


def join(name: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole parameter from its tensor-parallel pieces, in rank order."""
    if is_replicated(name):
        return pieces[0]
    if re.search(r"linear_proj\.weight|linear_fc2\.", name):
        return torch.cat(list(pieces), dim=1)
    if "linear_fc1" in name and "layer_norm" not in name:
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(pieces))


def convert(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors that one whole Megatron parameter holds."""
    if name == "embedding.word_embeddings.weight":
        yield "model.embed_tokens.weight", tensor[: config.vocab_size]
    elif name == "output_layer.weight":
        if not config.tie_word_embeddings:
            yield "lm_head.weight", tensor[: config.vocab_size]
    elif name == "decoder.final_layernorm.weight":
        yield "model.norm.weight", tensor
    else:
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if found is None:
            raise ValueError(f"no conversion for {name}")
        for suffix, part in _convert_layer(found[2], tensor, config):
            yield f"model.layers.{found[1]}.{suffix}", part


_SAME = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_MLP = re.compile(r"mlp\.(?:experts\.(?:local_experts\.(\d+)\.)?)?linear_fc([12])\.weight(\d*)")


def _convert_layer(
    name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    mlp = _MLP.fullmatch(name)
    if name in _SAME:
        yield _SAME[name], tensor
    elif name.startswith("self_attention.linear_qkv."):
        kind = name.rpartition(".")[2]
        groups = config.num_key_value_heads
        heads = config.num_attention_heads // groups
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        rows = tensor.view(groups, heads + 2, width, *tensor.shape[1:])
        parts = rows[:, :heads], rows[:, heads], rows[:, heads + 1]
        for letter, part in zip("qkv", parts, strict=True):
            yield f"self_attn.{letter}_proj.{kind}", part.reshape(-1, *tensor.shape[1:])
    elif mlp is not None:
        expert = mlp[1] or mlp[3]
        prefix = f"mlp.experts.{expert}" if expert else "mlp"
        if mlp[2] == "2":
            yield f"{prefix}.down_proj.weight", tensor
        else:
            gate, up = tensor.chunk(2)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up
    else:
        raise ValueError(f"no conversion for layer parameter {name}")
