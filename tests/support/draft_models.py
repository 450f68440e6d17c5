"""Layers of multi-token prediction in checkpoints, and SGLang's classes that draft with them.

Names follow the published checkpoints of DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, GLM-5, Qwen3-Next,
Qwen3.5 and MiMo.  An inner layer has what the model's last layer has.  Copies of embedding and
head that some have in such a layer are left out: no trainer holds them, and engines share the
model's own.
"""

from __future__ import annotations

import fnmatch
import sys
import unittest.mock
from typing import Any

import torch
from support.tiny_models import Shapes

# family: the file and the class in sglang.srt.models
SGLANG = {
    "deepseek_v3": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "deepseek_v32": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "glm_moe_dsa": ("glm4_moe", "GlmMoeDsaForCausalLMNextN"),
    "glm4_moe": ("glm4_moe_nextn", "Glm4MoeForCausalLMNextN"),
    "glm4_moe_lite": ("glm4_moe_lite_nextn", "Glm4MoeLiteForCausalLMNextN"),
    "qwen3_next": ("qwen3_next_mtp", "Qwen3NextForCausalLMMTP"),
    "qwen3_5": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_moe": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_text": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_moe_text": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "mimo": ("mimo_mtp", "MiMoMTP"),
    "bailing_moe_v2": ("bailing_moe_nextn", "BailingMoeForCausalLMNextN"),
}
FAMILIES = tuple(SGLANG)
# what an engine gives to a draft from the model that it drafts for
SHARED = ("*embed_tokens.weight", "*word_embeddings.weight", "*head.weight")


def extended(family: str, config: Any, shapes: Shapes) -> tuple[Any, Shapes]:
    """A configuration that says one MTP layer, and the checkpoint with that layer."""
    text = config.get_text_config()
    config.num_nextn_predict_layers = text.num_nextn_predict_layers = 1
    if family.startswith("qwen3_5"):
        text.mtp_num_hidden_layers = 1
    if family == "mimo":
        config.architectures = ["MiMoForCausalLM"]
    return config, shapes | layer_tensors(family, shapes, text.num_hidden_layers)


def layer_tensors(family: str, shapes: Shapes, layers: int) -> Shapes:
    """What an MTP layer adds to a checkpoint; layers: of the model."""
    last = next(
        f"{prefix}{layers - 1}."
        for prefix in ("model.layers.", "model.language_model.layers.")
        if any(name.startswith(f"{prefix}{layers - 1}.") for name in shapes)
    )
    inner = {n.removeprefix(last): f for n, f in shapes.items() if n.startswith(last)}
    hidden = inner["input_layernorm.weight"][0][0]
    norm, wide = ((extent, torch.bfloat16) for extent in ((hidden,), (hidden, 2 * hidden)))
    if family.startswith("qwen3"):
        own = {"fc": wide, "pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm, "norm": norm}
        prefix, inside = "mtp.", "mtp.layers.0."
    elif family == "mimo":
        own = {"token_layernorm": norm, "hidden_layernorm": norm}
        own |= {"input_proj": wide, "final_layernorm": norm}
        prefix = inside = "model.mtp_layers.0."
    else:
        own = {"enorm": norm, "hnorm": norm, "eh_proj": wide}
        own["final_layernorm" if family == "bailing_moe_v2" else "shared_head.norm"] = norm
        prefix = inside = f"model.layers.{layers}."
    return {f"{prefix}{name}.weight": facts for name, facts in own.items()} | {
        f"{inside}{name}": facts for name, facts in inner.items()
    }


def build(host: Any, family: str, config: Any) -> torch.nn.Module:
    """SGLang's draft of this rank; host: support.sglang_host."""
    # 0.5.17 looks an operator of vLLM's up for Ling's other models, which no loader calls
    absent = dict.fromkeys(("vllm", "vllm._custom_ops"), unittest.mock.MagicMock())
    with (
        unittest.mock.patch.dict(host._CLASSES, SGLANG),
        unittest.mock.patch.dict(sys.modules, absent),
    ):
        return share(host.build(family, config))


@torch.no_grad()
def share(draft: torch.nn.Module) -> torch.nn.Module:
    """Gives a draft what an engine gives to it from the model: the same in all drafts."""
    for name, parameter in draft.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in SHARED):
            parameter.fill_(1.5)
    return draft
