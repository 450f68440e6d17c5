"""Memory of the GPU that another process maps: made, sent and mapped, and given back.

wsync's memory goes as a descriptor; the peer is torch's way of sending a tensor to a process,
which is the driver's older one: an allocation of its own, a pickled handle, an opened mapping.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from benchmarks.gpu_device import SECONDS, Gpu, fill, random_bytes
from benchmarks.gpu_peer import Peer
from wsync import _core

REPEATS = 7
SIZES = (2 << 20, 64 << 20, 256 << 20, 1 << 30)
DRY_SIZES = (2 << 20, 8 << 20)
SAMPLE = 1 << 20  # bytes that are written and read on the other side

Times = dict[str, float]


def run(gpu: Gpu) -> Iterator[dict[str, Any]]:
    with Peer(gpu.device.uuid) as peer:
        for nbytes in DRY_SIZES if gpu.dry else SIZES:
            verified = _shared(gpu, peer, nbytes)
            times = _medians([_one(gpu, peer, nbytes) for _ in range(REPEATS)])
            facts: dict[str, Any] = {"peer": f"none: {gpu.torch}"}
            seconds = times["make"] + times["map"]
            if not gpu.torch:
                other = _medians([_torch(peer, nbytes) for _ in range(REPEATS)])
                facts = {
                    "peer": "torch's allocation, handle and opening",
                    "peer_seconds": other["make"] + other["map"],
                    "peer_times": other,
                }
            yield gpu.row(
                f"memory: {nbytes >> 20} MiB made and mapped",
                nbytes,
                seconds,
                verified=verified,
                figure=", ".join(f"{name} {1e3 * t:.2f} ms" for name, t in times.items()),
                times=times,
                **facts,
            )
            parked = [_parked(gpu, peer, nbytes) for _ in range(REPEATS)]
            times = _medians([found for found, _ in parked])
            yield gpu.row(
                f"memory: {nbytes >> 20} MiB parked and back",
                nbytes,
                sum(times.values()),
                verified=all(right for _, right in parked),
                figure=", ".join(f"{name} {1e3 * t:.2f} ms" for name, t in times.items()),
                times=times,
            )


def _medians(found: list[Times]) -> Times:
    return {name: statistics.median(times[name] for times in found) for name in found[0]}


def _one(gpu: Gpu, peer: Peer, nbytes: int) -> Times:
    start = time.perf_counter()
    memory = _core.Memory(nbytes, gpu.device)
    made = time.perf_counter() - start
    mapped = peer.ask("map", nbytes, fds=(memory.fileno(),))
    unmapped = peer.ask("unmap")
    start = time.perf_counter()
    del memory
    return {
        "make": made,
        "map": mapped,
        "unmap": unmapped,
        "free": time.perf_counter() - start,
    }


def _shared(gpu: Gpu, peer: Peer, nbytes: int) -> bool:
    """Whether the other process reads what this one has written, before and after it mapped."""
    stream = _core.Stream(1, gpu.device)
    memory = _core.Memory(nbytes, gpu.device)
    count = min(nbytes, SAMPLE)
    right = []
    for seed in (1, 2):
        data = random_bytes(count, seed)
        fill(stream, memory, data)
        if seed == 1:
            peer.ask("map", nbytes, fds=(memory.fileno(),))
        right.append(peer.ask("sum", count) == _core.checksum(data.numpy()))
    peer.ask("unmap")
    stream.close()
    return all(right)


def _parked(gpu: Gpu, peer: Peer, nbytes: int) -> tuple[Times, bool]:
    """Seconds until both sides of a ring are parked, and have it back in the next update; and
    whether the other process then reads what this one writes."""
    stream = _core.Stream(1, gpu.device)
    ring, count = _core.Memory(nbytes, gpu.device), min(nbytes, SAMPLE)
    data = random_bytes(count, 4)
    exporter = _core.Exporter()
    peer.tell("rest", exporter.address, count)
    exporter.accept(SECONDS)
    exporter.attach(ring, b"rest", SECONDS)
    exporter.begin(1, 0, SECONDS)
    exporter.prepared(SECONDS)
    start = time.perf_counter()
    exporter.commit(SECONDS, park=True)
    exporter.park(SECONDS)
    parked = time.perf_counter()
    exporter.begin(2, 1, SECONDS)
    fill(stream, ring, data)
    exporter.post(0, stream, SECONDS)
    exporter.acquire(0, None, SECONDS)
    back = time.perf_counter()
    exporter.prepared(SECONDS)
    exporter.commit(SECONDS)
    right = peer.answer() == _core.checksum(data.numpy())
    exporter.close()
    stream.close()
    return {"park": parked - start, "back": back - parked}, right


def _torch(peer: Peer, nbytes: int) -> Times:
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    data = bytes(ForkingPickler.dumps(tensor))
    made = time.perf_counter() - start
    mapped = peer.ask("rebuild", data)
    dropped = peer.ask("drop")
    del tensor
    return {"make": made, "map": mapped, "unmap": dropped}
