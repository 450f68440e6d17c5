"""Real processes for tests: n ranks of a gloo group that run functions until they are closed."""

import contextlib
import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait

GRACE = 10.0  # seconds that the other ranks have once one has failed


class RankError(AssertionError):
    """One or more ranks raised, died or did not answer in time."""


def _serve(rank, count, store, path, pipe):
    sys.path[:0] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class Ranks:
    """`count` processes in one default process group; use as a context manager.

    `run` calls an importable function on every rank and returns the results in rank order.  After
    a failure the group is not usable any more, because ranks may sit in different collectives.
    """

    def __init__(self, count, *, path=()):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="wsync-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, store, list(path), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.close()

    @property
    def alive(self):
        return bool(self._pipes)

    def run(self, function, *arguments, timeout=120.0):
        if not self._pipes:
            raise RankError("the ranks have ended: an earlier call failed")
        for pipe in self._pipes:
            pipe.send((function, arguments))
        end = time.monotonic() + timeout
        results = {}
        failures = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                failures += [f"rank {rank}: no answer in time" for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, "the process ended"
                if good:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + GRACE)
        if failures:
            self.close()
            raise RankError(f"{function.__name__} failed\n" + "\n".join(failures))
        return [results[rank] for rank in range(len(results))]

    def close(self):
        """Ends the processes, by force where they do not go within a moment."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5 if self._pipes else 0.0)
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)
        self._pipes = []
        self._processes = []
        self._folder.cleanup()
