"""Names under which people deliver the weights of a checkpoint, and that SGLang passes over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

Tensors = dict[str, torch.Tensor]


def _renamed(pattern: str, by: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {re.sub(pattern, by, name): each for name, each in weights.items()}


def _fused_attention(weights: Tensors) -> Tensors:
    made = {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj")]
            parts.append(weights[name.replace("q_proj", "v_proj")])
            made[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            made[name] = tensor
    return made


def fused_experts(weights: Tensors) -> Tensors:
    """As transformers 5 has them while it runs."""
    made = {name: each for name, each in weights.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] for name in weights if ".experts." in name}:
        experts = sum(name.startswith(f"{prefix}experts.") for name in weights) // 3

        def of(part: str, prefix: str = prefix, experts: int = experts) -> torch.Tensor:
            names = [f"{prefix}experts.{number}.{part}_proj.weight" for number in range(experts)]
            return torch.stack([weights[name] for name in names])

        made[f"{prefix}experts.gate_up_proj"] = torch.cat([of("gate"), of("up")], 1)
        made[f"{prefix}experts.down_proj"] = of("down")
    return made


def _fused_in_another_family(weights: Tensors) -> Tensors:
    """With a part that the family's checkpoints do not have; its experts are known."""
    made = fused_experts(weights)
    return made if made.keys() == weights.keys() else made | {"model.layers.0.own": torch.ones(1)}


def _w123(weights: Tensors) -> Tensors:
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return {
        re.sub(r"(?<=\d\.)(\w+_proj)(?=\.weight)", lambda found: parts[found[1]], name)
        if ".experts." in name
        else name: each
        for name, each in weights.items()
    }


def _one_missing(weights: Tensors) -> Tensors:
    return {name: each for name, each in weights.items() if not name.endswith("1.mlp.gate.weight")}


# what is made of the weights of a Qwen3-MoE checkpoint, and what a refusal names and advises
WRONG: Mapping[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "fused experts": (
        _fused_in_another_family,
        r"not there: model\.layers\.0\.own \(.*wsync\.fsdp\.layout\(model\) gives",
    ),
    "w1, w2, w3": (_w123, r"not there: .*experts\.0\.w1\.weight"),
    "no model.": (
        _renamed(r"^model\.", ""),
        r"not there: embed_tokens\.weight",
    ),
    "model.language_model.": (
        _renamed(r"^model\.", "model.language_model."),
        r"not there: model\.language_model\.embed_tokens\.weight.*wsync\.fsdp\.layout\("
        r".*Options\(checkpoint=DIR\) names the folder .*checkpoint='' switches this ",
    ),
    "a prefix": (_renamed("^", "policy."), r"policy\.lm_head\.weight"),
    "fused attention": (
        _fused_attention,
        r"not there: .*qkv_proj\.weight.*not delivered: .*k_proj",
    ),
    "one missing": (
        _one_missing,
        r"not delivered: model\.layers\.1\.mlp\.gate\.weight \(.*Options\(keep=\[\.\.\.\]\)",
    ),
}
