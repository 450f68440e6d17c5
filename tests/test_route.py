"""Routes: every wanted byte comes from the first holder, and no other byte is written."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from random import Random

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import Box, box_in, patient, strides_of

from wsync import _core


def grid(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """The whole tensor, cut along a few planes, in any order."""
    intervals = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=1)) if size > 1 else ())
        edges = [0, *cuts, size]
        intervals.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    boxes = [
        (tuple(start for start, _ in cell), tuple(extent for _, extent in cell))
        for cell in itertools.product(*intervals)
    ]
    return list(draw(st.permutations(boxes)))


def add_boxes(
    draw: st.DrawFn,
    builder: _core.LayoutBuilder,
    dtype: str,
    shape: Sequence[int],
    boxes: Sequence[Box],
    name: str,
    buffers: list[int],
) -> None:
    """Adds boxes after what the buffers already hold; `buffers` are their sizes in bytes."""
    for start, extent in boxes:
        buffer = draw(st.integers(0, len(buffers) - 1))
        strides, nbytes = strides_of(draw, extent, reference.ITEM_NBYTES[dtype])
        builder.add_shard(name, dtype, shape, start, extent, buffer, buffers[buffer], strides)
        buffers[buffer] += nbytes


@st.composite
def routes(draw: st.DrawFn) -> tuple[_core.Layout, _core.Layout, list[int], list[int], str]:
    dtype = draw(st.sampled_from(["bfloat16", "float32", "uint8"]))
    source, destination = _core.LayoutBuilder(2), _core.LayoutBuilder(0)
    source_sizes, destination_sizes = [0, 0, 0], [0, 0]
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 4), max_size=4 if number == 0 else 2).map(tuple))
        extra = [box_in(draw, shape, least=1) for _ in range(draw(st.integers(0, 2)))]
        held = draw(st.permutations([*grid(draw, shape), *extra]))
        wanted = grid(draw, shape)[: draw(st.integers(0, 6))]
        name = f"t{number}"
        add_boxes(draw, source, dtype, shape, held, name, source_sizes)
        add_boxes(draw, destination, dtype, shape, wanted, name, destination_sizes)
    return source.build(), destination.build(), source_sizes, destination_sizes, dtype


@patient
@given(routes(), st.integers(0, 2**32))
def test_a_route_writes_every_wanted_byte_from_the_first_holder_and_no_other(
    case: tuple[_core.Layout, _core.Layout, list[int], list[int], str], seed: int
) -> None:
    source, destination, source_sizes, destination_sizes, dtype = case
    item = reference.ITEM_NBYTES[dtype]
    random = Random(seed)
    buffers = [random.randbytes(size) for size in source_sizes]
    expected = [bytearray(b"\xee" * size) for size in destination_sizes]
    found = [bytearray(b"\xee" * size) for size in destination_sizes]
    held = reference.elements(source)
    nbytes = 0
    for name, places in reference.elements(destination).items():
        for index, addresses in places.items():
            _, buffer, offset = held[name][index][0]
            for _, to_buffer, to in addresses:
                expected[to_buffer][to : to + item] = buffers[buffer][offset : offset + item]
                nbytes += item
    route = _core.Route(source, destination)
    assert route.buffer_count == source.buffer_count(2)
    for buffer in range(route.buffer_count):
        copies = route.copies(buffer)
        assert all(copy[0] == buffer for copy in copies)
        written = reference.apply(copies, item, buffers, found)
        assert written == route.nbytes(buffer)
        nbytes -= written
    assert found == expected
    assert nbytes == 0


def contiguous(
    name: str, dtype: str, count: int, offset: int = 0, start: int = 0, total: int | None = None
) -> _core.LayoutBuilder:
    builder = _core.LayoutBuilder()
    extend(builder, name, dtype, count, offset, start, total)
    return builder


def extend(
    builder: _core.LayoutBuilder,
    name: str,
    dtype: str,
    count: int,
    offset: int = 0,
    start: int = 0,
    total: int | None = None,
) -> None:
    item = reference.ITEM_NBYTES[dtype]
    builder.add_shard(name, dtype, (total or count,), (start,), (count,), 0, offset, (item,))


@pytest.mark.parametrize(
    ("held", "wanted", "transform", "values"),
    [
        ("float32", "bfloat16", 1, struct.pack("<3f", 1.0, -2.5, 3.0078125)),
        ("float32", "float16", 2, struct.pack("<3f", 1.0, -2.5, 0.1)),
        ("bfloat16", "float32", 3, struct.pack("<3H", 0x3F80, 0xC020, 0x0001)),
    ],
)
def test_a_route_casts_where_dtypes_differ(
    held: str, wanted: str, transform: int, values: bytes
) -> None:
    route = _core.Route(contiguous("a", held, 3).build(), contiguous("a", wanted, 3).build())
    (copy,) = route.copies(0)
    assert copy[4:7] == (3, transform, ())
    found = [bytearray(3 * reference.ITEM_NBYTES[wanted])]
    assert reference.apply([copy], reference.ITEM_NBYTES[held], [values], found) == len(found[0])
    assert route.nbytes(0) == len(found[0])


def test_a_route_names_what_no_source_holds() -> None:
    source = contiguous("a.weight", "bfloat16", 3, total=8).build()
    with pytest.raises(_core.LayoutError, match=r"a\.weight: .* starts at \[3\] with extent \[5\]"):
        _core.Route(source, contiguous("a.weight", "bfloat16", 8).build())
    with pytest.raises(_core.LayoutError, match=r"b\.weight: the source has no such tensor"):
        _core.Route(source, contiguous("b.weight", "bfloat16", 8).build())


def test_a_route_names_shapes_and_dtypes_that_do_not_fit() -> None:
    source = contiguous("a.weight", "bfloat16", 3).build()
    with pytest.raises(_core.LayoutError, match=r"a\.weight: source shape \[3\] != .* \[4\]"):
        _core.Route(source, contiguous("a.weight", "bfloat16", 3, total=4).build())
    with pytest.raises(_core.UnsupportedError, match=r"a\.weight: .* bfloat16 to float16"):
        _core.Route(source, contiguous("a.weight", "float16", 3).build())
