"""SGLang's own model classes in this process, without its server, kernels or a GPU.

`host` prepares the process for one rank of a layout (collectives are not carried out) and may be
called again for the next; `build` makes a model of that rank, of the families of tiny_models.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.engine_classes import CLASSES
from support.quantised_models import Method

from wsync.demo import sglang_cpu

_MISSING = (
    *("IPython", "loguru", "openai", "partial_json_parser", "sentencepiece", "torchvision"),
    *("triton", "tvm_ffi", "uvicorn", "xgrammar"),
)
# looked up when a model's module is imported, and called by no loader
_OPERATORS = (
    *("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu"),
    *("fused_qk_gemma_rmsnorm_with_gate_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu"),
)
_CLASSES = {
    **CLASSES,
    "deepseek_v32": ("deepseek_v2", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("glm4_moe", "GlmMoeDsaForCausalLM"),
}


def _with(function: Callable[..., Any], **given: Any) -> Any:
    """A call with those of the arguments that this version has."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in known})


def load(tree: Path | None = None) -> None:
    """Makes sglang importable, from an unpacked wheel or where it is installed; once a process."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    if tree is not None:
        sys.path.insert(0, str(tree))
    found = importlib.util.find_spec("sglang")
    if found is None:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    # it looks for its CUDA sources when it is imported, and a wheel's Python files lack them
    for place in found.submodule_search_locations or ():
        for folder in ("include", "csrc"):
            Path(place, "kernels", "jit", folder).mkdir(parents=True, exist_ok=True)
    for name in _OPERATORS:
        setattr(torch.ops.sgl_kernel, name, None)
    sglang_cpu.stand_in(_MISSING)
    _without_peers()


def _without_peers() -> None:
    """Process groups whose other ranks do not exist."""
    from sglang.srt.distributed import parallel_state

    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})
    coordinator = parallel_state.GroupCoordinator
    init, signature = coordinator.__init__, inspect.signature(coordinator.__init__)

    def plain(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        init(**{n: False if n.startswith("use_") else value for n, value in given.items()})

    coordinator.__init__ = plain


def host(*, tp: int, ep: int, rank: int, dp_attention: bool = False) -> None:
    """Makes this process one rank of an engine whose other ranks are not there."""
    from sglang.srt import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention as dp
    from sglang.srt.layers.moe.utils import initialize_moe_config

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    given: dict[str, Any] = {"device": "cpu", "tp_size": tp, "ep_size": ep}
    given |= {"attention_backend": "torch_native", "moe_runner_backend": "auto"}
    if dp_attention:
        given |= {"enable_dp_attention": True, "dp_size": tp}
    args = server_args.ServerArgs(model_path="dummy", **given)
    _publish(args, server_args, rank)
    parallel_state.set_custom_all_reduce(False)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    _with(
        parallel_state.init_distributed_environment,
        **{"world_size": tp, "rank": rank, "local_rank": rank, "backend": "fake"},
        distributed_init_method="file://" + tempfile.mktemp(),
    )
    _with(
        parallel_state.initialize_model_parallel,
        **{"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep},
        **{"attention_data_parallel_size": tp if dp_attention else 1},
        backend="fake",
    )
    model_config = types.SimpleNamespace(
        hidden_size=64, dtype=torch.bfloat16, hf_config=types.SimpleNamespace()
    )
    _with(dp.initialize_dp_attention, server_args=args, model_config=model_config)
    _with(initialize_moe_config, server_args=args)


def _publish(args: Any, server_args: Any, rank: int) -> None:
    try:  # 0.5.23: ranks belong to a context
        from sglang.srt import runtime_context

        ranks = runtime_context.SpawnRanks
    except (ImportError, AttributeError):
        server_args.set_global_server_args_for_scheduler(args)
    else:
        place = _with(ranks, world_rank=rank, gpu_id=rank, dp_rank=None)
        runtime_context.publish(args, role="scheduler", ranks=place)


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
    place, name = _CLASSES[family]
    kind = getattr(importlib.import_module(f"sglang.srt.models.{place}"), name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: torch.nn.Module = kind(config=config, quant_config=quantization)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def quantization(method: Method, config: Any) -> Any:
    """SGLang's object for a method, which `build` takes."""
    if method.kind.startswith("int4"):
        from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors

        return compressed_tensors.CompressedTensorsConfig.from_config(method.config(config))
    if method.kind == "nvfp4":
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

        # SGLang's server adds which modules its model joins
        return ModelOptFp4Config.from_config(
            {**method.config(config), "packed_modules_mapping": {}}
        )
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
