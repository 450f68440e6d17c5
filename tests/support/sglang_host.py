"""The classes of SGLang that tests and benchmarks make models of, by the families of tiny_models;
see wsync.demo.sglang_cpu."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from wsync.demo import sglang_cpu
from wsync.demo.sglang_cpu import host, load

__all__ = ["build", "configure", "host", "load"]

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "deepseek_v3": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "mimo": ("mimo", "MiMoForCausalLM"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "kimi_k2": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "moonlight": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("deepseek_v2", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("glm4_moe", "GlmMoeDsaForCausalLM"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    "step3p5": ("step3p5", "Step3p5ForCausalLM"),
    "bailing_moe_v2": ("bailing_moe", "BailingMoeV2ForCausalLM"),
}


def configure(config: Any) -> Any:
    """What SGLang makes of a model's config, on this rank."""
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
    from sglang.srt.utils.hf_transformers.config import get_config

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        made = get_config(folder, trust_remote_code=False)
    made.dtype = torch.bfloat16
    made.encoder_only = made.language_only = False  # arguments of the server
    adjust_tp_num_heads_if_necessary(
        made.get_text_config(), torch.distributed.get_world_size(), True
    )
    return made


def build(family: str, config: Any, quantization: Any = None) -> torch.nn.Module:
    """A model of this rank."""
    return sglang_cpu.build(*_CLASSES[family], config, quantization)
