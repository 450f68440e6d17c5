"""Checkpoints as layouts: what is where, who writes it, and files that are not what they say."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import wsync
from wsync import _core
from wsync.checkpoints.safetensors_layout import INDEX, Checkpoint, arrange, owners
from wsync.engine import checkpoint_loader
from wsync.engine.destination import Boxes


def model(*tensors: tuple[str, str, tuple[int, ...]]) -> _core.Layout:
    builder = _core.LayoutBuilder()
    for name, dtype, shape in tensors:
        builder.add_tensor(name, dtype, shape)
    return builder.build()


def test_tensors_fill_files_in_the_order_of_their_numbers() -> None:
    rows = [(f"layers.{i}.w", "bfloat16", (10, 10)) for i in (10, 2, 1)]
    found = arrange(model(*rows, ("embed", "bfloat16", (30, 10))), shard_nbytes=400)
    assert {name: place.file for name, place in found.places.items()} == {
        "embed": 0,  # larger than a file
        "layers.1.w": 1,
        "layers.2.w": 1,
        "layers.10.w": 2,
    }
    assert found.names[1] == "model-00002-of-00003.safetensors"
    index = json.loads(found.index("7", "0123456789abcdef"))
    mark = index["metadata"].pop("wsync_version")
    assert index["metadata"] == {"total_size": 1200, "weight_version": "7"}
    assert f'"{mark}"'.encode() in found.header(2, mark)
    assert len(found.header(2, mark)) == len(found.headers[2])
    assert index["weight_map"]["layers.10.w"] == found.names[2]


def test_names_with_digits_that_are_no_numbers_have_a_place() -> None:
    names = ["1\u00b22", "\u00b2", "w1\u00b2", "\u0663", "w2", "9" * 4096]
    found = arrange(model(*((name, "float32", (2,)) for name in names)))
    assert set(found.places) == set(names)


def test_a_name_that_no_reader_takes_is_refused() -> None:
    long = "\u00e9" * 2049
    with pytest.raises(
        wsync.UnsupportedError, match=r"^'\u00e9.* cannot name a tensor in a file: "
    ):
        arrange(model(("a", "float32", (2,)), (long, "float32", (2,))))


def test_elements_are_aligned_whatever_their_neighbours() -> None:
    found = arrange(model(("a", "uint8", (3,)), ("b", "float32", (2,)), ("c", "bfloat16", (5,))))
    for place in found.places.values():
        assert place.offset % place.item_nbytes == 0


def test_only_floating_point_tensors_are_cast() -> None:
    found = arrange(model(("a", "float32", (3,)), ("b", "int64", (2,))), dtype="bfloat16")
    assert {name: place.dtype for name, place in found.places.items()} == {
        "a": "bfloat16",
        "b": "int64",
    }


def test_a_dtype_that_files_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(wsync.UnsupportedError, match="a: safetensors does not store complex128"):
        arrange(model(("a", "complex128", (3,))))


def test_a_tensor_of_the_name_of_the_files_own_facts_is_refused() -> None:
    with pytest.raises(wsync.UnsupportedError, match="__metadata__: safetensors keeps this name"):
        arrange(model(("a", "float32", (2,)), ("__metadata__", "float32", (2,))))


# --- owners -----------------------------------------------------------------------------------


@st.composite
def held(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, Any, Any, Any]]]:
    """A tensor's shape, and (rank, start, extent, steps) of boxes that cover it, some more than
    once."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple))
    cuts = [
        sorted(draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else ()) for n in shape
    ]
    edges = [list(itertools.pairwise([0, *cut, n])) for cut, n in zip(cuts, shape, strict=True)]
    boxes = [
        (draw(st.integers(0, 3)), *zip(*((a, b - a, 1) for a, b in cell), strict=True))
        if cell
        else (draw(st.integers(0, 3)), (), (), ())
        for cell in itertools.product(*edges)
    ]
    for _ in range(draw(st.integers(0, 4))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        steps = tuple(draw(st.integers(1, 3)) for _ in shape)
        extent = tuple(
            draw(st.integers(1, -(-(n - a) // step)))
            for a, n, step in zip(start, shape, steps, strict=True)
        )
        boxes.append((draw(st.integers(0, 3)), start, extent, steps))
    return shape, draw(st.permutations(boxes))


def layouts(shape: tuple[int, ...], boxes: list[tuple[int, Any, Any, Any]]) -> _core.Layout:
    parts = []
    for rank in range(4):
        builder = _core.LayoutBuilder(rank)
        builder.add_tensor("t", "uint8", shape)
        mine = [box for box in boxes if box[0] == rank]
        for buffer, (_, start, extent, steps) in enumerate(mine):
            strides = [math.prod(extent[i + 1 :]) for i in range(len(extent))]
            place = ("t", "uint8", shape, start, extent, buffer, 0, strides, f"o{buffer}")
            builder.add_shard(*place, steps=steps)
        parts.append(builder.build())
    return _core.Layout.merge(parts)


@given(held())
def test_every_element_has_one_owner_who_holds_it(
    case: tuple[tuple[int, ...], list[tuple[int, Any, Any, Any]]],
) -> None:
    shape, boxes = case
    holders = np.zeros((4, *shape), bool)
    for rank, start, extent, steps in boxes:
        ends = zip(start, extent, steps, strict=True)
        holders[(rank, *(slice(a, a + n * step, step) for a, n, step in ends))] = True
    count = np.zeros(shape, int)
    for rank, dealt in enumerate(owners(layouts(shape, boxes), 4)):
        for name, (start, extent), steps in dealt:
            ends = zip(start, extent, steps, strict=True)
            place = tuple(slice(a, a + n * step, step) for a, n, step in ends)
            assert name == "t"
            assert holders[(rank, *place)].all()
            count[place] += 1
    assert (count == 1).all()


def test_replicas_share_the_work() -> None:
    parts = []
    for rank in range(4):
        builder = _core.LayoutBuilder(rank)
        for i in range(8):
            builder.add_shard(f"t{i}", "uint8", (4,), (0,), (4,), i, 0, (1,), f"t{i}")
        parts.append(builder.build())
    assert [len(dealt) for dealt in owners(_core.Layout.merge(parts), 4)] == [2, 2, 2, 2]


def test_rows_that_alternate_are_written_where_they_belong(tmp_path: Path) -> None:
    value = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    parts, sources = [], []
    for rank in range(3):  # every other row; those of rank 1 are on rank 2 as well
        first = min(rank, 1)
        sources.append(value[first::2].clone())
        builder = _core.LayoutBuilder(rank)
        place = ("t", "float32", (6, 4), (first, 0), (3, 4), 0, 0, (16, 4), f"o{first}")
        builder.add_shard(*place, steps=(2, 1))
        parts.append(builder.build())
    merged = _core.Layout.merge(parts)
    dealt = owners(merged, 3)
    assert [len(boxes) for boxes in dealt] == [1, 1, 0]
    made = arrange(merged)
    file = torch.zeros(made.sizes[0], dtype=torch.uint8)
    target = _core.BufferTable([(file.data_ptr(), file.numel())], file)
    stream = _core.Stream()
    for part, boxes, source in zip(parts[:2], dealt, sources, strict=False):
        held = _core.BufferTable([(source.data_ptr(), source.nbytes)], source)
        stream.copy(_core.Route(part, made.layout(boxes)), 0, 0, held, target)
    stream.synchronize(60)
    stream.close()
    assert torch.equal(file[-96:].view(torch.float32).reshape(6, 4), value)


def test_elements_on_no_rank_are_counted_by_name() -> None:
    with pytest.raises(wsync.LayoutError, match="t: 3 of 5 elements are on no rank"):
        owners(layouts((5,), [(0, (0,), (2,), (1,))]), 4)
    with pytest.raises(wsync.LayoutError, match="t: 1 of 4 elements are on no rank"):
        # the first of those at odd places, alone, and as a replica of both at even ones
        boxes = [(0, (0,), (2,), (2,)), (1, (1,), (1,), (1,)), (2, (0,), (1,), (2,))]
        owners(layouts((4,), boxes), 4)


# --- reading ----------------------------------------------------------------------------------

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(True),
}


def stored(checkpoint: Checkpoint, nbytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    """TENSORS as a checkpoint has them, read in pieces of so many bytes."""
    layout, pieces = checkpoint.pieces(nbytes)
    parts = [bytearray(piece.nbytes) for piece in pieces]
    with checkpoint.opened() as descriptors:
        for piece, part in zip(pieces, parts, strict=True):
            checkpoint.read(descriptors, piece, memoryview(part))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    table = _core.describe(list(loaded.values()), list(loaded))
    builder = _core.LayoutBuilder()
    builder.add_tensors(list(loaded), table)
    route = _core.Route(layout, builder.build())
    held = [(ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part)) for part in parts]
    sources, target = _core.BufferTable(held, owner=parts), _core.BufferTable.of(table, loaded)
    stream = _core.Stream()
    for number in range(route.buffer_count):
        stream.copy(route, number, 0, sources, target)
    stream.synchronize(60)
    stream.close()
    return loaded


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.weight_version is None
    assert sorted(checkpoint.places) == ["a", "b", "c"]
    loaded = stored(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def sharded(folder: Path) -> Path:
    """Two files and their index."""
    files = {"one.safetensors": ["a"], "two.safetensors": ["b", "c"]}
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": 59, "weight_version": 3}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    assert Checkpoint(folder).weight_version == "3"
    return folder


def edit(path: Path, change: Any) -> None:
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def rewrite_header(path: Path, change: Any) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def write_header(path: Path, text: str, data: bytes = b"") -> None:
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data)


DAMAGE: dict[str, tuple[Any, str]] = {
    "a file cut short": (
        lambda f: (f / "one.safetensors").write_bytes((f / "one.safetensors").read_bytes()[:-1]),
        r"one\.safetensors: a: ends at byte \d+, the file has \d+: it was not written to its end",
    ),
    "a file cut inside its header": (
        lambda f: (f / "one.safetensors").write_bytes((f / "one.safetensors").read_bytes()[:30]),
        r"one\.safetensors: 30 bytes cannot hold a header of \d+",
    ),
    "an empty file": (
        lambda f: (f / "one.safetensors").write_bytes(b""),
        r"one\.safetensors: 0 bytes cannot hold a header of 0",
    ),
    "a missing file": (
        lambda f: (f / "two.safetensors").unlink(),
        r"two\.safetensors: No such file or directory",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), rf"{INDEX}: No such file or directory"),
    "half an index": (
        lambda f: (f / INDEX).write_text((f / INDEX).read_text()[:20]),
        rf"{INDEX}: not an index",
    ),
    "an index that leads elsewhere": (
        lambda f: edit(f / INDEX, lambda i: i["weight_map"].update(a="../one.safetensors")),
        r"'\.\./one\.safetensors' is no file of this folder",
    ),
    "an index with another file's tensor": (
        lambda f: edit(f / INDEX, lambda i: i["weight_map"].update(a="two.safetensors")),
        r"two\.safetensors: lacks a",
    ),
    "a size that is not the shape's": (
        lambda f: rewrite_header(f / "one.safetensors", lambda h: h["a"].update(shape=[3, 3])),
        r"one\.safetensors: a: 48 bytes for 36",
    ),
    "an unknown dtype": (
        lambda f: rewrite_header(f / "one.safetensors", lambda h: h["a"].update(dtype="F5")),
        r"one\.safetensors: a: dtype 'F5'",
    ),
    "an index that is a list": (
        lambda f: (f / INDEX).write_text("[]"),
        rf"{INDEX}: not an index: list instead of an object",
    ),
    "a tensor in two files": (
        lambda f: save_file(TENSORS, f / "two.safetensors"),
        r"two\.safetensors: a is in one\.safetensors too",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused_by_file_and_tensor(name: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    damage, text = DAMAGE[name]
    damage(folder)
    with pytest.raises((wsync.LayoutError, wsync.SystemCallError), match=text) as raised:
        Checkpoint(folder)
    assert len(str(raised.value)) < 6000


def overwrite(path: Path) -> None:
    """In place, and as a clock of seconds may have it."""
    before = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def exchange(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [overwrite, exchange])
@pytest.mark.parametrize("name", ["one.safetensors", INDEX])
def test_a_checkpoint_that_changes_under_its_reader_is_noticed(
    change: Any, name: str, tmp_path: Path
) -> None:
    """Names of one and tensors of another must not be mixed."""
    folder = sharded(tmp_path)
    early, late = Checkpoint(folder), Checkpoint(folder)
    with early.opened():
        early.check()
        change(folder / name)
        text = rf"{name}: was changed while the checkpoint was being read"
        with pytest.raises(wsync.LayoutError, match=text):
            early.check()
    if name != INDEX:
        with pytest.raises(wsync.LayoutError, match=text), late.opened():
            pass


def test_the_library_reads_what_was_arranged(tmp_path: Path) -> None:
    found = arrange(model(("a", "float32", (2, 3)), ("s", "int64", ()), ("e", "bool", (0, 4))))
    (tmp_path / "f").write_bytes(found.headers[0] + bytes(found.sizes[0] - len(found.headers[0])))
    loaded = load_file(tmp_path / "f")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items()} == {
        "a": (torch.float32, (2, 3)),
        "s": (torch.int64, ()),
        "e": (torch.bool, (0, 4)),
    }


@pytest.mark.parametrize("nbytes", [1, 7, 16, 40, 1 << 20])
def test_pieces_are_all_of_a_checkpoint(nbytes: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint(sharded(tmp_path))
    _, pieces = checkpoint.pieces(nbytes)
    assert all(piece.nbytes <= max(nbytes, 16) for piece in pieces)  # a row of "a"
    assert sum(piece.nbytes for piece in pieces) == 48 + 10 + 1
    loaded = stored(checkpoint, nbytes)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


class CutsShort:
    """In place of a receiver's state; something else cuts a file while it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @contextlib.contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        os.truncate(self._file, 100)
        yield


def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    """And no signal."""
    own = {"w": torch.zeros(100_000)}
    save_file({"w": torch.ones(100_000)}, tmp_path / "model.safetensors")

    def targets(shapes: object) -> Boxes:
        builder = _core.LayoutBuilder()
        builder.add_tensors(list(own), _core.describe(list(own.values()), list(own)))
        return Boxes(builder.build(), list(own.values()))

    receiver: Any = SimpleNamespace(state=CutsShort(tmp_path / "model.safetensors"))
    with pytest.raises(wsync.LayoutError, match=r"model\.safetensors: was changed .*it ends at"):
        checkpoint_loader.load(tmp_path, targets, receiver, timeout=60)
