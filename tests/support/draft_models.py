"""Layers of multi-token prediction in checkpoints, and SGLang's classes that draft with them.

Names follow the published checkpoints of DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, GLM-5, Qwen3-Next,
Qwen3.5, MiMo, Nemotron 3 Super and Step-3.5.  An inner layer has what the model's last layer has;
Nemotron's block of two what its last two have; Step-3.5's is dense.  Copies of embedding and head
that some have in such a layer are left out: no trainer holds them, and engines share the model's
own, but for Step-3.5's, whose classes refuse to be without a head.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
import unittest.mock
from typing import Any

import torch
from support.tiny_models import Shapes, checkpoint, published

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
    "qwen3_6_moe": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "mimo": ("mimo_mtp", "MiMoMTP"),
    "bailing_moe_v2": ("bailing_moe_nextn", "BailingMoeForCausalLMNextN"),
    "nemotron_h": ("nemotron_h_mtp", "NemotronHForCausalLMMTP"),
    "step3p5": ("step3p5_mtp", "Step3p5MTP"),
    "mimo_v2_flash": ("mimo_v2_nextn", "MiMoV2MTP"),
}
# what Step-3.5's configuration says of each layer; SGLang takes its draft for layer 45, whatever
# the model has
_STEP_LISTS = ("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")
_STEP_LAYERS = 46
FAMILIES = tuple(SGLANG)
# families of which only the layers that predict are others
LIKE = {"qwen3_6_moe": "qwen3_5_moe"}
_MODELS = ("model", "model.language_model", "backbone")
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
    if family == "nemotron_h":
        config = published(config)
    if family == "step3p5":
        config.mtp_layer_types = ["sliding_attention"]
        shapes = checkpoint(family, config)
        _lengthen(config, 1, _STEP_LISTS)
    return config, shapes | layer_tensors(family, shapes, text.num_hidden_layers)


def layer_tensors(family: str, shapes: Shapes, layers: int) -> Shapes:
    """What an MTP layer adds to a checkpoint; layers: of the model."""
    if family == "nemotron_h":
        return _block(shapes, layers)
    inner = _inner(shapes, layers if family == "step3p5" else layers - 1)
    if family == "mimo_v2_flash":  # the checkpoint has it already
        inner = {}
    hidden = next(f[0][0] for n, f in shapes.items() if n.endswith("input_layernorm.weight"))
    norm, wide = ((extent, torch.bfloat16) for extent in ((hidden,), (hidden, 2 * hidden)))
    own = {"enorm": norm, "hnorm": norm, "eh_proj": wide}
    prefix = inside = f"model.layers.{layers}."
    if family.startswith("qwen3"):
        own = {"fc": wide, "pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm, "norm": norm}
        prefix, inside = "mtp.", "mtp.layers.0."
        if family == "qwen3_5_moe":
            inner = _single(inner)
    elif family == "mimo":
        own = {"token_layernorm": norm, "hidden_layernorm": norm}
        own |= {"input_proj": wide, "final_layernorm": norm}
        prefix = inside = "model.mtp_layers.0."
    elif family == "mimo_v2_flash":
        own["final_layernorm"] = norm
        prefix = "model.mtp.layers.0."
    elif family == "step3p5":
        own["transformer.shared_head.norm"] = norm
        own["transformer.shared_head.output"] = shapes["lm_head.weight"]
    else:
        own["final_layernorm" if family == "bailing_moe_v2" else "shared_head.norm"] = norm
    return {f"{prefix}{name}.weight": facts for name, facts in own.items()} | {
        f"{inside}{name}": facts for name, facts in inner.items()
    }


def _inner(shapes: Shapes, layer: int) -> Shapes:
    """What a layer of the model has, by the ends of the names."""
    begins = [f"{prefix}.layers.{layer}." for prefix in _MODELS]
    return {
        name.removeprefix(begin): facts
        for name, facts in shapes.items()
        for begin in begins
        if name.startswith(begin)
    }


def _single(inner: Shapes) -> Shapes:
    """What a layer has whose experts are one by one, of one in which they are together."""
    found = {name: facts for name, facts in inner.items() if ".experts." not in name}
    for name in sorted(inner.keys() - found.keys()):
        (count, rows, columns), dtype = inner[name]
        parts, rows = (("gate", "up"), rows // 2) if "gate_up" in name else (("down",), rows)
        for expert, part in itertools.product(range(count), parts):
            found[f"mlp.experts.{expert}.{part}_proj.weight"] = ((rows, columns), dtype)
    return found


def _block(shapes: Shapes, layers: int) -> Shapes:
    """What a block of two layers adds, in which the last two of the model come again."""
    found = {
        f"mtp.layers.{number}.{name}": facts
        for number, layer in enumerate((layers - 2, layers - 1))
        for name, facts in _inner(shapes, layer).items()
    }
    (hidden,), dtype = norm = found["mtp.layers.0.norm.weight"]
    found |= {f"mtp.layers.0.{name}.weight": norm for name in ("enorm", "hnorm")}
    found["mtp.layers.0.eh_proj.weight"] = (hidden, 2 * hidden), dtype
    return found | {"mtp.layers.1.final_layernorm.weight": norm}


def _lengthen(config: Any, count: int, names: tuple[str, ...]) -> None:
    """Has lists of a configuration say of so many more layers what they say of the last."""
    for name in names:
        each = getattr(config, name)
        setattr(config, name, [*each, *each[-1:] * count])


def build(host: Any, family: str, config: Any) -> torch.nn.Module:
    """SGLang's draft of this rank; host: support.sglang_host."""
    # 0.5.17 looks an operator of vLLM's up for Ling's other models, which no loader calls
    if family == "step3p5":
        _lengthen(config, _STEP_LAYERS, ("layer_types", *_STEP_LISTS))
    absent = dict.fromkeys(("vllm", "vllm._custom_ops"), unittest.mock.MagicMock())
    with (
        unittest.mock.patch.dict(host._CLASSES, SGLANG),
        unittest.mock.patch.dict(sys.modules, absent),
    ):
        draft = share(host.build(family, config))
    if family == "step3p5":
        draft.draft_model_idx = 0  # which layer it is, as the server says
    return draft


@torch.no_grad()
def share(draft: torch.nn.Module) -> torch.nn.Module:
    """Gives a draft what an engine gives to it from the model: the same in all drafts."""
    for name, parameter in draft.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in SHARED):
            parameter.fill_(1.5)
    return draft
