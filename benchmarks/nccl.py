"""`nccl`: the rounds of a plan between ranks with a GPU each.

The same rounds by wsync's exchange over NCCL and by torch's way, one all-to-all for each round on
staging in which what several peers get lies several times.  Three plans: every rank's worker wants
other bytes of what all ranks hold, two workers at a time want the same, and all want everything.

On a machine with two or more GPUs the peer's all-to-all is NCCL's.  On any other the GPUs and NCCL
are played by tests/fakecuda and tests/fakenccl, and the peer's all-to-all is gloo's: bytes are
verified and the host's work is counted, but bandwidth says nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.engines import played
from benchmarks.gpu_device import FAKE, SECONDS, random_bytes
from benchmarks.nccl_way import TorchNccl, Way, thread_seconds
from benchmarks.ranks import on_ranks
from wsync import UnsupportedError, _core
from wsync.exchange.group_exchange import GroupExchange
from wsync.exchange.polled_collectives import Collectives
from wsync.exchange.trainer_group import TrainerGroup
from wsync.exchange.update_group import Rendezvous, Store
from wsync.machine import device
from wsync.machine.nvidia_wheels import nccl_libraries

MOST_RANKS = 8
# tensors, their columns, and bytes of a round, by `dry`
SIZES = {False: (16, 4096, 128 << 20), True: (8, 256, 16 << 10)}
DRY_RANKS = 4
REPEATS = 3
GOAL = 3.0  # times less processor time a round than the peer's way

# what each rank's worker wants of the columns of every tensor: into how many shares they are cut
PLANS = {"other bytes to each": 1, "the same to every two": 2, "everything to all": 0}


def run() -> Iterator[dict[str, Any]]:
    """Rows; Skipped says why there are none."""
    ranks = _real_gpus()
    dry = ranks < 2
    with mock.patch.dict(os.environ, _played() if dry else {}):
        if dry:
            ranks = DRY_RANKS
            print(
                f"nccl: {ranks} played GPUs and a played NCCL; a dry run: bytes and the host's "
                "work are real, bandwidth says nothing"
            )
        yield from on_ranks(ranks, _rank, dry)


def _real_gpus() -> int:
    try:
        _, devices = _core.cuda_devices()
    except UnsupportedError:
        return 0
    if not torch.cuda.is_available() or any(name.startswith(FAKE) for _, name, _, _ in devices):
        return 0
    return min(len(devices), MOST_RANKS)


def _played() -> dict[str, str]:
    """The environment of processes on the stand-ins, which take no time of their own."""
    settings = played(devices=DRY_RANKS)
    from support import fakecuda

    return {**settings, "WSYNC_NCCL_LIB": fakecuda.fake_nccl()}


# --- one rank -----------------------------------------------------------------------------------


def _rank(rank: int, dry: bool) -> list[dict[str, Any]]:
    if not dry:
        torch.cuda.set_device(rank)
    _core.nccl_library(nccl_libraries())
    gpu = device.find(device.uuid(rank))
    count, columns, round_nbytes = SIZES[dry]
    whole = _tensors(count, dist.get_world_size() * columns, columns)
    group, close = _group(rank, gpu, dry)
    rows: list[dict[str, Any]] = []
    try:
        for name, together in PLANS.items():
            plan = _plan(whole, together, round_nbytes)
            theirs = (GroupExchange if dry else TorchNccl)(group, gpu, lambda: None)
            ways = {
                "wsync": Way(_ours(rank, plan, gpu), gpu, plan, whole),
                # torch knows nothing of played GPUs
                "peer": Way(theirs, _core.host() if dry else gpu, plan, whole),
            }
            found = _measure(ways, whole, group)
            rows += _rows(name, plan, found, dry)
            if together == 0:
                rows.append(_parked(ways["wsync"], whole, found["wsync"]["seconds"], dry))
            for way in ways.values():
                way.exchange.close()
    finally:
        close()
    return rows


def _tensors(count: int, rows: int, columns: int) -> list[torch.Tensor]:
    """What all ranks hold together: the same on all of them."""
    nbytes = 2 * rows * columns
    return [
        random_bytes(nbytes, seed).view(torch.bfloat16).view(rows, columns) for seed in range(count)
    ]


def _plan(whole: Sequence[torch.Tensor], together: int, round_nbytes: int) -> _core.Plan:
    """Every rank holds its rows of every tensor.  `together` workers want the same columns; 0:
    all want all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, columns = whole[0].shape
    parts = []
    for owner in range(ranks):
        builder = _core.LayoutBuilder(owner)
        start, extent = (owner * rows // ranks, 0), (rows // ranks, columns)
        for index in range(len(whole)):
            box = (f"t{index}", "bfloat16", (rows, columns), start, extent)
            builder.add_shard(*box, 0, index * 2 * columns * rows // ranks, (2 * columns, 2))
        parts.append(builder.build())
    shares = ranks // together if together else 1
    destinations = []
    for share in range(shares):
        builder = _core.LayoutBuilder()
        width = columns // shares
        for index in range(len(whole)):
            box = (f"t{index}", "bfloat16", (rows, columns), (0, share * width), (rows, width))
            builder.add_shard(*box, index, 0, (2 * width, 2))
        destinations.append((builder.build(), False))
    workers = [(worker * shares // ranks, worker) for worker in range(ranks)]
    return _core.Plan(
        _core.Layout.merge(parts),
        destinations,
        workers,
        list(range(ranks)),
        rank,
        round_nbytes=round_nbytes,
        # every round has a slot of its own, so that all bytes can be looked at afterwards
        ring_nbytes=4 * sum(tensor.numel() for tensor in whole),
    )


def _group(rank: int, gpu: _core.Device, dry: bool) -> tuple[Collectives, Callable[[], None]]:
    """The group of the peer's way, and what ends it."""
    if dry:
        gloo = TrainerGroup(timeout=SECONDS)
        assert gloo.collectives is not None
        return gloo.collectives, gloo.close
    store = Store(SECONDS) if rank == 0 else None
    size = dist.get_world_size()
    place = [Rendezvous("localhost", store.port, size, "nccl") if store else None]
    dist.broadcast_object_list(place, 0)
    assert place[0] is not None
    nccl = place[0].join(rank, SECONDS, bool, device=torch.device("cuda", gpu.ordinal))

    def close() -> None:
        nccl.close()
        if store is not None:
            store.close()

    return nccl, close


def _ours(rank: int, plan: _core.Plan, gpu: _core.Device) -> _core.Exchange:
    ranks = dist.get_world_size()
    exchange = _core.Exchange.nccl(rank, ranks, plan.send_nbytes, plan.recv_nbytes, SECONDS, gpu)
    addresses: list[str] = [""] * ranks
    dist.all_gather_object(addresses, exchange.address)
    exchange.connect(addresses, SECONDS)
    return exchange


# --- what is measured ---------------------------------------------------------------------------


def _measure(
    ways: dict[str, Way], whole: Sequence[torch.Tensor], group: Any
) -> dict[str, dict[str, Any]]:
    """Of each way, in turns: what this rank needed of a processor, and seconds, of an update."""
    verified = True
    for way in ways.values():
        way.update()
        way.clear()
        way.update()
        verified &= way.right(whole)
        way.count()
        way.cpu = 0.0
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "bare")}
    threads = 0.0
    for _ in range(REPEATS):
        for name, way in ways.items():
            dist.barrier()
            before, begin = thread_seconds(), time.perf_counter()
            way.update()
            seconds[name].append(time.perf_counter() - begin)
            if name == "wsync":
                threads += thread_seconds() - before
        seconds["bare"].append(_bare(ways["peer"], group))
    ways["wsync"].cpu += threads
    verified &= all(way.right(whole) for way in ways.values())
    found = {
        name: {
            "cpu": way.cpu / REPEATS,
            "thread": threads / REPEATS if name == "wsync" else 0.0,
            "calls": way.calls,
            "repeated": way.repeated,
        }
        for name, way in ways.items()
    }
    return _together({**found, "bare": {}}, seconds, verified)


def _bare(way: Way, group: Any) -> float:
    """Seconds of one all-to-all of as many bytes as an update brings this rank, without a plan."""
    ranks = dist.get_world_size()
    count = way.received // (ranks - 1)
    data = torch.zeros(2, count * ranks, dtype=torch.uint8, device=way.place)
    counts = [count] * ranks
    dist.barrier()
    begin = time.perf_counter()
    group.finish(group.exchange(data[0], data[1], counts, counts), SECONDS)
    way.settle()
    return time.perf_counter() - begin


def _together(
    found: dict[str, dict[str, Any]], seconds: dict[str, list[float]], verified: bool
) -> dict[str, dict[str, Any]]:
    """Of all ranks: means of what each needs, and the seconds of the slowest."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, seconds, verified))
    result = {
        name: {key: statistics.mean(one[0][name][key] for one in everyone) for key in values}
        for name, values in found.items()
    }
    for name, each in result.items():
        turns = zip(*(one[1][name] for one in everyone), strict=True)
        each["seconds"] = statistics.median(max(turn) for turn in turns)
        each["verified"] = all(one[2] for one in everyone)
    return result


def _parked(way: Way, whole: Sequence[torch.Tensor], usual: float, dry: bool) -> dict[str, Any]:
    """The first update after the exchange was parked, and how much memory of the GPU came back."""
    assert isinstance(way.exchange, _core.Exchange)
    staging = way.exchange.nbytes
    dist.barrier()
    before = _free(dry)
    way.exchange.park()
    dist.barrier()
    back = _free(dry) - before
    way.clear()
    dist.barrier()
    begin = time.perf_counter()
    way.update()
    seconds = {"wsync": [time.perf_counter() - begin]}
    found = _together({"wsync": {}}, seconds, way.right(whole))["wsync"]
    return {
        "benchmark": "nccl",
        "case": "the first update after it was parked",
        "ranks": dist.get_world_size(),
        "bytes": staging,
        "seconds": found["seconds"],
        "peer": "one that was not parked",
        "peer_seconds": usual,
        "ratio": usual / found["seconds"],
        "verified": found["verified"],
        "dry": dry,
        "returned_nbytes": back,
        "figure": f"{back / 2**20:.0f} MiB came back, {staging / 2**20:.0f} of them staging"
        if not dry
        else "dry: says nothing",
    }


def _free(dry: bool) -> int:
    return 0 if dry else torch.cuda.mem_get_info()[0]


def _rows(
    name: str, plan: _core.Plan, found: dict[str, dict[str, Any]], dry: bool
) -> Iterator[dict[str, Any]]:
    ours, theirs, bare = found["wsync"], found["peer"], found["bare"]
    rounds, nbytes = plan.round_count, plan.stats["sent_nbytes"]
    received = nbytes // dist.get_world_size()
    each = {
        "benchmark": "nccl",
        "ranks": dist.get_world_size(),
        "rounds": rounds,
        "bytes": nbytes,
        "peer": "torch's all-to-all, " + ("gloo" if dry else "NCCL"),
        "verified": ours["verified"],
        "dry": dry,
    }
    cpu = [1e6 * way["cpu"] / rounds for way in (ours, theirs)]
    calls = [way["calls"] / rounds for way in (ours, theirs)]
    again = [int(way["repeated"]) for way in (ours, theirs)]
    yield {
        **each,
        "case": f"{name}: processor of a round",
        "seconds": cpu[0] / 1e6,
        "peer_seconds": cpu[1] / 1e6,
        "ratio": cpu[1] / cpu[0],
        "goal": GOAL,
        "thread_seconds": ours["thread"] / rounds,
        "calls": calls[0],
        "peer_calls": calls[1],
        "repeated_nbytes": again[0],
        "peer_repeated_nbytes": again[1],
        "figure": f"{cpu[0]:.0f} us, {cpu[1]:.0f} us, goal {GOAL:.0f} times; {calls[0]:.1f} and "
        f"{calls[1]:.1f} calls; {again[0]} and {again[1]} bytes copied twice",
    }
    bus = [received / way["seconds"] / 1e9 for way in (ours, theirs, bare)]
    yield {
        **each,
        "case": f"{name}: moved",
        "seconds": ours["seconds"],
        "peer_seconds": theirs["seconds"],
        "ratio": theirs["seconds"] / ours["seconds"],
        "busbw": bus[0],
        "peer_busbw": bus[1],
        "bare_busbw": bus[2],
        "figure": ("dry: says nothing; " if dry else "")
        + f"bus {bus[0]:.1f} GB/s, {bus[1]:.1f}, its all-to-all alone {bus[2]:.1f}",
    }
