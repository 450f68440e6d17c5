"""Two processes that take turns in one slot of device memory, ordered by words alone.

One round: the trainer's side waits for the slot, fills it with a launch and says so; the
engine's waits for that, copies the slot away and gives it back.  The turns are taken twice: in
the first pass the tables of copies are still uploaded, so that the host waits; in the second,
which is timed, the host announces rounds and the GPU alone waits.  What came is compared with
what was sent, in order: a wait that does not hold shows.  Then the same with waits of the hosts: a
GPU that keeps its time slice while it waits holds up the process that it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_device import (
    SECONDS,
    Gpu,
    each_span,
    fill,
    one_each,
    random_bytes,
)
from benchmarks.gpu_peer import Peer
from wsync import _core

SIZES = (4096, 1 << 20)
PASSES = 2
GAP = 64  # between the rows of a source, so that a kernel has to copy them


def run(gpu: Gpu) -> Iterator[dict[str, Any]]:
    with Peer(gpu.device.uuid) as peer:
        for nbytes in SIZES:
            yield _turns(gpu, peer, nbytes)


def _turns(gpu: Gpu, peer: Peer, nbytes: int) -> dict[str, Any]:
    count = gpu.size(1000, 50)
    seconds, right = ping_pong(gpu.device, peer, count, nbytes)
    return gpu.row(
        f"order: a turn with {nbytes >> 10} KiB",
        nbytes,
        seconds / count,
        peer="none; the same copies of one process, unordered",
        peer_seconds=_alone(gpu, count, nbytes) / count,
        verified=right,
        figure=f"{1e6 * seconds / count:.0f} us a turn, {count} turns",
    )


def ping_pong(
    device: _core.Device, peer: Peer, count: int, nbytes: int, seed: int = 3
) -> tuple[float, bool]:
    """Seconds of all turns of the last pass, and whether every one had its own bytes."""
    stream = _core.Stream(1, device)
    source, sent = _patterns(stream, count, nbytes, seed)
    ring = _core.Memory(nbytes, device)
    exporter = _core.Exporter()
    copies = one_each(count, nbytes, nbytes // 2 + GAP)
    sources = each_span(source, count, nbytes + GAP)
    slot = _core.BufferTable([(ring.address, nbytes)] * count, owner=ring)
    peer.tell("follow", exporter.address, PASSES, count, nbytes)
    exporter.accept(SECONDS)
    exporter.attach(ring, b"turns", SECONDS)
    for update in range(1, PASSES + 1):
        exporter.begin(update, count, SECONDS)
        start = time.perf_counter()
        for number in range(count):
            exporter.acquire(number - 1, stream, SECONDS)
            stream.copy(copies, number, 0, sources, slot)
            exporter.post(number, stream, SECONDS)
        exporter.acquire(count - 1, None, SECONDS)
        seconds = time.perf_counter() - start
        stream.synchronize(SECONDS)
        exporter.prepared(SECONDS)
        exporter.commit(SECONDS)
    right = peer.answer() == sent
    exporter.close()
    stream.close()
    return seconds, right


def _patterns(
    stream: _core.Stream, count: int, nbytes: int, seed: int
) -> tuple[_core.Memory, bytes]:
    """What is sent: in device memory, with gaps, and as it is to come."""
    data = random_bytes(count * (nbytes + GAP), seed)
    memory = _core.Memory(data.numel(), stream.device)
    fill(stream, memory, data)
    rows = data.view(count, nbytes + GAP)
    half = nbytes // 2
    first, second = rows[:, :half], rows[:, half + GAP :]
    whole = _stack(first, second)
    return memory, whole


def _stack(first: Any, second: Any) -> bytes:
    import torch

    data: bytes = torch.cat([first, second], dim=1).contiguous().numpy().tobytes()
    return data


def _alone(gpu: Gpu, count: int, nbytes: int) -> float:
    """Seconds of the same copies of one process, which waits for nobody."""
    stream = _core.Stream(1, gpu.device)
    source, _ = _patterns(stream, count, nbytes, 3)
    ring, log = _core.Memory(nbytes, gpu.device), _core.Memory(count * nbytes, gpu.device)
    slot = _core.BufferTable([(ring.address, nbytes)] * count, owner=ring)
    into = one_each(count, nbytes, nbytes // 2 + GAP)
    out = one_each(count, nbytes, nbytes // 2)
    sources, targets = each_span(source, count, nbytes + GAP), each_span(log, count, nbytes)
    for _ in range(PASSES):
        start = time.perf_counter()
        for number in range(count):
            stream.copy(into, number, 0, sources, slot)
            stream.copy(out, number, 0, slot, targets)
        stream.synchronize(SECONDS)
        seconds = time.perf_counter() - start
    stream.close()
    return seconds
