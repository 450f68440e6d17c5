"""Quantised checkpoints of tiny models, made of their bfloat16 ones in plain torch.

A method says how the projections of a checkpoint are stored; all other tensors stay as they are.
The arithmetic is written down anew here: nothing of wsync's is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support import tiny_models

Tensors = dict[str, torch.Tensor]
_SMALL = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 64}
_EXPERTS = {"moe_intermediate_size": 256}
# sizes of which blocks of 128 and groups of 128 make whole ones
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {**_SMALL, "head_dim": 64},
    "qwen3_moe": {**_SMALL, **_EXPERTS, "head_dim": 64, "num_experts": 2},
    "deepseek_v3": {
        **{**_SMALL, **_EXPERTS, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64},
        **{"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 2, "n_group": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 4},
    },
}
# more columns than scales of one word are for
WIDE = {"hidden_size": 640}
_LARGEST = 448.0  # of float8_e4m3fn
EXPERTS = r"mlp\.experts\."
_PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$")


@dataclass(frozen=True)
class Method:
    """How projections are stored; `block`: rows and columns that share a scale, (1, n) for groups
    of a row.  `only`: a pattern that names of quantised tensors match."""

    kind: str
    block: Sequence[int] = (128, 128)
    only: str = ""

    def chooses(self, name: str, tensor: torch.Tensor) -> bool:
        return bool(_PROJECTION.search(name) and tensor.dim() == 2 and re.search(self.only, name))

    def quantise(self, tensors: Tensors) -> Tensors:
        """The quantised checkpoint."""
        found: Tensors = {}
        for name, tensor in tensors.items():
            if self.chooses(name, tensor):
                stem = name.removesuffix(".weight")
                made = _KINDS[self.kind](tensor, self.block)
                found |= {f"{stem}.{suffix}": part for suffix, part in made.items()}
            else:
                found[name] = tensor
        return found

    def shapes(self, shapes: tiny_models.Shapes) -> tiny_models.Shapes:
        """What the quantised checkpoint consists of."""
        made = self.quantise(tiny_models.tensors(shapes, 0))
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}

    def config(self, model: Any) -> dict[str, Any]:
        """The quantization_config of a model's configuration."""
        layers = range(model.num_hidden_layers)
        ignore = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
        if self.only == EXPERTS:  # as Kimi-K2-Thinking's checkpoint says it
            ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
            ignore += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:.*mlp\.gate$"]
        return _CONFIGS[self.kind](self.block, ignore)


