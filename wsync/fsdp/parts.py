"""One rank's parts of parameters, as boxes in local tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsync.layout import WRAPPERS, global_name

if TYPE_CHECKING:
    from torch import Tensor

TIED = "lm_head.weight"

Shape = tuple[int, ...]
Regions = tuple[tuple[Shape, Shape, Shape], ...]  # each one a _core.Region
Form = tuple[str, Shape, Regions, Shape | None]


@dataclass(frozen=True)
class Part:
    """The boxes of a parameter in one local tensor.

    `strides`: element strides of the boxes, if they differ from the local tensor's.
    """

    name: str
    tensor: Tensor
    shape: Shape
    regions: Regions
    strides: Shape | None = None

    @property
    def form(self) -> Form:
        """All fields except the tensor."""
        return self.name, self.shape, self.regions, self.strides


def plain_name(name: str) -> str:
    """A name without the path components of wrappers."""
    return global_name(".".join(part for part in name.split(".") if part not in WRAPPERS))


def joined(*names: str) -> str:
    """A path of its components; empty components are left out."""
    return ".".join(filter(None, names))
