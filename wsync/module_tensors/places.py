"""Where tensors' elements lie, and whether two tensors have some in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

_MOST_UNITS: Final = 1 << 26  # that are marked one by one


class MemoryPlace(NamedTuple):
    """Runs of `nbytes` between two addresses, as far apart as `dims` says: (step, extent), the step
    in bytes."""

    start: int
    end: int
    nbytes: int
    dims: tuple[tuple[int, int], ...]

    def meets(self, other: MemoryPlace) -> bool:
        """Whether a byte is of both."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if not self.dims and not other.dims:
            return True
        if are_apart([self, other]):
            return False
        base, end = min(self.start, other.start), max(self.end, other.end)
        steps = [step for step, _ in (*self.dims, *other.dims)]
        unit = math.gcd(self.nbytes, other.nbytes, self.start - other.start, *steps)
        if (end - base) // unit > _MOST_UNITS:
            return True  # as far as can be told
        import torch

        taken = torch.zeros((end - base) // unit, dtype=torch.bool, device="cpu")

        def runs(place: MemoryPlace) -> torch.Tensor:
            shape = (*(extent for _, extent in place.dims), place.nbytes // unit)
            strides = (*(step // unit for step, _ in place.dims), 1)
            return taken.as_strided(shape, strides, (place.start - base) // unit)

        runs(self).fill_(True)
        return bool(runs(other).any())


def are_apart(places: Sequence[MemoryPlace]) -> bool:
    """Whether no two have a byte in common, as columns of one matrix have none: all steps are
    multiples of one length, and within that length their runs do not meet.  False says nothing."""
    length = math.gcd(*(step for place in places for step, _ in place.dims))
    if not length:
        return False
    runs = sorted((place.start % length, place.nbytes) for place in places)
    runs.append((runs[0][0] + length, 0))
    return all(start + size <= after for (start, size), (after, _) in pairwise(runs))


def places_of(tensor: Any) -> list[MemoryPlace]:
    """Of a DTensor or ShardedTensor, where this rank's part is; none of what has no memory."""
    return [place for part in parts_of(tensor) if (place := _place(part)) is not None]


def parts_of(tensor: Any) -> Iterator[Any]:
    """The tensors that have the elements of this rank."""
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            yield shard.tensor
    else:
        yield getattr(tensor, "_local_tensor", tensor)


def _place(tensor: Any) -> MemoryPlace | None:
    try:
        start, item = tensor.data_ptr(), tensor.element_size()
        shape, strides = tuple(tensor.shape), tensor.stride()
    except (AttributeError, RuntimeError, ValueError):  # no tensor, a wrapper, or uninitialised
        return None
    if not start or not math.prod(shape):
        return None
    return place_at(start, item, shape, [stride * item for stride in strides])


def place_at(start: int, item: int, shape: Sequence[int], steps: Sequence[int]) -> MemoryPlace:
    """Of elements of `item` bytes, of which there are some, as far apart as steps say, in bytes."""
    run, reach, rest = item, item, list[tuple[int, int]]()
    for step, extent in sorted(zip(steps, shape, strict=True)):
        if extent == 1 or step == 0:
            continue
        if step == run and not rest:
            run *= extent
        else:
            rest.append((step, extent))
        solid = step < reach  # elements of it overlap: all in between counts
        reach += step * (extent - 1)
        if solid:
            run, rest = reach, []
    return MemoryPlace(start, start + reach, run, tuple(rest))
