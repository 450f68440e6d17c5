"""Megatron-Bridge on a machine without a GPU: import this before anything of Megatron's.

What Megatron-Core and Megatron-Bridge import and a conversion never calls has stand-ins: the
kernels of triton, of flash-linear-attention and of mamba_ssm.
"""

import importlib
import os
import sys
import types
import typing

import torch
import torch._inductor.compile_fx  # asks what kind of triton there is, which must be none
import typing_extensions
from support import kimi_vision, megatron_cpu, plain_mamba
from torch.utils import _triton

from wsync.demo import stand_ins


def _normalized(x, eps=1e-6, **_):
    return (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class _OnlyCpu(types.ModuleType):
    """torch, whose every device is the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(*_):
        return torch.device("cpu")


_scatter = torch.distributed.scatter


def _contiguous(tensor, scatter_list=None, **options):
    """Of tensors that are not contiguous, gloo sends wrong values and says nothing."""
    parts = [part.contiguous() for part in scatter_list] if scatter_list else scatter_list
    return _scatter(tensor, parts, **options)


_triton.has_triton_package()  # remembered
_triton.has_triton()
stand_ins.install(["triton", "fla"])
importlib.import_module("fla.modules.l2norm").l2norm = _normalized
if not hasattr(typing, "override"):  # of Python 3.12, for which Megatron-Core 0.19 is made
    typing.override = typing_extensions.override
torch.distributed.scatter = _contiguous
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # or deterministic_mode is refused
_cpu = megatron_cpu.on_cpu()  # for as long as the process lives
_cpu.__enter__()

# Only for Megatron: transformers goes by its own plain torch.
_KERNELS = [f"mamba_ssm.ops.triton.{part}" for part in ("layernorm_gated", "ssd_combined")]
sys.modules.update(dict.fromkeys(_KERNELS, plain_mamba))
importlib.import_module("megatron.core.ssm.mamba_mixer")
for _kernel in _KERNELS:
    del sys.modules[_kernel]

import megatron.bridge  # noqa: E402

if hasattr(megatron.bridge.models, "minimax_m2"):  # it sends norms through a GPU
    megatron.bridge.models.minimax_m2.minimax_m2_bridge.torch = _OnlyCpu("torch")
if hasattr(megatron.bridge.models, "kimi_vl"):
    _kimi = importlib.import_module("megatron.bridge.models.kimi_vl.modeling_kimi_k25_vl")
    _kimi.get_class_from_dynamic_module = lambda name, *_, **__: getattr(
        kimi_vision, name.rsplit(".", 1)[-1]
    )
