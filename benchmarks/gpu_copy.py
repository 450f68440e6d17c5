"""The copy kernel: shapes of Qwen3-30B-A3B, rows of a few hundred bytes, small segments.

Each case is a batch of the same copies, one launch each, from the first call to the stream's end
by the host's clock.  The peer is one plain copy of the same bytes within the device, which the
driver does; the ratio is the share of its speed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import plan_shapes
from benchmarks.gpu_device import (
    SECONDS,
    Gpu,
    Place,
    Shape,
    fill,
    median_seconds,
    one_run,
    random_bytes,
    read,
    route,
    span,
)
from wsync import _core

REPEATS = 9
ROWS = (192, 256, 384, 512, 768)
PARTS = 4  # tensor-parallel workers whose rows lie side by side
SEGMENTS = (256, 1024, 4096)


@dataclass(frozen=True)
class Case:
    """Copies from one buffer into another, and what the second holds afterwards."""

    name: str
    nbytes: int  # that are moved
    source_nbytes: int
    target_nbytes: int
    route: Any
    expected: Callable[[torch.Tensor], torch.Tensor]


def run(gpu: Gpu) -> Iterator[dict[str, Any]]:
    nbytes = gpu.size(256 << 20, 1 << 20)
    yield _measure(gpu, _halves(nbytes))
    for packs in (True, False):
        yield _measure(gpu, _model(gpu, packs))
    for width in ROWS:
        for packs in (True, False):
            yield _measure(gpu, _rows(nbytes, width, packs))
    for width in SEGMENTS:
        yield _measure(gpu, _segments(min(nbytes, width << 18), width))


def _measure(gpu: Gpu, case: Case) -> dict[str, Any]:
    batch = gpu.size(20, 2)
    stream = _core.Stream(1, gpu.device)
    source = _core.Memory(case.source_nbytes, gpu.device)
    target = _core.Memory(case.target_nbytes, gpu.device)
    plain = [_core.Memory(case.nbytes, gpu.device) for _ in range(2)]
    data = random_bytes(case.source_nbytes, 1)
    fill(stream, source, data)

    def copy(route: Any, begin: Any, end: Any) -> None:
        for _ in range(batch):
            stream.copy(route, 0, 0, begin, end)
        stream.synchronize(SECONDS)

    ways: dict[str, Callable[[], object]] = {
        "kernel": functools.partial(copy, case.route, span(source), span(target)),
        "plain": functools.partial(copy, one_run(case.nbytes), *map(span, plain)),
    }
    for way in ways.values():
        way()
    verified = torch.equal(read(stream, target, case.target_nbytes), case.expected(data))
    seconds = {name: t / batch for name, t in median_seconds(ways, REPEATS).items()}
    stream.close()
    rate = 2 * case.nbytes / seconds["kernel"] / 1e9
    share = seconds["plain"] / seconds["kernel"]
    return gpu.row(
        f"copy: {case.name}",
        case.nbytes,
        seconds["kernel"],
        peer="one plain copy within the device",
        peer_seconds=seconds["plain"],
        verified=verified,
        figure=f"{rate:.0f} GB/s read and written, {share:.0%} of the plain copy",
        gigabytes_per_second=rate,
    )


def _between(nbytes: int, shapes: list[Shape], at: list[int], to: list[int], name: str) -> Case:
    """Contiguous tensors from some offsets to others; nothing else lies in either buffer."""

    def expected(data: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(nbytes, dtype=torch.uint8)
        for (count,), begin, end in zip(shapes, at, to, strict=True):
            out[end : end + count] = data[begin : begin + count]
        return out

    sources: list[Place] = [(offset, (1,)) for offset in at]
    targets: list[Place] = [(offset, (1,)) for offset in to]
    moved = sum(count for (count,) in shapes)
    return Case(name, moved, nbytes, nbytes, route(shapes, sources, targets), expected)


def _halves(nbytes: int) -> Case:
    """The longest runs that are not one."""
    half = nbytes // 2
    return _between(nbytes, [(half,), (half,)], [0, half], [half, 0], "two long runs")


def _model(gpu: Gpu, packs: bool) -> Case:
    """A layer: its tensors in a random order, as an allocator may place them, and a round."""
    shapes = plan_shapes.qwen3_moe(1) if not gpu.dry else plan_shapes.qwen3_moe(1, 4, 64, 512)
    sizes = [2 * torch.Size(w.shape).numel() for w in shapes if w.layer == 0]
    order = list(range(len(sizes)))
    random.Random(1).shuffle(order)
    ring, scattered, at, there = [], [0] * len(sizes), 0, 0
    for index, size in enumerate(sizes):
        ring.append(at)
        at += -(-size // 64) * 64
        other = order[index]
        scattered[other] = there
        there += -(-sizes[other] // 512) * 512  # torch's allocator
    begin, end = (scattered, ring) if packs else (ring, scattered)
    name = f"{'pack' if packs else 'unpack'} a layer of Qwen3-30B-A3B"
    return _between(max(at, there), [(size,) for size in sizes], begin, end, name)


def _rows(nbytes: int, width: int, packs: bool) -> Case:
    """Rows of one tensor-parallel worker out of, or in between, those of the others."""
    count = nbytes // width
    wide, narrow = PARTS * width, width
    apart: Place = (width, (wide, 1))
    together: Place = (0, (narrow, 1))
    begin, end = (apart, together) if packs else (together, apart)

    def expected(data: torch.Tensor) -> torch.Tensor:
        if packs:
            return data.view(count, PARTS, width)[:, 1].reshape(-1)
        out = torch.zeros(count, PARTS, width, dtype=torch.uint8)
        out[:, 1] = data.view(count, width)
        return out.view(-1)

    sizes = (count * wide, count * narrow)
    source_nbytes, target_nbytes = sizes if packs else sizes[::-1]
    return Case(
        f"{'pack' if packs else 'unpack'} rows of {width} B",
        count * width,
        source_nbytes,
        target_nbytes,
        route([(count, width)], [begin], [end]),
        expected,
    )


def _segments(nbytes: int, width: int) -> Case:
    """Segments of one size that all change places."""
    count = nbytes // width
    places = list(range(count))
    random.Random(2).shuffle(places)
    at = [index * width for index in range(count)]
    to = [place * width for place in places]

    def expected(data: torch.Tensor) -> torch.Tensor:
        out = torch.empty(count, width, dtype=torch.uint8)
        out[torch.tensor(places)] = data.view(count, width)
        return out.view(-1)

    shapes: list[Shape] = [(width,)] * count
    case = _between(nbytes, shapes, at, to, f"segments of {width} B")
    return Case(case.name, nbytes, nbytes, nbytes, case.route, expected)
