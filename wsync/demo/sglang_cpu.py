"""SGLang's own model classes in this process, without its server, kernels or a GPU.

`host` prepares the process for one rank of a layout (collectives are not carried out) and may be
called again for the next; `build` makes a model of that rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from wsync.demo import stand_ins

_MISSING = (
    *("IPython", "loguru", "openai", "partial_json_parser", "sentencepiece", "torchvision"),
    *("triton", "tvm_ffi", "uvicorn", "xgrammar"),
)
# imported by its server, besides, and called by none of its own processes on a CPU
NEEDED_BY_NO_SERVER = (
    *("IPython", "gguf", "interegular", "llguidance", "openai", "openai_harmony", "outlines"),
    *("partial_json_parser", "scipy", "sentencepiece", "soundfile", "tiktoken"),
    *("torch_memory_saver", "torchao", "torchaudio", "torchvision", "triton", "tvm_ffi"),
    *("watchfiles", "xgrammar"),
)
# looked up when a model's module is imported, and called by no loader
_OPERATORS = (
    *("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu"),
    *("fused_qk_gemma_rmsnorm_with_gate_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu"),
)


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
    stand_in(_MISSING)
    _without_peers()


def stand_in(missing: Iterable[str]) -> None:
    """Lets sglang be imported without its kernels, and without those of the packages in `missing`
    that are not installed; before its import."""
    from torch.utils import _triton

    _triton.has_triton_package()  # remembered: torch must not take the stub for triton
    _triton.has_triton()
    stand_ins.install(missing, always=["sgl_kernel"])
    torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)  # type: ignore
    known = torch.library.register_fake
    torch.library.register_fake = lambda op, *a, **k: (
        (lambda f: f) if str(op).startswith("sgl_kernel::") else known(op, *a, **k)
    )
    registrar: Any = types.ModuleType("sglang.srt.configs.utils")
    registrar.register_image_processor = registrar.register_processor = lambda *_, **__: None
    sys.modules[registrar.__name__] = registrar
    from transformers.models.auto import configuration_auto

    mapping: Any = type(configuration_auto.CONFIG_MAPPING)
    register = mapping.register
    mapping.register = lambda self, key, value, exist_ok=False: register(
        self, key, value, exist_ok=True
    )


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


def build(
    place: str,
    name: str,
    config: Any,
    quantization: Any = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.nn.Module:
    """A model of this rank; place, name: the module and the class among SGLang's models."""
    kind = getattr(importlib.import_module(f"sglang.srt.models.{place}"), name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model: torch.nn.Module = kind(config=config, quant_config=quantization)
    finally:
        torch.set_default_dtype(before)
    return model.eval()
