"""One connection after another, with processes that are stopped for a while at any time.

`python -P -m support.connection_soak CONNECTIONS [--seed N]`, with tests/ on PYTHONPATH, prints one
line.  Each connection is a new group of trainer ranks, which the workers of an engine join over
gloo, as remote ones do, for one verified update.  Stops are far shorter than any deadline: nothing
may fail.  If something does not end for long, all processes print the stacks of their threads.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from support import fault_engine, fault_lab

WORKERS = 4  # and three trainer ranks
DEADLINE = 120.0
LONG = 60.0  # for one step of a connection: then stacks are printed
LONGEST_STOP = 2.0
LONGEST_PAUSE = 0.3  # between two stops


class Soak:
    def __init__(self, bench: fault_lab.Bench, seed: int) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.stops = 0
        self.longest = 0.0  # seconds that a step has taken
        self.dumped = False

    def run(self, connections: int) -> list[str]:
        """What went wrong."""
        bench = self.bench
        bench.handle = bench.engine()
        bench.start_trainers()
        head, workers = bench.heads[-1]
        pids = [trainer.pid for trainer in bench.trainers] + [head, *workers]
        with self._stopping(pids):
            for number in range(1, connections + 1):
                wrong = self._connect(str(1 + number % 3))
                if wrong:
                    return [f"connection {number}: {text}" for text in wrong]
        return []

    def _connect(self, version: str) -> list[str]:
        bench = self.bench
        for step in (("connect", bench.path, bench.exchange), ("update", version), ("close",)):
            texts = [str(value) for good, value in self._all(*step) if not good]
            if texts:
                return [f"{step[0]}: {text}" for text in texts]
        held = [bench.held(rank) for rank in range(WORKERS)]
        return [] if all(found[:2] == (version, True) for found in held) else [str(held)]

    def _all(self, what: str, *arguments: Any) -> list[tuple[bool, Any]]:
        trainers, start = self.bench.trainers, time.monotonic()
        for trainer in trainers:
            trainer.ask(what, *arguments)
        for trainer in trainers:
            if not trainer.pipe.poll(max(start + LONG - time.monotonic(), 0.0)):
                self._dump(f"{trainer.name}: {what} takes over {LONG:.0f} s")
                break
        # the connection's own deadlines end it, or nothing does
        found = [trainer.answer(start + 3 * DEADLINE) for trainer in trainers]
        self.longest = max(self.longest, time.monotonic() - start)
        return found

    def _dump(self, text: str) -> None:
        if self.dumped:
            return
        self.dumped = True
        print(text, file=sys.stderr, flush=True)
        head, workers = self.bench.heads[-1]
        names = {trainer.pid: trainer.name for trainer in self.bench.trainers}
        names |= {head: "head", **{pid: f"worker {n}" for n, pid in enumerate(workers)}}
        for pid, name in names.items():
            print(f"--- {name}, pid {pid}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0 + LONGEST_STOP)  # it may be stopped, too

    @contextlib.contextmanager
    def _stopping(self, pids: Sequence[int]) -> Iterator[None]:
        """Stops a process and lets it go on, again and again, from a thread."""
        over = threading.Event()
        draw = random.Random(self.random.random())

        def stop() -> None:
            while not over.wait(LONGEST_PAUSE * draw.random()):
                pid = draw.choice(pids)
                os.kill(pid, signal.SIGSTOP)
                over.wait(LONGEST_STOP * draw.random() ** 3)  # most are short
                os.kill(pid, signal.SIGCONT)
                self.stops += 1

        thread = threading.Thread(target=stop)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def soak(connections: int, seed: int) -> tuple[list[str], str]:
    """What went wrong, and a line about it all."""
    fault_lab.OPTIONS.update(deadline=DEADLINE, delivery="distributed")
    fault_engine.WORKERS = fault_engine.Handle.workers = WORKERS
    faulthandler.register(signal.SIGUSR1)  # of the processes that are forked from this one, too
    folder, bench, start = tempfile.mkdtemp(prefix="wsync-soak-"), None, time.monotonic()
    try:
        bench = fault_lab.Bench(folder, "auto")
        run = Soak(bench, seed)
        wrong = run.run(connections)
    finally:
        if bench is not None:
            bench.end()
        shutil.rmtree(folder, ignore_errors=True)
    return wrong, (
        f"soak: {connections} connections of {fault_lab.RANKS} trainer ranks and {WORKERS} workers "
        f"in {time.monotonic() - start:.0f} s, {run.stops} stops, the longest step "
        f"{run.longest:.1f} s, seed {seed}: {'; '.join(wrong) or 'nothing wrong'}"
    )


def main() -> int:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("connections", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong, line = soak(arguments.connections, arguments.seed)
    print(line, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
