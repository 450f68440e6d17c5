"""The boxes of the tests' own tensor-parallel workers."""

from typing import Any

import pytest
import torch
from support.tensor_parallel_model import ShardedModel
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, head_dim=8, tie_word_embeddings=False),
}


def reference(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # not all zeros and ones
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "tp", "experts"),
    [
        ("qwen3", 4, "tp"),
        ("qwen3 tied", 2, "tp"),
        ("qwen3_moe", 4, "ep"),
    ],
)
def test_the_workers_boxes_cover_the_model(family: str, tp: int, experts: str) -> None:
    """Every element is on a worker, and every worker holds the elements its layout says."""
    config = CONFIGS[family]
    weights = weights_of(reference(config))
    held = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in weights.items()}
    for rank in range(tp):
        worker = ShardedModel(config, rank=rank, tp=tp, experts=experts)
        worker.load_weights(weights.items())
        layout = worker.layout()
        buffers = list(worker.tensors.values())
        assert layout.shard_count == len(worker.boxes)
        for index in range(layout.tensor_count):
            name, dtype, shape, _ = layout.tensor(index)
            assert (dtype, shape) == ("float32", tuple(weights[name].shape))
            for _, buffer, offset, start, extent, strides, _ in layout.shards(index):
                box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
                found = torch.as_strided(
                    buffers[buffer], extent, [stride // 4 for stride in strides], offset // 4
                )
                assert torch.equal(found, weights[name][box]), name
                held[name][box] += 1
    assert all((count > 0).all() for count in held.values())
    replicas = max(1, tp // config.num_key_value_heads)
    assert {int(n) for n in held["model.layers.0.self_attn.k_proj.weight"].unique()} == {replicas}
    assert {int(n) for n in held["model.layers.0.self_attn.q_proj.weight"].unique()} == {1}
