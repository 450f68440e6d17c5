"""A tiny Qwen3, dense and with experts: configurations, weights, and whether two are equal."""

from __future__ import annotations

from typing import Any

import requests
import torch
import transformers

from wsync import _core

_COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
Weights = dict[str, torch.Tensor]


def dense(layers: int = 2, *, tied: bool = False) -> Any:
    return transformers.Qwen3Config(**_COMMON, num_hidden_layers=layers, tie_word_embeddings=tied)


def sparse() -> Any:
    return transformers.Qwen3MoeConfig(
        **_COMMON,
        num_hidden_layers=2,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )


def draw(config: Any, seed: int) -> Weights:
    """Random parameters by name, in float32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    return {name: p.detach() for name, p in model.named_parameters()}


def same(found: Weights, expected: Weights) -> bool:
    """Whether both are the same tensors, byte for byte."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
        for name in expected
    )


def in_server(url: str) -> dict[str, str]:
    """Checksums of what the transformers engine at a URL holds, by name."""
    answer = requests.post(url + "/weights_checker", json={"action": "checksum"}, timeout=60)
    sums: dict[str, str] = answer.json()["ranks"][0]["checksums"]
    return sums


def sums(weights: Weights) -> dict[str, str]:
    """The same of weights."""
    return {
        name: f"{_core.checksum(t.contiguous().reshape(-1).view(torch.uint8).numpy()):016x}"
        for name, t in weights.items()
    }
