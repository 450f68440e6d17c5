"""Many updates of a tiny model with changing weights, reconnects and random faults.

`python -P -m support.fault_soak UPDATES [SEED [SECONDS]]`, with tests/ on PYTHONPATH, prints one
line; after SECONDS it ends with what it has done.
Every update is verified byte by byte on every worker, or was reported as an error by all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from typing import Any

import torch
from support import fault_engine
from support.fault_cells import PHASES, TARGETS
from support.fault_lab import PATIENCE, RANKS, Bench
from support.fault_points import SLACK_NBYTES

WARM = 0.1  # of the updates: until then things may grow
FAULTS, MOST_FAULTS = 300, 0.2  # in all, unless that is more than one update in five
RECONNECTS, DEATHS = 0.03, 0.001


class Soak:
    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.count = {"verified": 0, "reported": 0, "reconnects": 0, "engines": 1}
        self.wrong: list[str] = []
        self.rate = 0.0

    def run(self, updates: int, seconds: float) -> dict[str, Any]:
        bench, start = self.bench, time.monotonic()
        bench.handle = bench.engine()
        bench.start_trainers()
        bench.must("connect", bench.path, bench.exchange)
        before: dict[str, Any] = {}
        self.rate = min(FAULTS / updates, MOST_FAULTS)
        for number in range(1, updates + 1):
            self._one(str(number))
            if self.wrong or time.monotonic() - start > seconds:
                break
            if number == max(int(updates * WARM), 1):
                before = self._figures()
        after = self._figures()
        for name in before:
            for who, (old, new) in enumerate(zip(before[name], after[name], strict=True)):
                if new > old + (SLACK_NBYTES if name == "memory" else 0):
                    self.wrong.append(f"{name} of process {who}: {old} became {new}")
        return {
            "updates": number,
            **self.count,
            "seconds": round(time.monotonic() - start, 1),
            "before": before,
            "after": after,
            "wrong": self.wrong,
        }

    def _one(self, version: str) -> None:
        bench, draw = self.bench, self.random.random()
        if draw < RECONNECTS:
            bench.must("close")
            bench.must("connect", bench.path, bench.exchange)
            self.count["reconnects"] += 1
        died = self.random.random() < DEATHS
        faulty = died or self.random.random() < self.rate
        who = self.random.choice(TARGETS[2:] if died else TARGETS)
        rank = int(who[-1])
        if faulty:
            phase = self.random.choice(PHASES)
            how = "kill" if died else self.random.choice(("raise", "cut", "interrupt"))
            if who.startswith("rank"):
                bench.trainers[rank].ask("arm", phase, how)
                bench.trainers[rank].answer(time.monotonic() + PATIENCE)
            else:
                how = "raise" if how == "interrupt" else how
                bench.worker(rank, "arm", (phase, how, bench.sockets))
        answers = bench.all("update", version)
        if faulty and not died:
            if who.startswith("rank"):
                bench.trainers[rank].ask("outcome")
                bench.trainers[rank].answer(time.monotonic() + PATIENCE)
            else:
                bench.worker(rank, "disarm")
        self._judge(version, answers)
        if died:
            self._new_engine()

    def _judge(self, version: str, answers: list[tuple[bool, Any]]) -> None:
        """Either every rank has an error, one and the same, or every byte is there."""
        texts = {str(value) for good, value in answers if not good}
        texts = {text for text in texts if not text.startswith("KeyboardInterrupt")}
        good = [good for good, _ in answers]
        if all(good):
            held = [self.bench.held(r, (version,)) for r in range(fault_engine.WORKERS)]
            if any(entry[:2] != (version, True) for entry in held):
                self.wrong.append(f"update {version}: {[entry[:2] for entry in held]}")
            self.count["verified"] += 1
        elif any(good) or len(texts) != 1 or "Error: " not in next(iter(texts)):
            self.wrong.append(f"update {version}: {answers}")
        else:
            self.count["reported"] += 1

    def _new_engine(self) -> None:
        bench = self.bench
        bench.must("close")
        bench.kill_engine()
        bench.handle = bench.engine()
        bench.must("connect", bench.path, bench.exchange)
        self.count["engines"] += 1

    def _figures(self) -> dict[str, list[int]]:
        """What every process holds after a healthy update: trainer ranks, then workers."""
        bench = self.bench
        bench.all("update", "1")
        bench.must("update", "1")
        counts = [found for found, _ in bench.must("settle")]
        counts += [bench.worker(r, "settle") for r in range(fault_engine.WORKERS)]
        memory = bench.must("memory")
        memory += [bench.worker(r, "memory") for r in range(fault_engine.WORKERS)]
        return {"memory": memory, **{n: [c[n] for c in counts] for n in counts[0]}}


def soak(updates: int, seed: int, seconds: float) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="wsync-soak-")
    bench = None
    try:
        bench = Bench(folder, "auto")
        return Soak(bench, seed).run(updates, seconds)
    finally:
        if bench is not None:
            bench.end()
        shutil.rmtree(folder, ignore_errors=True)


def summary(facts: dict[str, Any]) -> str:
    def span(name: str, unit: int = 1) -> str:
        pairs = zip(facts["before"][name], facts["after"][name], strict=True)
        return ", ".join(f"{old // unit}-{new // unit}" for old, new in pairs)

    return (
        f"soak: {facts['updates']} updates in {facts['seconds']} s: {facts['verified']} verified, "
        f"{facts['reported']} reported, {facts['reconnects']} reconnects, {facts['engines']} "
        f"engines; {RANKS} trainer ranks and {fault_engine.WORKERS} workers: "
        f"memory {span('memory', 1 << 10)} KiB, descriptors {span('descriptors')}, "
        f"threads {span('threads')}, maps {span('maps')}; "
        f"{'wrong: ' + '; '.join(facts['wrong']) if facts['wrong'] else 'nothing wrong'}"
    )


def main() -> int:
    torch.set_num_threads(1)
    defaults = ["", "0", "inf"]
    updates, seed, seconds = sys.argv[1:] + defaults[len(sys.argv) - 1 :]
    facts = soak(int(updates), int(seed), float(seconds))
    print(summary(facts))
    if name := os.environ.get("WSYNC_SOAK_REPORT"):
        with contextlib.suppress(OSError), open(name, "w", encoding="utf-8") as file:
            json.dump(facts, file)
    return 1 if facts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
