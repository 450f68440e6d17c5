"""Checkpoints as layouts: what is where, who writes it, and files that are not what they say."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
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


def model(*tensors: tuple[str, str, tuple[int, ...]]) -> _core.Layout:
    builder = _core.LayoutBuilder()
    for name, dtype, shape in tensors:
        builder.add_tensor(name, dtype, shape)
    return builder.build()


def test_tensors_fill_files_in_their_order() -> None:
    rows = [(f"layers.{i}.w", "bfloat16", (10, 10)) for i in (10, 2, 1)]  # as no sort has them
    found = arrange(model(("embed", "bfloat16", (30, 10)), *rows), shard_nbytes=400)
    assert {name: place.file for name, place in found.places.items()} == {
        "embed": 0,  # larger than a file
        "layers.10.w": 1,
        "layers.2.w": 1,
        "layers.1.w": 2,
    }
    assert found.names[1] == "model-00002-of-00003.safetensors"
    index = json.loads(found.index("7"))
    assert index["metadata"] == {"total_size": 1200, "weight_version": "7"}
    assert index["weight_map"]["layers.1.w"] == found.names[2]


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
    with pytest.raises(wsync.UnsupportedError, match="a: safetensors files cannot hold complex128"):
        arrange(model(("a", "complex128", (3,))))


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
def test_every_element_has_an_owner_who_holds_it(
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
    assert (count >= 1).all()


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
    with pytest.raises(wsync.LayoutError, match="t: no trainer rank holds 3 of its 5 elements"):
        owners(layouts((5,), [(0, (0,), (2,), (1,))]), 4)


TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(True),
}
FACTS = {"a": ("float32", (3, 4)), "b": ("bfloat16", (5,)), "c": ("bool", ())}


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: (place.dtype, place.shape) for name, place in checkpoint.places.items()}


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.weight_version is None
    assert facts(checkpoint) == FACTS


def sharded(folder: Path) -> Path:
    """Two files and their index."""
    files = {"one.safetensors": ["a"], "two.safetensors": ["b", "c"]}
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": 59, "weight_version": 3}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_the_files_of_an_index_are_read_together(tmp_path: Path) -> None:
    checkpoint = Checkpoint(sharded(tmp_path))
    assert checkpoint.weight_version == "3"
    assert facts(checkpoint) == FACTS
    assert [path.name for path in checkpoint.files] == ["one.safetensors", "two.safetensors"]


DAMAGES: dict[str, tuple[Any, str]] = {
    "cut short": (
        lambda folder: os.truncate(folder / "two.safetensors", 100),
        r"two\.safetensors: ",
    ),
    "missing file": (lambda folder: (folder / "one.safetensors").unlink(), r"one\.safetensors: "),
    "missing tensor": (
        lambda folder: save_file({"c": TENSORS["c"]}, folder / "two.safetensors"),
        r"two\.safetensors: it lacks b, which ",
    ),
    "no json": (lambda folder: (folder / INDEX).write_text("{"), "index.json: "),
    "no object": (
        lambda folder: (folder / INDEX).write_text("[]"),
        "expected a JSON object, not a list",
    ),
    "no files": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "empty": (lambda folder: (folder / INDEX).unlink(), "index.json: No such file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused_by_file(name: str, tmp_path: Path) -> None:
    damage, text = DAMAGES[name]
    damage(sharded(tmp_path))
    with pytest.raises(wsync.WsyncError, match=text):
        Checkpoint(tmp_path)


def test_the_library_reads_what_was_arranged(tmp_path: Path) -> None:
    found = arrange(model(("a", "float32", (2, 3)), ("s", "int64", ()), ("e", "bool", (0, 4))))
    (tmp_path / "f").write_bytes(found.headers[0] + bytes(found.sizes[0] - len(found.headers[0])))
    loaded = load_file(tmp_path / "f")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items()} == {
        "a": (torch.float32, (2, 3)),
        "s": (torch.int64, ()),
        "e": (torch.bool, (0, 4)),
    }
