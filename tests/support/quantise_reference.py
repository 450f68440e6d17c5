"""What trainers' quantisers compute, in plain torch: one function for each method of
csrc/core/quantise/method.h, written from their sources and sharing nothing with wsync.

Weights are matrices of float32, bfloat16 or float16.  A block that holds a NaN becomes NaN as a
whole, where trainers' kernels may drop it; all else is theirs bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
FLOAT_MAX = torch.finfo(torch.float32).max
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Quantised:
    """codes: e4m3 [M, N], int32 [M, ceil(N / 8)] of int4, or uint8 [M, ceil(N / 2)] of e2m1.
    scale: one for each block.  second: nvfp4's float32 []."""

    codes: Tensor
    scale: Tensor
    second: Tensor | None = None


def amax_of(weight: Tensor) -> Tensor:
    return weight.float().abs().amax()


def _blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """float32 [block rows, rows, block columns, columns], with zeros beyond the edges."""
    height, width = weight.shape
    above, aside = -(-height // rows), -(-width // columns)
    padded = torch.zeros(above * rows, aside * columns)
    padded[:height, :width] = weight.float()
    return padded.view(above, rows, aside, columns)


def _amaxes(blocks: Tensor) -> Tensor:
    return blocks.abs().amax((1, 3), keepdim=True)


def _whole(blocks: Tensor, weight: Tensor) -> Tensor:
    above, rows, aside, columns = blocks.shape
    return blocks.reshape(above * rows, aside * columns)[: weight.shape[0], : weight.shape[1]]


def _scales(scale: Tensor) -> Tensor:
    """[block rows, block columns], every NaN with the same bits."""
    flat = scale[:, 0, :, 0]
    return torch.where(flat.isnan(), torch.tensor(torch.nan, dtype=flat.dtype), flat)


def _e4m3(values: Tensor) -> Tensor:
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous().view(torch.uint8)
    return torch.where(values.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes).view(E4M3)


def fp8_block(
    weight: Tensor, block: tuple[int, int] = (128, 128), reciprocal: bool = True
) -> Quantised:
    """slime's blockwise_cast_to_fp8_triton; not reciprocal: DeepSeek-V3's, x / scale."""
    blocks = _blocks(weight, *block)
    scale = _amaxes(blocks).clamp(min=1e-10) / E4M3_MAX
    values = blocks * (1.0 / scale) if reciprocal else blocks / scale
    return Quantised(_e4m3(_whole(values, weight)), _scales(scale))


def fp8_ue8m0(weight: Tensor, block: tuple[int, int] = (128, 128)) -> Quantised:
    """DeepGEMM's per_block_cast_to_fp8 with scales that are powers of two."""
    blocks = _blocks(weight, *block)
    quotient = _amaxes(blocks).clamp(min=1e-4) / E4M3_MAX
    mantissa, exponent = torch.frexp(quotient)  # in [0.5, 1)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(quotient), power)
    scale = torch.where(quotient.isinf(), torch.tensor(2.0**127), scale)
    scale = torch.where(quotient.isnan(), quotient, scale)
    return Quantised(_e4m3(_whole(blocks / scale, weight)), _scales(scale))


def fp8_packed(weight: Tensor, block: tuple[int, int] = (128, 128)) -> Quantised:
    """The same, with scales as DeepGEMM's kernels take them: int32 [M, ceil(block columns / 4)],
    for each row the exponents of four blocks in a word, the first one lowest."""
    made = fp8_ue8m0(weight, block)
    exponents = made.scale.view(torch.int32) >> 23
    rows = exponents[torch.arange(weight.shape[0]) // block[0]]
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4)).to(torch.uint8)
    return Quantised(made.codes, padded.contiguous().view(torch.int32))


def fp8_tensor(weight: Tensor, amax: Tensor | None = None) -> Quantised:
    """slime's per-tensor FP8.  amax: of the whole tensor, where this is a part of it.
    A bfloat16 floor of 1e-12; 1e-12 itself in float16, in which it would be 0."""
    floor = torch.tensor(1e-12, dtype=weight.dtype).float()
    floor = torch.where(floor == 0, torch.tensor(1e-12), floor)
    most = amax_of(weight) if amax is None else amax
    scale = torch.maximum(most, floor) / E4M3_MAX
    values = (weight.float() / scale).to(weight.dtype)
    return Quantised(_e4m3(values.float()), _scales(scale.view(1, 1, 1, 1)).view(1))


