"""Everything is killed and stopped at random while a trainer updates engines that are in use.

`python -P -m support.chaos SECONDS [--seed N] [--ways receiver,gloo,...]`, with tests/ on
PYTHONPATH: four HTTP engines and a Megatron trainer of TP2 x PP2, a process each, and a watcher
(support.chaos_watch) that asks the engines without pause.  What was killed is started again, the
engines from a checkpoint of version 0.  Every update has weights of its own, those that fail too.
The exit status is 0 if nothing was wrong.  The seed draws the faults; their effect is never twice
the same.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from typing import Any

import torch
from support import chaos_judge, known_weights, trainer_ranks
from support.chaos_judge import Kill, Update
from support.chaos_watch import Look, watch
from support.engine_nursery import Nursery, await_health, free_ports
from support.procs import RankError, Ranks, spawned

from wsync.machine.sweep import sweep

ENGINES, TP, PP = 4, 2, 2
WAYS: dict[str, dict[str, Any]] = {
    "receiver": {"delivery": "wsync"},
    "direct": {"delivery": "direct"},
    "gloo": {"delivery": "wsync", "exchange": "gloo"},
    "distributed": {"delivery": "distributed", "broadcast": "wsync"},
    "broadcast": {"delivery": "distributed", "broadcast": "bucket"},
    "stock": {"delivery": "stock"},
}
DEADLINE = 3.0
PATIENCE = 90.0  # for what must come to an end by its own deadlines
GRACE = 45.0  # the same, of ranks that have lost one
MEAN_SECONDS = 2.0  # from one fault to the next
LONGEST_STOP, LONGEST_ABSENCE = 6.0, 2.0
RECONNECT = 0.1  # of updates
FAULTS = {  # and their weights
    "stop engine": 6,
    "stop rank": 6,
    "kill engine": 2,
    "kill rank": 2,
    "kill stopped engine": 1,
    "kill stopped rank": 1,
}


def say(text: str) -> None:
    print(f"{time.monotonic():.1f} {text}", flush=True)


class Targets:
    """The processes that may be struck: engines by number, trainer ranks while they are there."""

    def __init__(self, nursery: Nursery, folder: str, ports: list[int]) -> None:
        self._nursery, self._model, self._ports = nursery, os.path.join(folder, "model"), ports
        known_weights.model(0).save_pretrained(self._model)
        self._lock = threading.Lock()
        self.ranks: list[int] = []
        self.engines: list[int] = [0] * len(ports)
        for number in range(len(ports)):
            self.start(number)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def start(self, number: int) -> None:
        options = {
            "--model": self._model,
            "--port": str(self._ports[number]),
            "--weight-version": "0",
            "--broadcast-seconds": str(DEADLINE),
        }
        arguments = [text for option in options.items() for text in option]
        with self._lock:
            self.engines[number] = self._nursery.start(*arguments)

    def alive(self, kind: str) -> list[int]:
        """The ids of an engine's or rank's processes; 0 for what is not there."""
        return self.engines if kind == "engine" else self.ranks


class Monkey(threading.Thread):
    """Strikes at random, and starts engines again."""

    def __init__(self, targets: Targets, seed: int) -> None:
        super().__init__(daemon=True)
        self._targets, self._random = targets, random.Random(seed)
        self._end = threading.Event()
        self._later: list[threading.Timer] = []
        self.kills: list[Kill] = []
        self.count: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        names, weights = list(FAULTS), list(FAULTS.values())
        while not self._end.wait(self._random.expovariate(1 / MEAN_SECONDS)):
            fault = self._random.choices(names, weights)[0]
            kind = fault.split()[-1]
            pids = self._targets.alive(kind)
            number = self._random.randrange(ENGINES if kind == "engine" else TP * PP)
            seconds = LONGEST_STOP * self._random.random() ** 3  # most are short
            absence = LONGEST_ABSENCE * self._random.random()
            if number >= len(pids) or not pids[number]:
                continue
            self.count[fault] += 1
            if not fault.startswith("kill s"):
                self._strike(fault, kind, pids, number, seconds, absence)
                continue
            self._signal(pids[number], signal.SIGSTOP)
            again = f"kill {kind}"
            self._after(seconds, self._strike, again, kind, pids, number, seconds, absence)

    def stop(self) -> None:
        """No more faults; what is under way ends, and what was killed is started."""
        self._end.set()
        self.join()
        while self._later:  # a timer may start another
            self._later.pop().join()

    def _strike(
        self, fault: str, kind: str, pids: list[int], number: int, seconds: float, absence: float
    ) -> None:
        pid = pids[number]
        if not pid:
            return  # the end of this one came first
        if fault.startswith("stop"):
            self._signal(pid, signal.SIGSTOP)
            self._after(seconds, self._signal, pid, signal.SIGCONT)
            return
        pids[number] = 0
        self.kills.append(Kill(time.monotonic(), number if kind == "engine" else -1))
        self._signal(pid, signal.SIGKILL)
        say(f"{kind} {number} was killed")
        if kind == "engine":
            self._after(absence, self._targets.start, number)

    def _after(self, seconds: float, call: Any, *arguments: Any) -> None:
        timer = threading.Timer(seconds, call, arguments)
        timer.start()
        self._later.append(timer)

    @staticmethod
    def _signal(pid: int, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


class Chaos:
    """The trainer's side: updates without end."""

    def __init__(self, targets: Targets, folder: str, seed: int, ways: list[str]) -> None:
        self._targets, self._ways = targets, ways
        self._sockets = os.path.join(folder, "s")
        os.mkdir(self._sockets, 0o700)
        self._random = random.Random(f"trainer {seed}")
        self._ranks = Ranks(TP * PP, path=sys.path, modules=["support.trainer_ranks"], grace=GRACE)
        self._connected = False
        self._version = 0
        self._failed = False
        self.way = ""
        self.updates: list[Update] = []
        self.by_way: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def one(self) -> bool:
        """One update, or what comes before it; whether the engines have been updated."""
        if not self._targets.ranks:
            self._connected = False
            self._targets.ranks = self._ranks.run(trainer_ranks.start, TP, PP, timeout=PATIENCE)
        if not self._connected or self._random.random() < RECONNECT:
            self.way = self._random.choice(self._ways)
            options = {
                "deadline": DEADLINE,
                "progress": False,
                "round_nbytes": 1 << 14,
                "ring_nbytes": 1 << 15,
                "bucket_nbytes": 1 << 15,
                "directory": self._sockets,
                "pause_mode": (mode := self._random.choice(("abort", "retract", "in_place"))),
                "flush_cache": mode != "in_place",
                **WAYS[self.way],
            }
            self._connected = self._ask(trainer_ranks.connect, self._targets.urls, options)
            if not self._connected:
                return False
        self._version += 1
        began = time.monotonic()
        good = self._ask(trainer_ranks.update, self._version)
        self.updates.append(Update(self._version, began, time.monotonic(), good))
        self.by_way[self.way] += good
        if good and self._failed:
            say(f"{self.way} update {self._version} succeeded again")
        self._failed = not good
        if not good and self._random.random() < 0.5:
            self._connected = False  # else the same connection recovers
        return good

    def _ask(self, function: Any, *arguments: Any) -> bool:
        """Whether all ranks succeeded; there is no other reason for no answer than their end."""
        began = time.monotonic()
        try:
            errors = self._ranks.run(function, *arguments, timeout=PATIENCE)
        except RankError as error:
            lost = [pid for pid in self._targets.ranks if not pid]
            self._targets.ranks = []
            self._ranks.close(force=True)
            text = str(error)
            self._log(function, began, f"{text} {error.results}")
            if not lost or "no answer in time" in text or "Traceback" in text:
                self.wrong.append(f"{self.way}: {text}")
            self.errors["a rank was killed"] += 1
            return False
        texts = set(errors)
        if texts != {""}:
            self._log(function, began, str(texts))
        for text in texts - {""}:
            self.errors[f"{self.way}: {text.partition(':')[0]}"] += 1
        if len(texts) > 1:
            self.errors[f"not all ranks say the same: {sorted(texts)}"] += 1
        return texts == {""}

    def _log(self, function: Any, began: float, text: str) -> None:
        say(f"{self.way} {function.__name__} {time.monotonic() - began:.1f} s: {text}")

    def close(self) -> None:
        if self._targets.ranks:
            self._ranks.run(trainer_ranks.close, timeout=PATIENCE)
        self._ranks.close()
        for entry in os.scandir(self._sockets):  # what the killed have left goes later
            os.utime(entry.path, (1, 1))
        sweep(self._sockets)
        if left := os.listdir(self._sockets):
            self.wrong.append(f"files are left: {left}")

    def abandon(self) -> None:
        self._ranks.close(force=True)


