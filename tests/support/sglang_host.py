"""The classes of SGLang that tests and benchmarks make models of, by the families of tiny_models;
see wsync.demo.sglang_cpu."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from support.engine_classes import CLASSES
from support.quantised_models import Method

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


def quantization(method: Method, config: Any) -> Any:
    """SGLang's object for a method, which `build` takes."""
    if method.kind.startswith("int4"):
        from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors

        return compressed_tensors.CompressedTensorsConfig.from_config(method.config(config))
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config.from_config(method.config(config))


def process(model: torch.nn.Module) -> None:
    """As SGLang does after it has loaded weights."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))


def restore(model: torch.nn.Module) -> None:
    """As SGLang does before it loads weights once more."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))


def stand_in_for_kernels() -> None:
    """Has quantised layers made and processed as on an NVIDIA GPU, without its kernels: what these
    would shuffle is shuffled in some other way."""
    from sglang.srt.layers.quantization import fp8, unquant, utils
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16,
        compressed_tensors_wNa16_moe,
    )

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    fp8._is_cpu = unquant._is_cpu = unquant._is_cpu_amx_available = False
    utils.scaled_fp8_quant = lambda weight, scale: ((weight / scale).to(fp8.fp8_dtype), scale)

    def packed(weight: Any, _: Any, rows: int, columns: int, *__: Any) -> Any:
        return weight.flip(-1).reshape(*weight.shape[:-2], rows // 16, columns * 2).contiguous()

    def packed_linear(weight: Any, *, size_k: int, size_n: int, **_: Any) -> Any:
        return packed(weight, None, size_k, size_n)

    linear, experts = compressed_tensors_wNa16, compressed_tensors_wNa16_moe
    linear.gptq_marlin_repack, experts.gptq_marlin_moe_repack = packed_linear, packed
    linear.check_marlin_supports_shape = lambda *_: None
    for module in (linear, experts):
        module.marlin_make_workspace = lambda *_: torch.zeros(4, dtype=torch.int32)


def take_kv_apart_as_on_a_gpu() -> None:
    """Has DeepSeek's kv_b_proj taken apart after loading as on an NVIDIA GPU."""
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    deepseek_weight_loader._is_cuda = True
