"""Digits as values of a dtype: exact in it and in every wider one, so that copies keep them.

A digit of a format of two bytes and more is a bfloat16 value between 0 and 1 with a fraction that
no format of one byte has.  A norm's 1 + weight is none of these.
"""

from __future__ import annotations

from typing import Final

import torch

# neither zero nor NaN as uint8, int8, float8_e4m3fn, float8_e5m2 and float8_e8m0fnu
_BYTES: Final = (*range(1, 124), *range(129, 252))
_FRACTIONS: Final = 120  # of seven bits, without the multiples of 16
_TOP: Final = 126  # the exponent of the first digits; later ones are smaller
_BFLOATS: Final = _TOP * _FRACTIONS
_HALVES: Final = 14 * _FRACTIONS  # those of them that float16 has, too
_INTEGERS: Final = (1 << 15) - 2
WIDE: Final = "wide"
BYTE: Final = "byte"
INTEGER: Final = "integer"


def kind_of(dtype: torch.dtype) -> str:
    """How values of a dtype are read; "": not at all.  Copies within a kind can be followed."""
    if dtype == torch.bool or dtype.is_complex:
        return ""
    if dtype.itemsize == 1:
        return BYTE
    return WIDE if dtype.is_floating_point else INTEGER


def base_of(dtype: torch.dtype) -> int:
    """How many digits a dtype has."""
    if kind_of(dtype) == WIDE:
        return _BFLOATS if dtype == torch.bfloat16 else _HALVES
    return common_base(kind_of(dtype))


def common_base(kind: str) -> int:
    """How many digits every dtype of a kind has."""
    return {WIDE: _HALVES, BYTE: len(_BYTES), INTEGER: _INTEGERS}[kind]


def encode(digits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a dtype for digits, which are less than its base."""
    kind = kind_of(dtype)
    if kind == BYTE:
        values = torch.tensor(_BYTES, dtype=torch.uint8, device="cpu")
        return values[digits].view(dtype)
    if kind == INTEGER:
        return (digits + 1).to(dtype)
    power, fraction = digits // _FRACTIONS, digits % _FRACTIONS
    bits = (_TOP - power) << 7 | fraction + fraction // 15 + 1
    return bits.to(torch.int16).view(torch.bfloat16).to(dtype)


def decode(values: torch.Tensor) -> torch.Tensor:
    """The digits that values stand for; -1 where they stand for none."""
    kind = kind_of(values.dtype)
    if kind == BYTE:
        table = torch.full((256,), -1, device="cpu")
        table[list(_BYTES)] = torch.arange(len(_BYTES), device="cpu")
        return table[values.contiguous().view(torch.uint8).long()]
    if kind == INTEGER:
        return torch.where((values > 0) & (values <= _INTEGERS), values.long() - 1, -1)
    short = values.to(torch.bfloat16)
    bits = short.contiguous().view(torch.int16).long()
    power, fraction = _TOP - (bits >> 7), bits & 0x7F
    digits = power * _FRACTIONS + fraction - fraction // 16 - 1
    exact = (short.to(values.dtype) == values) & (bits > 0) & (fraction % 16 > 0)
    return torch.where(exact & (power >= 0) & (digits < _BFLOATS), digits, -1)