def pack_int4(codes: Tensor) -> Tensor:
    """int32 [M, ceil(N / 8)] of integers from -8 to 7: element j of a word in bits 4 j to 4 j + 3,
    plus 8; what is beyond the last column is 0."""
    height, width = codes.shape
    padded = torch.zeros(height, -(-width // 8) * 8, dtype=torch.int64)
    padded[:, :width] = codes.long() + 8
    words = (padded.view(height, -1, 8) << (4 * torch.arange(8))).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4(weight: Tensor, group: int = 32) -> Quantised:
    """compressed-tensors' symmetric groups: every step in the weights' dtype."""
    dtype = weight.dtype
    blocks = _blocks(weight, 1, group)
    scale = (_amaxes(blocks) / 7.5).to(dtype)
    scale = torch.where(scale == 0, torch.tensor(torch.finfo(dtype).eps, dtype=dtype), scale)
    values = (blocks / scale.float()).to(dtype).float()
    codes = values.nan_to_num(nan=0.0).clamp(-8, 7).round()
    return Quantised(pack_int4(_whole(codes, weight)), _scales(scale))


def int4_slime(weight: Tensor, group: int = 32) -> Quantised:
    """slime's fake_int4_quant_cuda and pack_layer: the stored scale is a rounded one."""
    blocks = _blocks(weight, 1, group)
    scale = (_amaxes(blocks) * torch.tensor(1.0 / 7.0)).clamp(min=1e-5)
    codes = (blocks / scale).nan_to_num(nan=0.0).round().clamp(-7, 7)
    return Quantised(pack_int4(_whole(codes, weight)), _scales(scale.to(weight.dtype)))


def mxfp8(weight: Tensor) -> Quantised:
    """Transformer Engine's MXFP8Quantizer, along rows; scales are exponents, uint8.  With an
    exponent of 0 its kernels take weights as they are."""
    blocks = _blocks(weight, 1, 32)
    amax = _amaxes(blocks) * torch.tensor(1.0 / E4M3_MAX)
    mantissa, exponent = torch.frexp(amax)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = torch.where(amax == 0, -127, power.clamp(min=-127))
    power = torch.where(amax.isinf(), 127, power)
    exponents = torch.where(power == -127, 0, power)
    values = blocks.double() / torch.pow(2.0, exponents.double())  # exact
    values = torch.where(amax.isnan(), torch.nan, values)
    scale = torch.where(amax.isnan(), 0xFF, power + 127).to(torch.uint8)
    return Quantised(_e4m3(_whole(values, weight).float()), scale[:, 0, :, 0])


def e2m1(values: Tensor) -> Tensor:
    """uint8 codes of 4 bits: nearest, of two the even one; the sign of a zero is kept."""
    middles = (_E2M1[1:] + _E2M1[:-1]) / 2
    magnitude = values.abs()
    low = torch.bucketize(magnitude, middles)  # middles below it
    high = torch.bucketize(magnitude, middles, right=True)
    codes = torch.where(low % 2 == 0, low, high)
    codes = codes | (values.signbit().long() << 3)
    return torch.where(values.isnan(), 7, codes).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    height, width = codes.shape
    padded = torch.zeros(height, width + width % 2, dtype=torch.uint8)
    padded[:, :width] = codes
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def nvfp4(weight: Tensor, amax: Tensor | None = None) -> Quantised:
    """Transformer Engine's NVFP4 of rows, without Hadamard transform and random rounding.
    amax: of all that shares the second scale; its kernel's 1 stands for those of 0 and inf."""
    most = amax_of(weight) if amax is None else amax
    encode = torch.tensor(E4M3_MAX * E2M1_MAX) / most
    encode = torch.where((most == 0) | (encode == 0), torch.ones(()), encode.clamp(max=FLOAT_MAX))
    second = 1.0 / encode
    blocks = _blocks(weight, 1, 16)
    scale = _e4m3(_amaxes(blocks) * (encode * torch.tensor(1.0 / E2M1_MAX)))
    factor = (1.0 / (scale.float() * second)).clamp(max=FLOAT_MAX)
    codes = e2m1(_whole(blocks * factor, weight).clamp(-E2M1_MAX, E2M1_MAX))
    return Quantised(pack_e2m1(codes), scale[:, 0, :, 0], second)
