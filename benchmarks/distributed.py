"""`distributed`: replace every weight of remote engines, Qwen3-0.6B shapes in bfloat16 over gloo.

A real TP2 x PP2 Megatron trainer, and 1, 2 and 4 engine processes that it shares no memory with.
They run wsync's receiver, each a rank of the exchange, or take broadcasts of whole buckets as any
engine does.  The peers' way is slime's: every parameter is all-gathered by itself, each stage's
source collects up to 512 MiB, takes a lock that it shares with the other stage, and broadcasts
tensor by tensor to all engines.  All ways take turns in the same processes, into the same engines.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.managers import BaseManager
from typing import Any

import torch
import torch.distributed as dist
from support import hf_reference, megatron_cpu
from support.weights_only_engine import ProcessEngine, digest

import wsync
from benchmarks.peers import BUCKET_NBYTES, Named
from benchmarks.ranks import on_ranks
from wsync.exchange.update_group import Rendezvous, Store
from wsync.trainer.requests import Calls

RANKS = 4
REPEATS = 3
ENGINES = (1, 2, 4)
# Options.broadcast, and what to call it
WAYS = {"wsync": "with wsync", "bucket": "without wsync"}
SECONDS = 300.0


def run() -> Iterator[dict[str, Any]]:
    found = on_ranks(RANKS, _rank)
    for row in found:
        first = next(other for other in found if other["way"] == row["way"])
        extra = row["engines"] - 1
        if extra:
            each = [(row[k] - first[k]) / extra for k in ("seconds", "peer_seconds")]
            row["figure"] = f"{each[0]:.2f} s for each further engine, the peer's way {each[1]:.2f}"
        yield row


def _rank(rank: int) -> list[dict[str, Any]]:
    from benchmarks.update import qwen3_config

    config = qwen3_config()
    parallel = megatron_cpu.Parallel(tp=2, pp=2)
    with megatron_cpu.on_cpu(), megatron_cpu.groups(parallel):
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        expected = hf_reference.hf_state_dict(trainer.chunks, config)
        wanted = digest(expected)
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in expected.items()}
        nbytes = sum(t.numel() * t.itemsize for t in expected.values())
        del expected
        layout = wsync.megatron.layout(trainer.chunks, config)
        engines: list[ProcessEngine] = []
        rows = []
        try:
            for count in ENGINES:
                while rank == 0 and len(engines) < count:
                    engines.append(ProcessEngine(shapes, name=f"engine {len(engines)}"))
                seconds, verified = _measure(rank, trainer.chunks, config, layout, engines, wanted)
                rows += [_row(way, count, nbytes, seconds, verified) for way in WAYS]
        finally:
            for engine in engines:
                engine.close()
    return rows


def _row(
    way: str, count: int, nbytes: int, seconds: dict[str, float], verified: bool
) -> dict[str, Any]:
    return {
        "benchmark": "distributed",
        "case": f"TP2 x PP2 to {count} engine{'s' if count > 1 else ''} {WAYS[way]}",
        "way": way,
        "engines": count,
        "bytes": nbytes,
        "seconds": seconds[way],
        "peer": "slime's way, one broadcast per tensor",
        "peer_seconds": seconds["peer"],
        "ratio": seconds["peer"] / seconds[way],
        "verified": verified,
    }


def _measure(
    rank: int,
    chunks: Sequence[torch.nn.Module],
    config: Any,
    layout: Any,
    engines: list[ProcessEngine],
    wanted: str,
) -> tuple[dict[str, float], bool]:
    """Median seconds of each way, in turns; the first update of each fills cleared weights."""
    verified = True
    times: dict[str, list[float]] = {"peer": [], **{way: [] for way in WAYS}}
    peer = Slime(chunks, config, engines)
    try:
        with contextlib.ExitStack() as stack:
            ways: dict[str, Callable[[], object]] = {"peer": peer.update}
            for way in WAYS:
                options = wsync.Options(delivery="distributed", broadcast=way, progress=False)
                sync = stack.enter_context(wsync.connect(layout, engines, options=options))
                ways[way] = sync.update
            for repeat in range(REPEATS + 1):
                for name, way in ways.items():
                    for engine in engines if repeat == 0 else ():
                        engine.fill(0xA5)
                    dist.barrier()
                    start = time.perf_counter()
                    way()
                    dist.barrier()
                    if repeat:
                        times[name].append(time.perf_counter() - start)
                    else:
                        verified &= all(engine.digest() == wanted for engine in engines)
    finally:
        peer.close()
    return {name: statistics.median(values) for name, values in times.items()}, verified


class Desk:
    """What slime's actors are reached through: here rank 0 holds the engines for all ranks."""

    def __init__(self, engines: Sequence[ProcessEngine]) -> None:
        self._engines = list(enumerate(engines))
        self._lock = threading.Lock()

    def size(self) -> int:
        return 1 + len(self._engines)

    def tell(self, method: str, arguments: dict[str, Any]) -> None:
        """One call to every engine; returns when all have answered."""

        def call(index: int, engine: Any) -> None:
            told = dict(arguments)
            if method == "init_weights_update_group":
                told["rank_offset"] = 1 + index
            engine.call(method, told, SECONDS)

        Calls(self._engines, call).join(SECONDS)

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


