"""vLLM's own model classes in this process, without its kernels or a GPU; as sglang_cpu."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.engine_classes import CLASSES

from wsync.demo import stand_ins

_MISSING = (
    *("cachetools", "cbor2", "cloudpickle", "cpuinfo", "llguidance", "openai", "openai_harmony"),
    *("partial_json_parser", "prometheus_client", "torchvision", "uvloop", "xgrammar"),
)
_CLASSES = {
    **CLASSES,
    "deepseek_v32": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "glm_moe_dsa": ("deepseek_v2", "GlmMoeDsaForCausalLM"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5MoeForCausalLM"),
}
_parallel: dict[str, Any] = {}
_folders = tempfile.TemporaryDirectory()


def load(tree: Path) -> None:
    """Makes vllm importable; once a process."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    sys.path.insert(0, str(tree))
    version = importlib.metadata.version
    # the name of the version is what its platform is chosen by
    importlib.metadata.version = lambda name: (  # type: ignore[assignment]
        "0.33.0+cpu" if name == "vllm" else version(name)
    )
    from torch.utils import _triton

    _triton.has_triton_package()
    _triton.has_triton()
    torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)  # type: ignore
    # with AMX vLLM packs weights for kernels that its Python files lack; all of it asks here
    torch.cpu._is_amx_tile_supported = lambda: False
    stand_ins.install(_MISSING)
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda *a, **k: new_group(  # type: ignore[assignment]
        *a, **{**k, "backend": "fake"}
    )
    from vllm.distributed.device_communicators import shm_broadcast

    _allow_sparse_attention()
    _allow_experts_without_gates()
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)


def _allow_sparse_attention() -> None:
    """Has models with an indexer choose a GPU's attention, which is only called to compute."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import workspace

    torch.accelerator.empty_cache = lambda: None
    workspace.init_workspace_manager(torch.device("cpu"))
    own = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls: Any, selected: Any, attn_selector_config: Any, **given: Any) -> Any:
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return own(cls, selected, attn_selector_config, **given)

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def _allow_experts_without_gates() -> None:
    """Has experts made that no CPU computes."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method

    made, chosen = config.FusedMoEConfig.__post_init__, unquantized_fused_moe_method
    choose, kinds = chosen.select_unquantized_moe_backend, chosen.UnquantizedMoeBackend

    def make(given: Any) -> None:
        try:
            made(given)
        except NotImplementedError:  # the last that it looks at
            if given.is_act_and_mul:
                raise

    config.FusedMoEConfig.__post_init__ = make
    chosen.select_unquantized_moe_backend = lambda moe_config: (
        choose(moe_config) if moe_config.is_act_and_mul else (kinds.CPU, None)
    )


def host(*, tp: int, ep: int, rank: int, dp_attention: bool = False) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if dp_attention:
        raise NotImplementedError("data-parallel attention of vLLM")
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    _parallel.update(
        tensor_parallel_size=tp,
        enable_expert_parallel=ep > 1,
        rank=rank,
        distributed_executor_backend="external_launcher" if tp > 1 else None,
        disable_custom_all_reduce=True,
    )
    with set_current_vllm_config(VllmConfig(parallel_config=_config())):
        address = "file://" + tempfile.mktemp()
        # it would ask ranks that are not there, and takes any number for the length of an answer
        parallel_state.in_the_same_node_as = lambda *_: [True] * tp
        parallel_state.init_distributed_environment(tp, rank, address, rank, "fake")
        parallel_state.initialize_model_parallel(tp, backend="fake")


def _config() -> Any:
    from vllm.config import ParallelConfig

    return ParallelConfig(**_parallel)


def choose_triton() -> None:
    """Has FP8 layers choose Triton's kernels, as on an NVIDIA GPU.

    vLLM's own for CPUs need AMX tiles; without them it makes no layer at all.  What is loaded, and
    what becomes of it afterwards, is vLLM's own code; only that no kernel is made.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    kernel = linear.TritonFp8BlockScaledMMKernel
    kernel.is_supported = classmethod(lambda *_: (True, None))
    linear.choose_scaled_mm_linear_kernel = lambda **_: kernel
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, TritonExperts)
    fp8.Fp8MoEMethod._init_moe_kernel = lambda *_: None


def choose_packed_experts() -> None:
    """Has INT4 experts choose Triton's kernels, as on an NVIDIA GPU without Marlin's."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonWNA16Experts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as packed,
    )

    packed.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.TRITON, TritonWNA16Experts)
    packed.CompressedTensorsWNA16MoEMethod._setup_kernel = lambda *_: None


def quantize(config: Any) -> Any:
    """The config of a checkpoint in FP8 with a scale for each block; see tiny_models."""
    choose_triton()
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(config.num_hidden_layers)]
    config.quantization_config = {
        **{"quant_method": "fp8", "activation_scheme": "dynamic"},
        **{"weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head", *routers]},
    }
    return config


def configure(config: Any, draft: bool = False) -> Any:
    """What vLLM makes of a model's config; draft: for the class that drafts tokens for it."""
    from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # here is where the stand-ins are
    config.dtype = torch.bfloat16
    folder = tempfile.mkdtemp(dir=_folders.name)
    config.save_pretrained(folder)
    # models that see images look for it when they are made, and else on the hub
    Path(folder, "processor_config.json").write_text('{"processor_class": "Processor"}')
    model_config = ModelConfig(
        **{"model": folder, "tokenizer": folder, "skip_tokenizer_init": True},
        **{"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True},
    )
    parallel = _config()
    given: dict[str, Any] = {}
    if draft:
        given["speculative_config"] = speculative = SpeculativeConfig(
            **{"method": "mtp", "num_speculative_tokens": 1},
            target_model_config=model_config,
            target_parallel_config=parallel,
        )
        model_config = speculative.draft_model_config
    return VllmConfig(
        model_config=model_config,
        parallel_config=parallel,
        load_config=LoadConfig(load_format="dummy"),
        **given,
    )


def build(family: str, config: Any, whole: Any = None) -> torch.nn.Module:
    """The model of this rank; whole: what `configure` has made of its config."""
    place, name = _CLASSES[family]
    module = importlib.import_module(f"vllm.model_executor.models.{place}")
    return _made(getattr(module, name), whole or configure(config))


def build_draft(config: Any) -> torch.nn.Module:
    """The class that vLLM chooses to draft tokens for a model."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    whole = configure(config, draft=True)
    kind, made = get_model_architecture(whole.model_config)[0], whole.model_config.hf_config
    if kind.__name__ == "Glm4MoeLiteMTP":
        # vLLM 0.33 says 0 here, takes the draft for layer 0, which is dense, and refuses that
        made.num_hidden_layers = config.num_hidden_layers
    return _made(kind, whole)


def _made(kind: Any, whole: Any) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(whole):
            model: torch.nn.Module = kind(vllm_config=whole)
    finally:
        torch.set_default_dtype(before)
    for part in model.modules():
        scratch = getattr(part, "topk_indices_buffer", None)
        if isinstance(scratch, torch.Tensor):
            scratch.zero_()  # of any values until an indexer computes
    return model.eval()
