"""The GPU that the `gpu` benchmark is about, and its memory: filled, read, copied, timed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.environment import Skipped
from wsync import UnsupportedError, _core
from wsync.machine import device

SECONDS = 120.0  # that anything may take
FAKE = "Fake GPU"  # what tests/fakecuda calls its devices

Span = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """device: wsync's; dry: it is no real one; torch: why torch cannot use it, "" if it can."""

    device: _core.Device
    facts: dict[str, Any]
    dry: bool
    torch: str

    def title(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return f"GPU: {facts}" + ("; a dry run: the figures say nothing" if self.dry else "")

    def size(self, real: int, dry: int) -> int:
        return dry if self.dry else real

    def row(self, case: str, nbytes: int, seconds: float, **more: Any) -> dict[str, Any]:
        """A row without a peer, unless `more` names one."""
        row: dict[str, Any] = {
            "benchmark": "gpu",
            "case": case,
            "bytes": nbytes,
            "seconds": seconds,
            "peer": "none",
            "peer_seconds": seconds,
            "device": self.facts,
            "dry": self.dry,
            **more,
        }
        row["ratio"] = row["peer_seconds"] / max(row["seconds"], 1e-9)
        return row


def find_gpu() -> Gpu:
    """The GPU of WSYNC_DEVICE, or the first.  Skipped says why none can be used."""
    try:
        version, devices = _core.cuda_devices()
        uuid = device.wanted() or devices[0][0]
        found = device.find(uuid)
    except UnsupportedError as error:
        raise Skipped(str(error)) from error
    _, name, nbytes, (major, minor) = devices[found.ordinal]
    dry = name.startswith(FAKE)
    without = _torch_reason()
    if without and not dry:
        raise Skipped(f"{name}: {without}, and nothing could be verified")
    facts = {
        "name": name,
        "uuid": uuid,
        "sm": f"{major}{minor}",
        "GiB": round(nbytes / 2**30, 1),
        "driver": _driver(),
        "driver's CUDA": f"{version // 1000}.{version % 1000 // 10}",
        "torch's CUDA": torch.version.cuda,
        "dry run": dry,
    }
    return Gpu(found, facts, dry, without)


def _torch_reason() -> str:
    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda
    return f"torch {torch.__version__} " + ("sees no GPU" if built else "is a CPU build")


def _driver() -> str | None:
    """The kernel's driver."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        words = file.readline().split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None


# --- layouts of bytes, and what moves them -------------------------------------------------------

# where a tensor of bytes lies: (offset, strides); one buffer holds all
Place = tuple[int, Sequence[int]]
Shape = Sequence[int]


def route(shapes: Sequence[Shape], sources: Sequence[Place], targets: Sequence[Place]) -> Any:
    """Copies of tensors of bytes from one buffer into another."""
    return _core.Route(_layout(shapes, sources), _layout(shapes, targets))


def _layout(shapes: Sequence[Shape], places: Sequence[Place]) -> _core.Layout:
    builder = _core.LayoutBuilder()
    for index, (shape, (offset, strides)) in enumerate(zip(shapes, places, strict=True)):
        start = [0] * len(shape)
        builder.add_shard(f"t{index}", "uint8", shape, start, shape, 0, offset, strides)
    return builder.build()


def one_run(nbytes: int) -> Any:
    return route([(nbytes,)], [(0, (1,))], [(0, (1,))])


def one_each(count: int, nbytes: int, pitch: int) -> Any:
    """As many copies as buffers: each of two rows, `pitch` bytes apart in the source, which are
    one run where that is half of the bytes."""
    source, target = _core.LayoutBuilder(), _core.LayoutBuilder()
    half = nbytes // 2
    for index in range(count):
        box = (f"t{index}", "uint8", (2, half), (0, 0), (2, half), index, 0)
        source.add_shard(*box, (pitch, 1))
        target.add_shard(*box, (half, 1))
    return _core.Route(source.build(), target.build())


def each_span(memory: _core.Memory, count: int, nbytes: int) -> _core.BufferTable:
    """Memory as so many buffers."""
    spans = [(memory.address + index * nbytes, nbytes) for index in range(count)]
    return _core.BufferTable(spans, owner=memory)


def span(memory: _core.Memory) -> _core.BufferTable:
    return _core.BufferTable([(memory.address, memory.nbytes)], owner=memory)


def _of(tensor: torch.Tensor) -> _core.BufferTable:
    return _core.BufferTable([(tensor.data_ptr(), tensor.numel())], owner=tensor)


def fill(stream: _core.Stream, memory: _core.Memory, data: torch.Tensor) -> None:
    """Writes bytes of the host to the beginning of device memory."""
    stream.copy(one_run(data.numel()), 0, 0, _of(data), span(memory))
    stream.synchronize(SECONDS)


def read(stream: _core.Stream, memory: _core.Memory, nbytes: int) -> torch.Tensor:
    """The first bytes of device memory."""
    data = device.staging(nbytes, stream.device)
    stream.copy(one_run(nbytes), 0, 0, span(memory), _of(data))
    stream.synchronize(SECONDS)
    return data


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (-(-nbytes // 8),), generator=generator)
    return words.view(torch.uint8)[:nbytes]


# --- time ----------------------------------------------------------------------------------------


def median_seconds(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, by the clock of the host; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, call in work.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}