class _Manager(BaseManager):
    pass


class Slime:
    """slime 0.2.2's UpdateWeightFromDistributed, for a dense model."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: Any, engines: Sequence[ProcessEngine]
    ) -> None:
        from megatron.core import parallel_state as ps

        self._config = config
        self._parts = list(hf_reference.own_parameters(chunks, config))
        self._tp_group = ps.get_tensor_model_parallel_group()
        self._source = ps.get_tensor_model_parallel_rank() == 0
        self._desk = _desk(engines)
        # joining blocks: one stage after the other
        for stage in range(ps.get_pipeline_model_parallel_world_size()):
            if self._source and stage == ps.get_pipeline_model_parallel_rank():
                self._join(stage)
            dist.barrier()

    def _join(self, stage: int) -> None:
        self._store = Store(SECONDS)
        group = {
            "master_address": "localhost",
            "master_port": self._store.port,
            "world_size": self._desk.size(),
            "group_name": f"slime-pp_{stage}-{secrets.token_hex(4)}",
            "backend": "gloo",
        }
        self._name = str(group["group_name"])
        joining = self._told("init_weights_update_group", group)
        size = int(group["world_size"])
        place = Rendezvous("localhost", self._store.port, size, name=self._name)
        self._group = place.join(0, SECONDS, bool, device=torch.device("cpu"))
        joining.join()

    def _told(self, method: str, arguments: dict[str, Any]) -> threading.Thread:
        thread = threading.Thread(target=self._desk.tell, args=(method, arguments))
        thread.start()
        return thread

    def update(self) -> None:
        bucket: list[Named] = []
        nbytes = 0
        for name, _, _, parameter in self._parts:
            whole = self._gather(name, parameter.detach())
            if not self._source:
                continue
            size = whole.numel() * whole.itemsize
            if bucket and nbytes + size > BUCKET_NBYTES:
                self._send(bucket)
                bucket, nbytes = [], 0
            bucket += [
                (n, t.contiguous()) for n, t in hf_reference.convert(name, whole, self._config)
            ]
            nbytes += size
        if bucket:
            self._send(bucket)

    def _gather(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        if hf_reference.is_replicated(name):
            return mine
        pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._tp_group))]
        dist.all_gather(pieces, mine, group=self._tp_group)
        return hf_reference.join(name, pieces)

    def _send(self, bucket: list[Named]) -> None:
        self._desk.acquire()
        what = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
        }
        loading = self._told("update_weights_from_distributed", what)
        self._group.broadcast([tensor for _, tensor in bucket])
        loading.join()
        self._desk.release()

    def close(self) -> None:
        if self._source:
            self._desk.tell("destroy_weights_update_group", {"group_name": self._name})
            self._group.close()
            self._store.close()


def _desk(engines: Sequence[ProcessEngine]) -> Any:
    """Rank 0's desk, in a thread there and by proxy elsewhere."""
    place: list[Any] = [None]
    if dist.get_rank() == 0:
        desk = Desk(engines)
        _Manager.register("desk", callable=lambda: desk)
        server = _Manager(("127.0.0.1", 0), b"benchmark").get_server()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = [server.address]
    else:
        _Manager.register("desk")
    dist.broadcast_object_list(place, 0)
    manager = _Manager(place[0], b"benchmark")
    manager.connect()
    return manager.desk()  # type: ignore[attr-defined]
