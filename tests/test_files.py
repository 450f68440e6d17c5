"""Copies into files: the bytes are those that a stream would have written to memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import wsync
from wsync import _core

Box = tuple[Sequence[int], Sequence[int]]


def write(
    path: Path, tensor: torch.Tensor, dtype: str, boxes: Sequence[Box], *, offset: int = 0
) -> bytes:
    """Writes some boxes of a tensor to their places in a file of the whole tensor."""
    source = _core.LayoutBuilder()
    table = _core.describe([tensor])
    source.add_tensors(["t"], table)
    destination = _core.LayoutBuilder()
    item = getattr(torch, dtype).itemsize
    strides = [stride * item for stride in torch.empty(tensor.shape, device="meta").stride()]
    for start, extent in boxes:
        at = offset + sum(a * b for a, b in zip(start, strides, strict=True))
        destination.add_shard("t", dtype, tuple(tensor.shape), start, extent, 0, at, strides)
    route = _core.Route(source.build(), destination.build())
    nbytes = offset + tensor.numel() * item
    with open(path, "wb") as file:
        file.truncate(nbytes)
        written = _core.write_files(
            route, 0, 1, _core.BufferTable.of(table), [(str(path), file.fileno(), nbytes)]
        )
    assert written == sum(torch.Size(extent).numel() for _, extent in boxes) * item
    return path.read_bytes()


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) * 2654435761 % (1 << 24)
    return values.to(torch.float32).to(dtype).reshape(shape)


# name: what lies in memory; small ones, and ones beyond any buffer on the way
SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: numbers(7, 5),
    "large": lambda: numbers(1500, 1000),
    "transposed": lambda: numbers(1000, 1500).t(),
    "transposed 3-D": lambda: numbers(3, 40, 5000).permute(2, 0, 1),
    "every other row": lambda: numbers(2000, 700)[::2],
    "every other column": lambda: numbers(600, 1400)[:, ::2],
    "one long row": lambda: numbers(1 << 20),
    "one long row with gaps": lambda: numbers(1 << 21)[::2],
    "scalar": lambda: numbers(1).reshape(()),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_file_gets_the_tensors_bytes(name: str, dtype: str, tmp_path: Path) -> None:
    tensor = SOURCES[name]()
    whole = ([0] * tensor.dim(), list(tensor.shape))
    found = write(tmp_path / "f", tensor, dtype, [whole], offset=8)
    assert found[:8] == bytes(8)
    assert found[8:] == as_bytes(tensor.to(getattr(torch, dtype)))


@pytest.mark.parametrize("name", ["large", "transposed", "every other column"])
def test_a_box_leaves_the_bytes_around_it_alone(name: str, tmp_path: Path) -> None:
    tensor = SOURCES[name]()
    rows, columns = tensor.shape
    boxes = [((3, 0), (rows - 5, columns // 2)), ((0, columns - 1), (rows, 1))]
    found = write(tmp_path / "f", tensor, "float32", boxes)
    expected = torch.zeros(rows, columns)
    expected[3 : rows - 2, : columns // 2] = tensor[3 : rows - 2, : columns // 2]
    expected[:, -1] = tensor[:, -1]
    assert found == as_bytes(expected)


def route_to_one_file(tensor: torch.Tensor) -> tuple[_core.Route, _core.BufferTable]:
    table = _core.describe([tensor])
    builder = _core.LayoutBuilder()
    builder.add_tensors(["t"], table)
    layout = builder.build()
    return _core.Route(layout, layout), _core.BufferTable.of(table, tensor)


def test_a_full_device_is_an_error_that_names_file_and_place() -> None:
    route, sources = route_to_one_file(torch.ones(100))
    with open("/dev/full", "wb") as full:
        with pytest.raises(
            wsync.SystemCallError, match=r"shard: writing 400 bytes at 0: No spa"
        ) as (caught):
            _core.write_files(route, 0, 1, sources, [("shard", full.fileno(), 400)])
    assert caught.value.native == errno.ENOSPC
