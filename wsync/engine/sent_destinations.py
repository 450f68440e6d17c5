"""Destinations of an update in memory that a trainer of this process sends from, as when its
tensors have become an engine's, under other names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any, Final, NamedTuple

from wsync._core import BufferTable, Layout, LayoutError
from wsync.machine.sent_memory import is_sent, sent, sent_buffers
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names_in_messages import listed
from wsync.module_tensors.places import MemoryPlace, place_at

REASON: Final = (
    "memory that a trainer of this process is sending, which would send that in place of its own "
    "weights; nothing was loaded; have the engine hold a copy (copy.deepcopy)"
)


class Made(NamedTuple):
    """Bytes of a buffer that are written beside the boxes of a layout, and whose they are."""

    name: str
    buffer: int
    low: int
    high: int


class _Box(NamedTuple):
    """A box of a tensor in memory; strides in bytes."""

    name: str
    dtype: str
    address: int
    start: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def place(self) -> MemoryPlace:
        return place_at(self.address, dtype_of(self.dtype).itemsize, self.extent, self.strides)

    def same(self, other: _Box) -> bool:
        """Whether each element that both have is in one place."""
        if self[:2] != other[:2] or len(self.extent) != len(other.extent):
            return False
        apart = other.address - self.address
        for one, two, first, second, step, other_step in zip(
            *(self.start, other.start, self.extent, other.extent, self.strides, other.strides),
            strict=True,
        ):
            low, high = max(one, two), min(one + first, two + second)
            if low >= high or (max(first, second) > 1 and step != other_step):
                return False
            apart += (low - two) * other_step - (low - one) * step
        return apart == 0


def check_not_sent(layout: Layout, buffers: BufferTable, made: Iterable[Made] = ()) -> None:
    """LayoutError where buffers of a layout are memory that is being sent from, unless a tensor
    goes to where it comes from: what is written there is what is there.  made: what is not."""
    tables = sent()
    numbers = sent_buffers(buffers) if tables else None
    if not numbers:
        return
    met = [each for each in made if each.buffer in numbers]
    spans = ((buffers[each.buffer][0] + each.low, each.high - each.low) for each in met)
    wrong = {each.name for each in compress(met, is_sent(spans))}
    sources = sorted(
        ((box.place, box) for layout, table in tables for box in _boxes(layout, table)),
        key=lambda found: found[0].start,
    )
    starts = [place.start for place, _ in sources]
    longest = max((place.end - place.start for place, _ in sources), default=0)
    for box in _boxes(layout, buffers):
        place = box.place
        first = bisect_left(starts, place.start - longest)
        for other, source in sources[first : bisect_left(starts, place.end)]:
            if other.end > place.start and not box.same(source) and place.meets(other):
                wrong.add(f"{box.name} (where {source.name} is)")
    if wrong:
        raise LayoutError(f"{listed(wrong)} would be loaded to {REASON}")


def _boxes(layout: Layout, buffers: Any) -> Iterator[_Box]:
    """Those that have bytes.  buffers: where each begins, first of all."""
    for index in range(layout.tensor_count):
        name, dtype, *_ = layout.tensor(index)
        for shard in layout.shards(index):
            if all(shard.extent) and shard.buffer < len(buffers):
                address = buffers[shard.buffer][0] + shard.offset
                yield _Box(name, dtype, address, shard.start, shard.extent, shard.strides)
