"""quantise_reference.py against quantisers of others, in a process that has their versions.

    python quantise_oracles.py PACKAGES SGLANG TORCHAO

Folders of: what SGLang imports (compressed-tensors, transformers 5), SGLang's wheel, torchao's
wheel.  Prints, as JSON, for each comparison [elements compared, elements that differ].
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACKAGES, SGLANG, TORCHAO = sys.argv[1:]
sys.path.insert(0, PACKAGES)
sys.path.append(str(Path(__file__).parent))
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)  # torchao's libraries are for GPUs

import deep_gemm_stub  # noqa: E402
import quantise_reference as reference  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
found: dict[str, list[int]] = {}


def compare(name: str, *pairs: tuple[Tensor, Tensor]) -> None:
    total = found.setdefault(name, [0, 0])
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
        assert ours.element_size() == theirs.element_size(), (name, ours.dtype, theirs.dtype)
        a, b = (t.contiguous().view(torch.uint8).view(-1, t.element_size()) for t in (ours, theirs))
        total[0] += len(a)
        total[1] += int((a != b).any(1).sum())


def bytes_of(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, zeros of both signs and subnormal numbers among them; halves
    of rows have nothing else."""
    values = torch.randn(rows, columns) * torch.exp(torch.rand(rows, 1) * 10 - 9)
    values[torch.rand(rows, columns) < 0.01] = 0
    values[torch.rand(rows, columns) < 0.01] = -0.0
    small = (torch.randn(rows, columns) * torch.finfo(dtype).smallest_normal / 4).to(dtype)
    few = torch.rand(rows, columns) < 0.01
    few[5::32, : columns // 2] = True
    return torch.where(few, small, values.to(dtype))


def torch_itself() -> None:
    """slime's two lines for FP8 of whole tensors."""
    for dtype in FLOATS:
        weight = weights(300, 200, dtype)
        scale = weight.abs().max().clamp(min=1e-12).to(torch.float32) / 448.0
        codes = (weight / scale).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)
        ours = reference.fp8_tensor(weight)
        compare("fp8_tensor, torch", (ours.codes, codes), (ours.scale, scale.view(1)))


def compressed_tensors() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    for dtype in FLOATS:
        for group in (32, 128):
            rule = QuantizationArgs(
                num_bits=4, type="int", strategy="group", group_size=group, symmetric=True
            )
            weight = weights(64, 512, dtype)
            weight[:2] = 0
            groups = weight.view(64, -1, group)
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), rule)
            codes = quantize(weight, scale, zero, rule, dtype=torch.int8)
            ours = reference.int4(weight, group)
            compare(
                "int4, compressed-tensors",
                (ours.codes, pack_to_int32(codes, 4)),
                (ours.scale, scale),
            )
    codes = torch.randint(-8, 8, (64, 20), dtype=torch.int8)
    compare("padding, compressed-tensors", (reference.pack_int4(codes), pack_to_int32(codes, 4)))
    rule = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True
    )
    weight = weights(256, 384)
    blocks = weight.view(2, 128, 3, 128)
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), rule)
    codes = quantize(weight, scale, zero, rule, dtype=torch.float8_e4m3fn)
    ours = reference.fp8_block(weight, reciprocal=False)
    # it adds a zero point of 0, of which -0 becomes 0
    unsigned = [torch.where(c == 0x80, 0, c) for c in map(bytes_of, (ours.codes, codes))]
    compare("fp8_block, compressed-tensors", (unsigned[0], unsigned[1]), (ours.scale, scale))


def transformers() -> None:
    """It multiplies by 448 / amax and stores 1 / that: the same only where both are powers of two,
    or are made to be."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    def quantise(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
        config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=scales)
        made: dict[str, Any] = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert(
            {"a.weight": weight}
        )
        return made["a.weight"], made["a.weight_scale_inv"].float()

    for dtype in FLOATS:
        weight = weights(256, 384, dtype).clamp(-0.4, 0.4)
        weight[::128, ::128] = 0.4375  # 448 / 1024
        codes, scale = quantise(weight, "float")
        for reciprocal in (True, False):
            ours = reference.fp8_block(weight, reciprocal=reciprocal)
            compare("fp8_block, transformers", (ours.codes, codes), (ours.scale, scale))
        weight = weights(256, 384, dtype)
        codes, scale = quantise(weight, "float")
        ours = reference.fp8_block(weight)
        compare("fp8_block codes, transformers", (ours.codes, codes))
        assert torch.allclose(ours.scale, scale, rtol=2.5e-7, atol=0)
        codes, scale = quantise(weight, "ue8m0")
        ours = reference.fp8_ue8m0(weight)
        compare("fp8_ue8m0, transformers", (ours.codes, codes), (ours.scale, scale))


def sglang() -> None:
    text = (Path(SGLANG) / "sglang/srt/layers/quantization/fp8_utils.py").read_text()
    names: dict[str, Any] = {
        "torch": torch,
        "Tuple": tuple,
        "List": list,
        "ceil_div": lambda a, b: -(-a // b),
        "ceil_align": lambda a, b: -(-a // b) * b,
    }
    for name in (
        *("ceil_to_ue8m0", "per_block_cast_to_fp8", "quant_weight_ue8m0"),
        *("transform_scale_ue8m0", "_get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl"),
    ):
        start = text.index(f"def {name}(")
        exec(text[start : text.find("\n\n\n", start)], names)
    sys.modules |= deep_gemm_stub.modules()
    for shape in ((200, 300), (128, 128), (130, 1000)):
        weight = weights(*shape, torch.bfloat16)
        weight[:128, :128] *= 1e-5
        codes, scale = names["quant_weight_ue8m0"](weight, [128, 128])
        ours = reference.fp8_ue8m0(weight)
        compare("fp8_ue8m0, SGLang", (ours.codes, codes), (ours.scale, scale))
        packed = names["transform_scale_ue8m0"](scale, mn=shape[0], use_torch_impl=True)
        ours = reference.fp8_packed(weight)
        words = packed.flatten().view(packed.shape)  # as a bucket of slime's has them
        compare("fp8_packed, SGLang", (ours.codes, codes), (ours.scale, words))


def torchao() -> None:
    sys.path.insert(0, TORCHAO)  # transformers would ask for its version, which lies elsewhere
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    for dtype in (torch.float32, torch.bfloat16):
        weight = weights(256, 512, dtype)
        weight[:2] = 0
        scale, codes = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        ours = reference.mxfp8(weight)
        compare("mxfp8, torchao", (ours.codes, codes), (ours.scale, scale.view(torch.uint8)))
        # no blocks so small that torchao keeps their scales from 0
        weight = (torch.randn(512, 512) * torch.exp(torch.rand(512, 1))).to(dtype)
        ours = reference.nvfp4(weight)
        assert ours.second is not None
        scale, codes = nvfp4_quantize(weight, per_tensor_scale=ours.second)
        scale = scale.view_as(ours.scale)
        compare("nvfp4 scales, torchao", (ours.scale, scale))
        same = (ours.scale.view(torch.uint8) == scale.view(torch.uint8)).repeat_interleave(8, 1)
        compare("nvfp4 codes, torchao", (ours.codes[same], codes.view(torch.uint8)[same]))


for oracle in (torch_itself, compressed_tensors, transformers, sglang, torchao):
    oracle()
print(json.dumps(found))
