"""Lent memory: what a worker may map, and what the core checks before it reads there."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

import pytest

from wsync import _core
from wsync.machine.lendable import SharedMaps

PATIENCE = 60.0
PAGE = 4096
UNBOUND = 2**64 - 1


def bindings(*places: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("=QQQ", *place) for place in places)


def memory_of(text: bytes, nbytes: int = PAGE) -> _core.Memory:
    memory = _core.Memory(nbytes)
    memoryview(memory)[: len(text)] = text
    return memory


def at(span: tuple[int, int]) -> bytes:
    return ctypes.string_at(*span)


@pytest.fixture
def session() -> Iterator[tuple[_core.Exporter, _core.Importer]]:
    exporter = _core.Exporter()
    importer = _core.Importer(exporter.address, b"", PATIENCE)
    exporter.accept(PATIENCE)
    exporter.attach(_core.Memory(1), b"", PATIENCE)
    yield exporter, importer
    importer.close()
    exporter.close()


def update(
    exporter: _core.Exporter, importer: _core.Importer, number: int, *, park: bool = False
) -> None:
    """One that ends well."""
    stream = _core.Stream()
    exporter.begin(number, 1, PATIENCE)
    assert importer.begin(PATIENCE) == (number, 1)
    exporter.post(0, stream, PATIENCE)
    importer.take(0, None, PATIENCE)
    importer.done(0, None, PATIENCE)
    importer.prepared(1, 1, 0, PATIENCE)
    exporter.prepared(PATIENCE)
    exporter.commit(PATIENCE, None, park)
    importer.verdict(PATIENCE)
    if park:
        exporter.park(PATIENCE)


def test_buffers_lie_where_they_are_bound_until_they_are_bound_anew(
    session: tuple[_core.Exporter, _core.Importer],
) -> None:
    exporter, importer = session
    numbers = [exporter.lend(memory_of(text), PATIENCE) for text in (b"first", b"second")]
    places = ((numbers[1], 1, 3), (UNBOUND, 0, 0), (numbers[0], 0, 5))
    exporter.bind(bindings(*places), PATIENCE)
    for number in (1, 2):
        update(exporter, importer, number)
        bound = importer.bound
        assert bound is not None
        assert [at(bound[i]) for i in (0, 2)] == [b"eco", b"first"]
        assert bound[1] == (0, 0)
        assert len(importer.segments) == 2
    third = exporter.lend(memory_of(b"third"), PATIENCE)
    exporter.bind(bindings((third, 0, 5), (numbers[0], 0, 5)), PATIENCE)
    update(exporter, importer, 3)
    assert importer.bound is not None and importer.bound is not bound
    assert [at(importer.bound[i]) for i in (0, 1)] == [b"third", b"first"]
    assert len(importer.segments) == 2  # the second one was let go of
    assert at(bound[0]) == b"eco"  # but not under the feet of who has it


def test_memory_that_has_shrunk_is_not_read(
    session: tuple[_core.Exporter, _core.Importer],
) -> None:
    exporter, importer = session
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4 * PAGE)
    number = exporter.lend(_core.Memory.borrow(fd), PATIENCE)
    exporter.bind(bindings((number, 2 * PAGE, PAGE)), PATIENCE)
    update(exporter, importer, 1)
    os.ftruncate(fd, 2 * PAGE)
    exporter.begin(2, 1, PATIENCE)
    with pytest.raises(_core.PeerRefusedError, match="shrunk from 16384 bytes to 8192"):
        importer.begin(PATIENCE)
    os.close(fd)


def test_shared_mappings_are_found_by_address() -> None:
    memory = memory_of(b"0123456789", 2 * PAGE)
    maps = SharedMaps()
    private = bytearray(b"private")
    lonely = ctypes.addressof(ctypes.c_char.from_buffer(private))
    end = memory.address + memory.nbytes
    spans = [(memory.address + 5, 3), (lonely, 7), (memory.address, 0), (end - 1, 2)]
    found = maps.find(spans)
    place = found[0]
    assert place is not None and place.offset == 5
    assert found[1:] == [None, None, None]
    borrowed = maps.borrow([place.source])[place.source]
    assert bytes(memoryview(borrowed)[5:8]) == b"567"
    # another file at the same address is another one
    del memory
    again = memory_of(b"other", 2 * PAGE)
    maps.read()
    (other,) = maps.find([(again.address, 5)])
    assert other is not None and other.source != place.source
    maps.close()


def layout(rank: int, boxes: list[tuple[str, int, int]]) -> _core.Layout:
    """Boxes (tensor, start, extent) of tensors of 8 bytes, each a buffer of its own."""
    builder = _core.LayoutBuilder(rank)
    for buffer, (name, start, extent) in enumerate(boxes):
        builder.add_shard(name, "uint8", (8,), (start,), (extent,), buffer, 0, (1,))
    return builder.build()


def test_ranks_share_the_work_of_what_several_hold() -> None:
    ranks = [
        [("a", 0, 8), ("b", 0, 8), ("c", 0, 4), ("d", 0, 8)],
        [("a", 0, 8), ("b", 0, 8), ("c", 4, 4)],
    ]
    model = _core.Layout.merge([layout(rank, boxes) for rank, boxes in enumerate(ranks)])
    joined = model.join()
    found = {
        name: [(shard.rank, shard.buffer) for shard in joined.shards(joined.names().index(name))]
        for name in "abcd"
    }
    assert found == {"a": [(0, 0)], "b": [(0, 5)], "c": [(0, 2), (0, 6)], "d": [(0, 3)]}
    wanted = layout(0, [("c", 5, 2), ("a", 0, 1)])
    part = model.join(wanted)
    assert sorted(part.names()) == ["a", "c"]
    assert [shard.buffer for shard in part.shards(part.names().index("c"))] == [6]


def test_what_cannot_be_read_in_place_is_left_to_a_ring() -> None:
    ranks = [
        [("a", 0, 8), ("b", 0, 4), ("c", 0, 8)],
        [("a", 0, 8), ("b", 4, 4), ("d", 0, 8)],
    ]
    model = _core.Layout.merge([layout(rank, boxes) for rank, boxes in enumerate(ranks)])
    wanted = layout(0, [("a", 0, 8), ("b", 0, 8), ("c", 0, 8), ("d", 0, 8)])
    for lent, found in (
        (bytes([1, 1, 1, 1, 1, 1]), "abcd"),
        (bytes([0, 1, 1, 1, 0, 1]), "acd"),  # the other rank has a, too, but not all of b
        (bytes([1, 0, 1, 0, 1, 0]), "ac"),
        (bytes(6), ""),
    ):
        joined = model.join(wanted, lent)
        rest = wanted.without(joined)
        assert sorted(joined.names()) == list(found)
        assert sorted(joined.names() + rest.names()) == list("abcd")
        places = {shard.buffer for i in range(len(found)) for shard in joined.shards(i)}
        assert all(lent[number] for number in places)
        both = joined.beside(rest, 6)
        first = next(shard.buffer for shard in both.shards(both.names().index("b")))
        assert first == (1 if "b" in found else 7)
    # a box that a worker does not want may be private
    part = model.join(layout(0, [("b", 5, 2)]), bytes([0, 0, 0, 0, 1, 0]))
    assert [shard.buffer for shard in part.shards(part.names().index("b"))] == [4]
    with pytest.raises(ValueError, match="lent has 5 bytes, but there are 6 buffers"):
        model.join(None, bytes(5))
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match="first"):
            wanted.beside(wanted, wrong)
    with pytest.raises(_core.LayoutError, match="buffer 1 cannot follow 4294967295 others"):
        builder = _core.LayoutBuilder()
        builder.add_shard("x", "uint8", (8,), (0,), (8,), 1, 0, (1,))
        wanted.beside(builder.build(), 2**32 - 1)
