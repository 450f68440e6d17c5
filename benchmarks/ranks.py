"""Trainer ranks of a benchmark: processes of this host with a gloo group."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 900.0
Main = Callable[..., Any]


def on_ranks(ranks: int, main: Main, *arguments: Any) -> Any:
    """Runs main(rank, *arguments) on every rank; what rank 0 returns.

    Raises RuntimeError with the traceback of the first rank that fails.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="wsync-benchmark-") as folder:
        processes, pipes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank,
                args=(rank, ranks, f"{folder}/store", theirs, main, arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _collect(pipes: list[Connection]) -> Any:
    """Rank 0's result, once every rank has ended well."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), SECONDS)
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())}: silent for {SECONDS:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                good, results[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"trainer rank {rank} died") from None
            if not good:
                raise RuntimeError(f"trainer rank {rank}:\n{results[rank]}")
    return results[0]


def _rank(
    rank: int, ranks: int, store: str, results: Connection, main: Main, arguments: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=600),
        )
        result = main(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        results.send((True, result))
    except BaseException:
        results.send((False, traceback.format_exc()))
        raise SystemExit(1) from None