def _blocks(tensor: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """[block rows, rows, block columns, columns] in float32, filled up with zeros."""
    (rows, columns), (high, wide) = tensor.shape, block
    down, across = -(-rows // high), -(-columns // wide)
    whole = torch.zeros(down * high, across * wide)
    whole[:rows, :columns] = tensor.float()
    return whole.view(down, high, across, wide)


def _codes(blocks: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    values = (blocks * (1.0 / scales)[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    down, high, across, wide = blocks.shape
    return values.reshape(down * high, across * wide)[: shape[0], : shape[1]].contiguous()


def _fp8_block(tensor: torch.Tensor, block: Sequence[int]) -> Tensors:
    blocks = _blocks(tensor, block)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-10) / _LARGEST
    codes = _codes(blocks, scales, tensor.shape).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}


def _fp8_tensor(tensor: torch.Tensor, _: Sequence[int]) -> Tensors:
    scale = tensor.abs().max().clamp(min=1e-12).float() / _LARGEST
    codes = (tensor / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.reshape(1)}


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Eight neighbours of a row in an int32."""
    rows, columns = codes.shape
    nibbles = (codes.to(torch.int64).view(rows, columns // 8, 8) + 8) << torch.arange(0, 32, 4)
    words = nibbles.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _int4_zero(tensor: torch.Tensor, block: Sequence[int]) -> Tensors:
    rows, columns = tensor.shape
    groups = tensor.view(rows, columns // block[1], block[1])
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (most - least) / 15
    zeros = (-8 - least / scales).clamp(-8, 7).round()
    codes = (groups / scales[..., None] + zeros[..., None]).clamp(-8, 7).round()
    return {
        "weight_packed": _words(codes.view(rows, columns)),
        "weight_scale": scales,
        "weight_zero_point": _words(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }


def _int4(tensor: torch.Tensor, block: Sequence[int]) -> Tensors:
    rows, columns = tensor.shape
    groups = tensor.float().view(rows, columns // block[1], block[1])
    scales = (groups.abs().amax(-1) / 7.5).to(tensor.dtype)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    return {
        "weight_packed": _words(codes.view(rows, columns)),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }


def _powers(blocks: torch.Tensor) -> torch.Tensor:
    """The least power of two that takes each block's largest into range."""
    most = blocks.abs().amax((1, 3)).clamp(min=2.0**-100) / _LARGEST
    return torch.exp2(torch.ceil(torch.log2(most)))


def _fp8_packed(tensor: torch.Tensor, block: Sequence[int]) -> Tensors:
    """As DeepGEMM takes it: for each row the exponents of four blocks in a word."""
    blocks = _blocks(tensor, block)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)).clamp(1e-4) / _LARGEST)))
    codes = _codes(blocks, scales, tensor.shape).to(torch.float8_e4m3fn)
    exponents = torch.zeros(len(scales), -(-scales.shape[1] // 4) * 4, dtype=torch.uint8)
    exponents[:, : scales.shape[1]] = (torch.log2(scales) + 127).to(torch.uint8)
    words = exponents.view(torch.int32).repeat_interleave(block[0], 0)[: len(tensor)]
    return {"weight": codes, "weight_scale_inv": words}


def _mxfp8(tensor: torch.Tensor, block: Sequence[int]) -> Tensors:
    blocks = _blocks(tensor, block)
    scales = _powers(blocks)
    codes = _codes(blocks, scales, tensor.shape).to(torch.float8_e4m3fn)
    exponents = (torch.log2(scales) + 127).to(torch.uint8)
    return {"weight": codes, "weight_scale_inv": exponents}


def _nvfp4(tensor: torch.Tensor, block: Sequence[int]) -> Tensors:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = _blocks(tensor, block)
    second = tensor.float().abs().max() / (6.0 * _LARGEST)
    scales = (blocks.abs().amax((1, 3)) / 6.0 / second).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * second)[:, None, :, None].clamp(min=1e-30)
    nearest = (scaled.abs()[..., None] - values).abs().argmin(-1)
    nibbles = (nearest + 8 * (scaled < 0)).to(torch.uint8).view(tensor.shape)
    return {
        "weight": nibbles[:, ::2] | nibbles[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": second,
    }


_KINDS: dict[str, Callable[[torch.Tensor, Sequence[int]], Tensors]] = {
    "fp8_block": _fp8_block,
    "fp8_packed": _fp8_packed,
    "fp8_tensor": _fp8_tensor,
    "int4": _int4,
    "int4_zero": _int4_zero,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def _fp8_config(block: Sequence[int], ignore: list[str]) -> dict[str, Any]:
    return {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
        **{"weight_block_size": list(block), "modules_to_not_convert": ignore},
    }


def _fp8_tensor_config(_: Sequence[int], ignore: list[str]) -> dict[str, Any]:
    return {
        **{"quant_method": "fp8", "activation_scheme": "dynamic"},
        "modules_to_not_convert": ignore,
    }


def _int4_config(block: Sequence[int], ignore: list[str]) -> dict[str, Any]:
    weights = {
        **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"},
        **{"group_size": block[1], "dynamic": False, "actorder": None},
    }
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                **{"targets": ["Linear"], "weights": weights},
                **{"input_activations": None, "output_activations": None},
            }
        },
        "ignore": ignore,
    }


def _int4_zero_config(block: Sequence[int], ignore: list[str]) -> dict[str, Any]:
    made = _int4_config(block, ignore)
    made["config_groups"]["group_0"]["weights"]["symmetric"] = False
    return made


def _mxfp8_config(block: Sequence[int], ignore: list[str]) -> dict[str, Any]:
    return {
        **{"quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
        **{"weight_block_size": list(block), "modules_to_not_convert": ignore},
        "scale_fmt": "ue8m0",
    }


def _nvfp4_config(block: Sequence[int], ignore: list[str]) -> dict[str, Any]:
    return {
        **{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": block[1]},
        **{"kv_cache_quant_algo": None, "ignore": ignore, "exclude_modules": ignore},
    }


_CONFIGS: dict[str, Callable[[Sequence[int], list[str]], dict[str, Any]]] = {
    "fp8_block": _fp8_config,
    "fp8_packed": _fp8_config,
    "fp8_tensor": _fp8_tensor_config,
    "int4": _int4_config,
    "int4_zero": _int4_zero_config,
    "mxfp8": _mxfp8_config,
    "nvfp4": _nvfp4_config,
}
