"""The classes of SGLang that tests and benchmarks make models of, by the families of tiny_models;
see wsync.demo.sglang_cpu."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from support.engine_classes import CLASSES

from wsync.demo import sglang_cpu
from wsync.demo.sglang_cpu import host, load

__all__ = ["build", "configure", "host", "load"]

_CLASSES = {
    **CLASSES,
    "deepseek_v32": ("deepseek_v2", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("glm4_moe", "GlmMoeDsaForCausalLM"),
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
