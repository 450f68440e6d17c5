"""Writes digits as values of a dtype.  Every wider dtype holds these values exactly.

In a floating-point format of two bytes or more, a digit is a bfloat16 value between 0 and 1.  Its
fraction is one that no format of one byte has.  Some engines keep 1 + weight for a norm.  This sum
is larger than 1, so it is never mistaken for a digit.
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
    # the bits of bfloat16 values, from the largest exponent to the smallest
    WIDE: [power << 7 | fraction for power in range(126, 0, -1) for fraction in _FRACTIONS],
    # bytes that are finite and not zero as uint8, int8, float8_e4m3fn, float8_e5m2, float8_e8m0fnu
    BYTE: [*range(1, 124), *range(129, 252)],
    INTEGER: range(1, (1 << 15) - 1),  # int16
}


def kind_of(dtype: torch.dtype) -> str:
    """Returns the kind of digits that a dtype can hold, or "" if it can hold none.  Copies can be
    followed only between dtypes of one kind."""
    if dtype == torch.bool or dtype.is_complex:
        return ""
    if dtype.itemsize == 1:
        return BYTE
    return WIDE if dtype.is_floating_point else INTEGER


def base_of(dtype: torch.dtype) -> int:
    """Returns how many different digits a dtype can hold."""
    return len(_BITS[WIDE]) if dtype == torch.bfloat16 else common_base(kind_of(dtype))


def common_base(kind: str) -> int:
    """Returns how many different digits every dtype of a kind can hold."""
    # float16 has 14 exponents below 1
    return 14 * len(_FRACTIONS) if kind == WIDE else len(_BITS[kind])


def encode(digits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of a dtype that stand for digits.  Digits are less than the base."""
    kind = kind_of(dtype)
    bits = _tables(kind)[0][digits]
    if kind == BYTE:
        return bits.to(torch.uint8).view(dtype)
    return bits.to(torch.int16).view(_carrier(kind)).to(dtype)


def decode(values: torch.Tensor) -> torch.Tensor:
    """Returns the digits that values stand for.  If a value is no digit, its item is -1."""
    kind = kind_of(values.dtype)
    short = values if kind == BYTE else values.to(_carrier(kind))
    digits = _tables(kind)[1][raw(short).long() & 0xFFFF]
    return digits if kind == BYTE else digits.where(short.to(values.dtype) == values, -1)


def _carrier(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == WIDE else torch.int16


@functools.cache
def _tables(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bits of each digit, and for each pattern of 16 bits its digit or -1."""
    bits = torch.tensor(_BITS[kind], device="cpu")
    digits = torch.full((1 << 16,), -1, device="cpu")
    digits[bits] = torch.arange(len(bits), device="cpu")
    return bits, digits
