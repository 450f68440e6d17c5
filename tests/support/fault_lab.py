"""The fault matrix: one update with one fault, and everything that is to hold afterwards.

Run as a program it reads cells as JSON lines and answers each with a JSON line:
{"phase", "who", "how", "outcome", "errors", "wrong", "seconds"}; nothing in "wrong" is survival.
`who` is trainer rank 0, trainer rank 1, worker 0 or worker 1 of a tensor-parallel engine.  There
are three trainer ranks; the third has no worker.  The default group's store lives in rank 0, as it
does without an elastic agent.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist
from support import fault_engine
from support.fault_points import Fault, allowed, settled
from support.rows import rows_of, sharded

import wsync
from wsync import _core
from wsync.messages import payload
from wsync.messages.control import Control

DEADLINE = 8.0
OPTIONS: dict[str, Any] = {
    "deadline": DEADLINE,
    "progress": False,
    "round_nbytes": 1 << 13,
    "ring_nbytes": 1 << 14,
}
# an answer that takes longer than all deadlines in turn, and a slow machine, is none
PATIENCE = 120.0
ENDING = 6.0  # after the first error: an answer of the store, then two calls of engines, 2 s each
SLOW = 30.0  # a slow machine
RANKS = 3  # of a trainer; the third has no worker
Cell = tuple[str, str, str]  # phase, who, how


class Trainer:
    """What one trainer rank does for the lab."""

    def __init__(self, rank: int, port: int, folder: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=60),
        )
        self.rank, self.folder = rank, folder
        self.fault: Fault | None = None
        self.limits: dict[str, int] | None = None
        self.sync: wsync.Sync | None = None
        self.lends = False

    def connect(self, path: str, exchange: str) -> None:
        self.lends = exchange == "direct"  # engines read the ranks' memory
        how: dict[str, Any] = {**OPTIONS, "exchange": exchange}
        if self.lends:
            how = {**OPTIONS, "delivery": "direct"}
        options = wsync.Options(**how, directory=self.folder)
        engines = [fault_engine.Handle(path)] if self.rank == 0 else []
        self.sync = wsync.connect(sharded(fault_engine.weights(0)), engines, options=options)

    def update(self, version: str) -> None:
        assert self.sync is not None
        try:
            weights = rows_of(fault_engine.weights(int(version)))
            if self.lends:  # each time elsewhere
                weights = {name: tensor.share_memory_() for name, tensor in weights.items()}
            self.sync.update(weights, version=version)
        finally:
            if self.fault is not None:
                self.fault.disarm()

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
            self.sync = None

    def census(self) -> tuple[dict[str, int], dict[str, int]]:
        found = settled(self.limits)
        self.limits = self.limits or allowed(found)
        return found, self.limits

    def arm(self, phase: str, how: str) -> None:
        self.fault = Fault(phase, how, self.folder)
        self.fault.arm()

    def outcome(self) -> bool:
        fault, self.fault = self.fault, None
        return fault is not None and fault.struck


def run_trainer(rank: int, port: int, folder: str, pipe: Connection) -> None:
    """A trainer rank; does not return."""
    try:
        trainer = Trainer(rank, port, folder)
        while True:
            what, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(trainer, what)(*arguments)))
            except (Exception, KeyboardInterrupt) as error:
                named = isinstance(error, wsync.WsyncError | KeyboardInterrupt)
                text = f"{type(error).__name__}: {error}"
                del error
                pipe.send((False, text if named else "".join(traceback.format_exc())))
    except EOFError:
        pass
    finally:
        os._exit(0)


class Process:
    """A forked process, and the pipe to it."""

    def __init__(self, name: str, run: Any, *arguments: Any, others: list[Process]) -> None:
        self.name = name
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for other in others:
                other.pipe.close()
            self.pipe.close()
            os.setpgid(0, 0)
            run(*arguments, theirs)
        theirs.close()
        self.ended = False

    def ask(self, what: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send((what, arguments))

    def answer(self, end: float) -> tuple[bool, Any]:
        """(success, result or text); "gone" and "no answer" are texts."""
        if not self.pipe.poll(max(end - time.monotonic(), 0.0)):
            return False, "no answer"
        try:
            good, value = self.pipe.recv()
            return bool(good), value
        except (EOFError, OSError):
            return False, "gone"

    def end(self, patience: float) -> bool:
        """Whether the process ends by itself once nobody wants anything of it."""
        self.pipe.close()
        limit = time.monotonic() + patience
        while not self.ended and time.monotonic() < limit:
            self.ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            time.sleep(0.01)
        if self.ended:
            return True
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.ended = True
        return False


class Bench:
    """The processes of one cell."""

    def __init__(self, folder: str, exchange: str) -> None:
        self.folder, self.exchange = folder, exchange
        self.sockets = os.path.join(folder, "s")
        os.mkdir(self.sockets, 0o700)
        self.trainers: list[Process] = []
        self.heads: list[tuple[int, list[int]]] = []
        self.path = ""
        self.handle = fault_engine.Handle("")

    def engine(self) -> fault_engine.Handle:
        path = os.path.join(self.folder, f"engine{len(self.heads)}")
        pid = os.fork()
        if pid == 0:
            for trainer in self.trainers:
                trainer.pipe.close()
            fault_engine.run_head(path)
        self.heads.append((pid, []))
        handle = fault_engine.Handle(path)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                info = handle.call("info", None, PATIENCE)
                break
            except wsync.PeerClosedError:  # it does not listen yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        self.heads[-1] = (pid, info["pids"])
        self.path = path
        return handle

    def start_trainers(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.trainers = []
        for rank in range(RANKS):
            self.trainers.append(
                Process(f"rank{rank}", run_trainer, rank, port, self.sockets, others=self.trainers)
            )

    def all(self, what: str, *arguments: Any) -> list[tuple[bool, Any]]:
        for trainer in self.trainers:
            trainer.ask(what, *arguments)
        end = time.monotonic() + PATIENCE
        return [trainer.answer(end) for trainer in self.trainers]

    def must(self, what: str, *arguments: Any) -> list[Any]:
        answers = self.all(what, *arguments)
        if not all(good for good, _ in answers):
            raise RuntimeError(f"{what}: {answers}")
        return [value for _, value in answers]

    def worker(self, rank: int, what: str, argument: Any = None) -> Any:
        return self.handle.call("ask", (rank, what, argument), PATIENCE)

    def held(
        self, rank: int, among: tuple[str, ...] = ("1", "2", "3")
    ) -> tuple[str, bool, int | None]:
        """(version whose bytes a worker holds, or "mixed"; consistent; its last update)"""
        found, consistent, update = self.worker(rank, "held")
        for version in among:
            whole = fault_engine.weights(int(version)).values()
            if found == [fault_engine.share(t, rank).numpy().tobytes() for t in whole]:
                return version, consistent, update
        return "mixed", consistent, update

    def end(self) -> None:
        for trainer in self.trainers:
            if not trainer.ended:
                with contextlib.suppress(OSError):
                    os.kill(trainer.pid, signal.SIGCONT)
                trainer.end(0.0)
        for head, workers in self.heads:
            for pid in (*workers, head):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(head, 0)


class Experiment:
    """One cell, from a healthy update to the recovery."""

    def __init__(self, cell: Cell, bench: Bench) -> None:
        self.phase, self.who, self.how = cell
        self.bench = bench
        self.rank = int(self.who[-1]) if self.who.startswith("rank") else None
        self.of_worker = int(self.who[-1]) if self.who.startswith("worker") else None
        self.wrong: list[str] = []
        self.errors: dict[str, str] = {}
        self.outcome = ""
        self.seconds = 0.0

    def run(self) -> None:
        bench = self.bench
        bench.handle = bench.engine()
        bench.start_trainers()
        bench.must("connect", bench.path, bench.exchange)
        bench.must("update", "1")
        bench.must("close")
        bench.must("census")
        for rank in range(fault_engine.WORKERS):
            bench.worker(rank, "census")
        bench.must("connect", bench.path, bench.exchange)
        self._arm()
        self._strike()
        if self.outcome == "failed":
            self._look_at_engine()
        self._recover()

    def _arm(self) -> None:
        bench = self.bench
        if self.rank is not None:
            trainer = bench.trainers[self.rank]
            trainer.ask("arm", self.phase, self.how)
            trainer.answer(time.monotonic() + PATIENCE)
        else:
            bench.worker(int(self.who[-1]), "arm", (self.phase, self.how, bench.sockets))

    def _strike(self) -> None:
        bench, start = self.bench, time.monotonic()
        for trainer in bench.trainers:
            trainer.ask("update", "2")
        end = start + PATIENCE
        victim = None if self.rank is None else bench.trainers[self.rank]
        dies = self.how == "kill"
        late = victim if self.how == "stop" else None
        answers = {t: t.answer(end) for t in bench.trainers if t is not late}
        self.seconds = time.monotonic() - start
        self._compare_seconds("the ranks", start)
        if late is not None:
            start = time.monotonic()
            os.kill(late.pid, signal.SIGCONT)
            answers[late] = late.answer(start + PATIENCE)
            self._compare_seconds(late.name, start)
        elif self.how == "stop" and self.of_worker is not None:
            os.kill(bench.heads[-1][1][self.of_worker], signal.SIGCONT)
        for trainer, (good, value) in answers.items():
            if trainer is victim and dies:
                if value != "gone":
                    self.wrong.append(f"{trainer.name} was to end: {value}")
                continue
            self.errors[trainer.name] = "" if good else str(value)
        self._compare_errors(late)
        self._check_struck(dies)

    def _compare_seconds(self, who: str, start: float) -> None:
        """Whether somebody was told in time how an update ended."""
        options = wsync.Options(**OPTIONS)
        # the others miss a stopped rank in a collective; its worker, and all else, is missed first
        stopped = self.how == "stop" and self.rank is not None
        limit = (options.exchange_deadline if stopped else options.deadline) + ENDING + SLOW
        seconds = time.monotonic() - start
        if seconds > limit:
            self.wrong.append(f"{who} took {seconds:.1f} s, the limit is {limit:.0f} s")

    def _compare_errors(self, late: Process | None) -> None:
        texts = set(self.errors.values())
        if late is not None:
            # it learns what the others said, where they were not able to tell each other
            survivors = {text for name, text in self.errors.items() if name != late.name}
            texts = survivors if self.errors[late.name] else texts
        self.outcome = "succeeded" if texts == {""} else "failed"
        if len(texts) > 1:
            self.wrong.append("the ranks say different things")
        for text in set(self.errors.values()) - {""}:
            if text in ("gone", "no answer") or not hasattr(_core, text.partition(":")[0]):
                self.wrong.append(f"no named error: {text}")
        if self.outcome == "succeeded":
            self.wrong.append("nobody noticed")

    def _check_struck(self, dies: bool) -> None:
        if self.rank is not None and not dies:
            trainer = self.bench.trainers[self.rank]
            trainer.ask("outcome")
            good, value = trainer.answer(time.monotonic() + PATIENCE)
            struck = good and value
        elif self.of_worker is not None and not dies:
            struck = self.bench.worker(self.of_worker, "disarm")
        else:
            return
        if not struck:
            self.wrong.append("the fault did not strike")

    def _look_at_engine(self) -> None:
        """Paused, with the old version, unless all of its workers have every byte."""
        bench = self.bench
        info = bench.handle.call("info", None, PATIENCE)
        dead = {self.of_worker} - {None} if self.how == "kill" else set()
        held = {r: bench.held(r) for r in range(fault_engine.WORKERS) if r not in dead}
        for rank, (version, consistent, _) in held.items():
            if version == "mixed" and consistent:
                self.wrong.append(f"worker {rank} holds a mixture and does not know")
            if (version, consistent) == ("2", True) and self.phase not in ("commit", "close"):
                self.wrong.append(f"worker {rank} has committed what others lack")
        new = not dead and all(entry[:2] == ("2", True) for entry in held.values())
        old = not dead and all(entry[:2] == ("1", True) for entry in held.values())
        if info["version"] == "2" and not new:
            self.wrong.append(f"the engine took version 2: {held}")
        if not info["paused"] and not (new or old):
            self.wrong.append(f"the engine goes on: {held}")
        if any(not consistent for _, consistent, _ in held.values()):
            closing = Control(op="close", session="0", update=2, deadline=DEADLINE).to_bytes()
            refused = False
            try:
                bench.handle.update_weights(
                    [payload.control(closing)] * fault_engine.WORKERS,
                    load_format=None,
                    weight_version="2",
                    timeout=PATIENCE,
                )
            except wsync.WsyncError:
                refused = True
            if not refused:
                self.wrong.append("an inconsistent engine took the version on")

    def _recover(self) -> None:
        bench, dies = self.bench, self.how == "kill"
        if self.of_worker is not None and dies:
            bench.all("close")
            bench.handle = bench.engine()
            bench.must("connect", bench.path, bench.exchange)
        elif self.rank is not None and dies:
            self._leave([t for n, t in enumerate(bench.trainers) if n != self.rank])
            bench.trainers[self.rank].end(PATIENCE)
            bench.start_trainers()
            bench.must("connect", bench.path, bench.exchange)
        start = time.monotonic()
        answers = bench.all("update", "3")
        self._compare_seconds("the next update", start)
        if not all(good for good, _ in answers):
            self.wrong.append(f"no recovery: {answers}")
            return
        for rank in range(fault_engine.WORKERS):
            version, consistent, _ = bench.held(rank)
            if (version, consistent) != ("3", True):
                self.wrong.append(f"worker {rank} holds {version} after the recovery")
        info = bench.handle.call("info", None, PATIENCE)
        if info["version"] != "3" or info["paused"]:
            self.wrong.append(f"after the recovery: {info}")
        bench.must("close")  # a connection has a thread in each worker
        for rank in range(fault_engine.WORKERS):
            self._compare("worker", rank, *bench.worker(rank, "census"))
        self._leave(bench.trainers)
        self._look_for_files()

    def _compare(self, what: str, rank: int, found: dict[str, int], limit: dict[str, int]) -> None:
        more = {n: (found[n], limit[n]) for n in found if found[n] > limit[n]}
        if more:
            self.wrong.append(f"{what} {rank} holds more than before: {more}")

    def _leave(self, trainers: list[Process]) -> None:
        """Trainer ranks hold nothing any more, and end."""
        for trainer in trainers:
            trainer.ask("close")
        end = time.monotonic() + PATIENCE
        for trainer in trainers:
            trainer.answer(end)
        for trainer in trainers:
            trainer.ask("census")
        for trainer in trainers:
            good, value = trainer.answer(time.monotonic() + PATIENCE)
            if not good:
                self.wrong.append(f"{trainer.name}: {value}")
            else:
                self._compare("trainer rank", int(trainer.name[-1]), *value)
        for trainer in trainers:
            if not trainer.end(PATIENCE):
                self.wrong.append(f"{trainer.name} did not end")

    def _look_for_files(self) -> None:
        """Nothing is left but what a killed process could not take along."""
        folder = self.bench.sockets
        if self.how == "kill" or not os.path.isdir(folder):
            return
        left = os.listdir(folder)
        if left:
            self.wrong.append(f"files are left: {left}")


def run_cell(cell: Cell, exchange: str) -> dict[str, Any]:
    """Tries one cell and says what became of it."""
    folder = tempfile.mkdtemp(prefix="wsync-cell-")
    bench = None
    experiment = None
    wrong: list[str] = []
    try:
        bench = Bench(folder, exchange)
        experiment = Experiment(cell, bench)
        experiment.run()
    except Exception:
        wrong.append(traceback.format_exc())
    finally:
        if bench is not None:
            bench.end()
        shutil.rmtree(folder, ignore_errors=True)
    phase, who, how = cell
    found: dict[str, Any] = {"phase": phase, "who": who, "how": how, "exchange": exchange}
    if experiment is not None:
        found["outcome"] = experiment.outcome
        found["errors"] = experiment.errors
        found["seconds"] = round(experiment.seconds, 2)
        wrong = experiment.wrong + wrong
    return {**found, "wrong": wrong}


def _asked() -> Iterator[tuple[Cell, str]]:
    for line in sys.stdin:
        phase, who, how, exchange = json.loads(line)
        yield (phase, who, how), exchange


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # see preloaded: each look at what a process holds collects garbage
    for cell, exchange in _asked():
        print(json.dumps(run_cell(cell, exchange)), flush=True)


if __name__ == "__main__":
    main()
