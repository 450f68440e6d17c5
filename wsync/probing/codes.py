"""Digits as values of a dtype: exact in it and in every wider one, so that copies keep them.

A digit of a format of two bytes and more is a bfloat16 value between 0 and 1 with a fraction that
no format of one byte has.  A norm's 1 + weight is none of these.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

from wsync.probing.lines import raw

WIDE: Final = "wide"
BYTE: Final = "byte"
INTEGER: Final = "integer"
_FRACTIONS: Final = [fraction for fraction in range(1 << 7) if fraction % 16]
_BITS: Final = {
    # bfloat16; each exponent is smaller than the one before
    WIDE: [power << 7 | fraction for power in range(126, 0, -1) for fraction in _FRACTIONS],
    # neither zero nor NaN as uint8, int8, float8_e4m3fn, float8_e5m2 and float8_e8m0fnu
    BYTE: [*range(1, 124), *range(129, 252)],
    INTEGER: range(1, (1 << 15) - 1),  # int16
}


def kind_of(dtype: torch.dtype) -> str:
    """How values of a dtype are read; "": not at all.  Copies within a kind can be followed."""
    if dtype == torch.bool or dtype.is_complex:
        return ""
    if dtype.itemsize == 1:
        return BYTE
    return WIDE if dtype.is_floating_point else INTEGER


def base_of(dtype: torch.dtype) -> int:
    """How many digits a dtype has."""
    return len(_BITS[WIDE]) if dtype == torch.bfloat16 else common_base(kind_of(dtype))


def common_base(kind: str) -> int:
    """How many digits every dtype of a kind has."""
    return 14 * len(_FRACTIONS) if kind == WIDE else len(_BITS[kind])  # as many as float16 has


def encode(digits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a dtype for digits, which are less than its base."""
    kind = kind_of(dtype)
    bits = _tables(kind)[0][digits]
    if kind == BYTE:
        return bits.to(torch.uint8).view(dtype)
    return bits.to(torch.int16).view(_carrier(kind)).to(dtype)


def decode(values: torch.Tensor) -> torch.Tensor:
    """The digits that values stand for; -1 if they stand for none."""
    kind = kind_of(values.dtype)
    short = values if kind == BYTE else values.to(_carrier(kind))
    digits = _tables(kind)[1][raw(short).long() & 0xFFFF]
    return digits if kind == BYTE else digits.where(short.to(values.dtype) == values, -1)


def _carrier(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == WIDE else torch.int16


@functools.cache
def _tables(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of each digit, and the digit of all bits, or -1."""
    bits = torch.tensor(_BITS[kind], device="cpu")
    digits = torch.full((1 << 16,), -1, device="cpu")
    digits[bits] = torch.arange(len(bits), device="cpu")
    return bits, digits
