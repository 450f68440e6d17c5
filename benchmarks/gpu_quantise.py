"""The kernel that quantises: one matrix of bfloat16 by each method.

Each case is a batch of the same pass that writes codes and scales, from the first call to the
stream's end by the host's clock.  The peer is one plain copy within the device, which the driver
does, of half the bytes that the pass reads and writes; the ratio is the share of its speed.
Weights in blocks of several rows are read twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_device import SECONDS, Gpu, fill, median_seconds, one_run, read, span
from wsync import _core

REPEATS = 9
# kind, reciprocal, rows and columns of a block
METHODS = (
    ("fp8_block", True, 128, 128),
    ("fp8_block", False, 128, 128),
    ("int4", False, 1, 32),
    ("int4", False, 1, 128),
    ("mxfp8", False, 1, 32),
    ("nvfp4", False, 1, 16),
)
_ALIGNMENT = 256


def run(gpu: Gpu) -> Iterator[dict[str, Any]]:
    shape = (gpu.size(16384, 256), gpu.size(8192, 512))
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(shape, generator=generator).bfloat16()
    for method in METHODS:
        yield _measure(gpu, weights, method)


def _quantiser(shape: torch.Size, method: tuple[str, bool, int, int]) -> _core.Quantiser:
    builder = _core.LayoutBuilder()
    strides = (2 * shape[1], 2)
    builder.add_shard("w", "bfloat16", shape, (0, 0), shape, 0, 0, strides)
    second = "w.scale_2" if method[0] == "nvfp4" else None
    rule = ("w", *method, "w.codes", "w.scale", second, None, 0, 0)
    return _core.Quantiser(builder.build(), 0, 1, [rule])


def _measure(gpu: Gpu, weights: torch.Tensor, method: tuple[str, bool, int, int]) -> dict[str, Any]:
    made = _quantiser(weights.shape, method)
    host = _core.Stream(4, _core.host())
    begin, end = _Results(made, host), _Results(made, _core.Stream(1, gpu.device))
    passes = 2 if method[2] != 1 else 1
    traffic = passes * weights.nbytes + made.image_nbytes
    batch = gpu.size(20, 2)
    data = weights.view(torch.uint8).view(-1)
    for results in (begin, end):
        results.begin(data)
        results.quantise(codes=False)
        results.quantise(codes=True)
    verified = torch.equal(end.image(), begin.image())
    plain = [_core.Memory(traffic // 2, gpu.device) for _ in range(2)]
    copy = functools.partial(
        end.stream.copy, one_run(traffic // 2), 0, 0, span(plain[0]), span(plain[1])
    )
    ways: dict[str, Callable[[], object]] = {
        "kernel": functools.partial(end.quantise, codes=True, times=batch),
        "plain": lambda: ([copy() for _ in range(batch)], end.stream.synchronize(SECONDS)),
    }
    for way in ways.values():
        way()
    seconds = {name: t / batch for name, t in median_seconds(ways, REPEATS).items()}
    for results in (begin, end):
        results.stream.close()
    rate, share = traffic / seconds["kernel"] / 1e9, seconds["plain"] / seconds["kernel"]
    kind, reciprocal, rows, cols = method
    how = "" if kind != "fp8_block" else ", multiplied" if reciprocal else ", divided"
    return gpu.row(
        f"quantise: {kind} {rows} x {cols}{how}",
        weights.nbytes,
        seconds["kernel"],
        peer="one plain copy of half the bytes that are read and written",
        peer_seconds=seconds["plain"],
        verified=verified,
        figure=f"{rate:.0f} GB/s read and written, {share:.0%} of the plain copy",
        gigabytes_per_second=rate,
    )


class _Results:
    """Weights, image and table of amaxes in memory of a stream's device."""

    def __init__(self, quantiser: _core.Quantiser, stream: _core.Stream) -> None:
        self.stream = stream
        self._quantiser = quantiser

    def begin(self, data: torch.Tensor) -> None:
        count, device = self._quantiser.amax_count, self.stream.device
        table = -(-self._quantiser.image_nbytes // _ALIGNMENT) * _ALIGNMENT
        none = torch.zeros(4 * count, dtype=torch.uint8)
        self._weights = _core.Memory(data.numel(), device)
        self._memory = _core.Memory(table + max(none.numel(), 1), device)
        first = torch.cat([torch.zeros(table, dtype=torch.uint8), none])
        fill(self.stream, self._weights, data)
        fill(self.stream, self._memory, first)
        at = self._memory.address
        spans = [(at, self._quantiser.image_nbytes), (at + table, none.numel())]
        self._spans = _core.BufferTable(spans, owner=self._memory)

    def quantise(self, *, codes: bool, times: int = 1) -> None:
        for _ in range(times):
            self.stream.quantise(self._quantiser, span(self._weights), self._spans, codes=codes)
        self.stream.synchronize(SECONDS)

    def image(self) -> torch.Tensor:
        return read(self.stream, self._memory, self._quantiser.image_nbytes)