class Watch:
    """The watcher's process."""

    def __init__(self, urls: list[str]) -> None:
        self._pipe, theirs = Pipe()
        self._process = spawned(watch, urls, theirs)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(PATIENCE), "the watcher does not start"
        self.halves: int = self._pipe.recv()

    def findings(self) -> list[Look]:
        found = []
        while self._pipe.poll():
            found.append(self._pipe.recv())
        return found

    def looks(self) -> list[Look]:
        """All of them; the watcher ends."""
        self._pipe.send("end")
        while self._pipe.poll(PATIENCE):
            answer = self._pipe.recv()
            if isinstance(answer, list):
                return answer
        raise AssertionError("the watcher does not end")

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def chaos(seconds: float, seed: int, ways: list[str]) -> dict[str, Any]:
    """Runs it all; what was found."""
    folder = tempfile.mkdtemp(prefix="wsync-chaos-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nursery = Nursery(os.path.join(folder, "log"))
        stack.callback(nursery.close)
        targets = Targets(nursery, folder, free_ports(ENGINES))
        await_health(targets.urls)
        watcher = Watch(targets.urls)
        stack.callback(watcher.close)
        trainer = Chaos(targets, folder, seed, ways)
        stack.callback(trainer.abandon)
        _until_success(trainer)
        monkey = Monkey(targets, seed)
        begin = time.monotonic()
        monkey.start()
        while time.monotonic() < begin + seconds:
            trainer.one()
            for look in watcher.findings():
                say(f"WRONG {trainer.way} {look}")
        monkey.stop()
        await_health(targets.urls)
        _until_success(trainer)
        end = time.monotonic()
        trainer.close()
        time.sleep(1.0)  # the watcher looks once more
        looks = watcher.looks()
        last = {look.engine: look for look in looks if look.verdict == "right" and look.sent > end}
        trainer.wrong += [
            f"engine {number} does not answer right at the end: {last.get(number)}"
            for number in range(ENGINES)
            if number not in last or last[number].label != trainer.updates[-1].version
        ]
        found = chaos_judge.count(looks, trainer.updates, monkey.kills)
        bad = ("mixed", "mislabelled", "stale", "lasting")
        return {
            "seconds": round(end - begin, 1),
            "seed": seed,
            "halves": watcher.halves,
            "updates": trainer.updates,
            "by_way": trainer.by_way,
            "errors": trainer.errors,
            "faults": monkey.count,
            "kills": monkey.kills,
            "looks": {**dict.fromkeys(("right", *bad), 0), **found},
            "wrong": trainer.wrong + [f"{found[name]} {name} looks" for name in bad if found[name]],
            "examples": [look for look in looks if look.wrong][:10],
        }


def _until_success(trainer: Chaos) -> None:
    end = time.monotonic() + PATIENCE
    while not trainer.one():
        if time.monotonic() > end:
            raise AssertionError(f"no update succeeds without faults: {trainer.errors}")


def report(facts: dict[str, Any]) -> str:
    updates, kills = facts["updates"], facts["kills"]
    good = [update.ended - update.began for update in updates if update.succeeded]
    bad = [update.ended - update.began for update in updates if not update.succeeded]
    struck = {
        "engines": [kill for kill in kills if kill.engine >= 0],
        "ranks": [kill for kill in kills if kill.engine < 0],
    }
    spread = chaos_judge.spread
    lines = [
        f"{facts['seconds']} s, seed {facts['seed']}; {facts['halves']} halves told apart",
        f"updates that succeeded: {spread(good)} ({_list(facts['by_way'])}); failed: {spread(bad)}",
        "faults: " + _list(facts["faults"]),
        "looks: " + _list(facts["looks"]),
        *(
            f"from the kill to the next update, {what}: "
            + spread(chaos_judge.recoveries(updates, kills))
            for what, kills in struck.items()
        ),
        *(f"error: {n} {text}" for text, n in facts["errors"].most_common()),
        *(f"example: {look}" for look in facts["examples"]),
        *(f"WRONG: {text}" for text in facts["wrong"]),
    ]
    return "\n".join(f"chaos: {line}" for line in lines)


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="support.chaos")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    facts = chaos(chosen.seconds, chosen.seed, chosen.ways.split(","))
    print(report(facts))
    return 1 if facts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
