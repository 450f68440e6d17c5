"""A small oracle in pure Python: layouts as sets of addresses, copies as loops over elements."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

from wsync import _core

Index = tuple[int, ...]
Address = tuple[int, int, int]  # rank, buffer, byte offset
Elements = dict[str, dict[Index, list[Address]]]

ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int64": 8, "uint8": 1}
TRANSFORMS = {0: None, 1: ("f32", "bf16"), 2: ("f32", "f16"), 3: ("bf16", "f32")}


def cells(start: Sequence[int], extent: Sequence[int]) -> Iterator[Index]:
    """Every index of a box, row-major."""
    return itertools.product(*(range(s, s + e) for s, e in zip(start, extent, strict=True)))


def elements(layout: _core.Layout) -> Elements:
    """Where a layout keeps every element: addresses in the order of its shards."""
    found: Elements = {}
    for number, name in enumerate(layout.names()):
        places = found.setdefault(name, {})
        for rank, buffer, offset, start, extent, strides, _ in layout.shards(number):
            for index in cells(start, extent):
                steps = (
                    (i - s) * stride for i, s, stride in zip(index, start, strides, strict=True)
                )
                places.setdefault(index, []).append((rank, buffer, offset + sum(steps)))
    return found


def compose(
    rank: int,
    buffer: int,
    item_nbytes: int,
    strides: Sequence[int],
    regions: Sequence[_core.Region],
    maps: Sequence[_core.Map],
) -> tuple[Elements, int]:
    """What LayoutBuilder.add_parameter must make known, one element at a time; and how many."""
    found: Elements = {}
    count = 0
    for name, _, _, target_start, source_start, extent, axes, _ in maps:
        places = found.setdefault(name, {})
        for (start, size, local), step in itertools.product(
            regions, list(cells([0] * len(extent), extent))
        ):
            source = list(source_start)
            for axis, along in zip(axes, step, strict=True):
                if axis >= 0:
                    source[axis] += along
            inside = [i - s for i, s in zip(source, start, strict=True)]
            if not all(0 <= i < n for i, n in zip(inside, size, strict=True)):
                continue
            target = tuple(t + along for t, along in zip(target_start, step, strict=True))
            offset = sum(
                (first + i) * stride
                for first, i, stride in zip(local, inside, strides, strict=True)
            )
            places.setdefault(target, []).append((rank, buffer, offset * item_nbytes))
            count += 1
    return found, count


def convert(data: bytes, transform: int) -> bytes:
    """One element on its way through a transform: round to nearest, ties to even."""
    kinds = TRANSFORMS[transform]
    if kinds is None:
        return data
    if kinds == ("bf16", "f32"):
        return b"\0\0" + data
    if kinds == ("f32", "f16"):
        return struct.pack("<e", struct.unpack("<f", data)[0])
    (bits,) = struct.unpack("<I", data)
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def apply(
    copies: Sequence[_core.CopyTuple],
    item_nbytes: int,
    sources: Sequence[bytes | bytearray],
    destinations: Sequence[bytearray],
) -> int:
    """Runs copies whose source items have `item_nbytes` bytes; returns the bytes written."""
    written = 0
    for source, destination, source_at, destination_at, row, transform, extent, a, b in copies:
        out_nbytes = len(convert(bytes(item_nbytes), transform))
        for step in cells([0] * len(extent), extent):
            for i in range(row):
                at = source_at + i * item_nbytes + sum(map(int.__mul__, step, a))
                to = destination_at + i * out_nbytes + sum(map(int.__mul__, step, b))
                item = bytes(sources[source][at : at + item_nbytes])
                assert len(item) == item_nbytes and to + out_nbytes <= len(
                    destinations[destination]
                )
                destinations[destination][to : to + out_nbytes] = convert(item, transform)
                written += out_nbytes
    return written
