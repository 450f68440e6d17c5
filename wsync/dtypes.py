"""Dtypes by the names that layouts have for them, which are torch's."""

import torch

from wsync._core import LayoutError


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype; LayoutError where this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype
