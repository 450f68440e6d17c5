"""A trainer connects to an engine, updates it and lets go, again and again: does anything grow?

`python -P -m support.cycles WAY COUNT`, with tests/ on PYTHONPATH; WAY is one of `WAYS`, or "all".
The trainer and the engine, an HTTP server, are a process each, and are looked at from outside:
memory, descriptors, threads, and files in /dev/shm and in the folder for temporary ones.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import requests
import torch
from support import known_weights
from support.procs import spawned

import wsync
from wsync.demo.engines.serve import serve_in_process
from wsync.machine.temporary_environment import variable

WAYS: dict[str, dict[str, Any]] = {
    "receiver": {"delivery": "wsync"},
    "direct": {"delivery": "direct"},
    "stock": {"delivery": "stock"},
    "distributed": {"delivery": "distributed", "broadcast": "wsync"},
    "broadcast": {"delivery": "distributed", "broadcast": "bucket"},
    "disk": {},
}
WARM = 0.2  # of the cycles: until then caches and allocators may grow
SAMPLES = 40
SLACK_NBYTES = 1 << 20  # what allocators may keep
SLACK_THREADS = 8  # a pool makes another one where a request comes a moment too early
JUDGED = 500  # cycles from which memory is judged: in fewer, that says nothing
PATIENCE = 120.0
SETTLE_SECONDS = 10.0  # for threads and descriptors that are on their way out
_THREADS = 32  # as wsync.demo.engines.app has them for each kind of request

Figures = dict[str, int]


# --- the trainer's process ----------------------------------------------------------------------


def run_trainer(url: str, way: str, folder: str, pipe: Connection) -> None:
    """Answers every number of cycles that it is given when they are done."""
    torch.set_num_threads(1)
    weights = [known_weights.weights(version) for version in (0, 1)]
    if way == "direct":
        for tensor in (tensor for each in weights for tensor in each.values()):
            tensor.share_memory_()
    version = 0
    while True:
        try:
            count = pipe.recv()
        except EOFError:
            return
        for _ in range(count):
            version += 1
            with _connect(weights[version % 2], url, way, folder) as sync:
                sync.update(version=version)
        gc.collect()
        pipe.send(version)


def _connect(
    weights: known_weights.Weights, url: str, way: str, folder: str
) -> wsync.Sync | wsync.DiskSync:
    if way == "disk":
        options = wsync.Options(deadline=PATIENCE, progress=False)
        base = known_weights.config()
        return wsync.DiskSync(weights, [url], folder=folder, base=base, options=options)
    options = wsync.Options(
        deadline=PATIENCE,
        progress=False,
        round_nbytes=1 << 16,
        ring_nbytes=1 << 17,
        bucket_nbytes=1 << 16,
        **WAYS[way],
    )
    return wsync.connect(weights, [url], options=options)


# --- what a process holds -----------------------------------------------------------------------


def figures(pid: int) -> Figures:
    """Bytes of a process's own and of shared memory, descriptors and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    parts = [line.split()[1] for line in status.splitlines() if line.startswith(_MEMORY)]
    return {
        "memory": sum(map(int, parts)) * 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


_MEMORY = ("RssAnon:", "RssShmem:")


def fill_pools(url: str, pid: int) -> None:
    """Makes every thread that the pools of the engine of a process may ever have."""
    before = 0
    while (threads := figures(pid)["threads"]) > before:
        before = threads
        _fill_pools(url)


def _fill_pools(url: str) -> None:
    """Requests that wait for a paused engine take a thread each, and then updates that wait for
    those requests; all but a few that come too late on a busy machine."""
    folder = "/nonexistent"
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    handle = wsync.handle(url)
    handle.pause("in_place", PATIENCE)
    with concurrent.futures.ThreadPoolExecutor(2 * _THREADS) as pool:
        waiting = [_post(pool, url + "/generate", body) for _ in range(_THREADS)]
        time.sleep(1.0)
        handle.resume(PATIENCE)
        path = {"model_path": folder}
        url += "/update_weights_from_disk"
        updates = [_post(pool, url, path) for _ in range(_THREADS)]
        assert all(answer.result(PATIENCE) == 200 for answer in waiting)
        assert all(answer.result(PATIENCE) == 400 for answer in updates)


def _post(
    pool: concurrent.futures.Executor, url: str, body: dict[str, Any]
) -> concurrent.futures.Future[int]:
    def post() -> int:
        with requests.Session() as session:
            session.trust_env = False
            return session.post(url, json=body, timeout=PATIENCE).status_code

    return pool.submit(post)


# --- the measurement ----------------------------------------------------------------------------


class Cycles:
    """A trainer and an engine, and what was seen of them."""

    def __init__(self, way: str, pids: dict[str, int], ask: Callable[[int], int]) -> None:
        self.way, self._pids, self._ask = way, pids, ask
        self._temporary = tempfile.gettempdir()
        self._shared = set(os.listdir("/dev/shm"))
        self.samples: list[dict[str, Figures]] = []

    def run(self, count: int) -> dict[str, Any]:
        self._ask(max(int(count * WARM), 2))
        first = self._settled(None)
        start = time.monotonic()
        done = 0
        for sample in range(1, SAMPLES + 1):
            step = count * sample // SAMPLES - done
            if step:
                self._ask(step)
                done += step
                self.samples.append(self._look())
        seconds = time.monotonic() - start
        last = self._settled(first)
        return {
            "way": self.way,
            "cycles": count,
            "seconds": round(seconds, 1),
            "first": first,
            "last": last,
            "memory": {who: self._slope(who, count) for who in self._pids},
            "grows": self._grows(first, last, count),
        }

    def _look(self) -> dict[str, Figures]:
        found = {who: figures(pid) for who, pid in self._pids.items()}
        new = set(os.listdir("/dev/shm")) - self._shared
        ours = [name for name in new if names_one_of(name, [os.getpid(), *self._pids.values()])]
        files = {"/dev/shm": len(ours), "temporary": len(os.listdir(self._temporary))}
        return {**found, "files": files}

    def _settled(self, limits: dict[str, Figures] | None) -> dict[str, Figures]:
        """What there is once all but memory is within limits, or has not changed for a while."""
        end = time.monotonic() + SETTLE_SECONDS
        found = self._look()
        while time.monotonic() < end:
            time.sleep(0.5)
            before, found = found, self._look()
            if not _more(limits or before, found):
                break
        return found

    def _slope(self, who: str, count: int) -> tuple[int, int, float]:
        """Bytes in the third quarter of the samples and in the last, and what a cycle has added:
        a process that makes threads again and again takes long to have all the memory it needs."""
        values = [sample[who]["memory"] for sample in self.samples]
        part = max(len(values) // 4, 1)
        early, late = (
            statistics.median(values[-2 * part : -part]),
            statistics.median(values[-part:]),
        )
        return int(early), int(late), (late - early) / max(count / 4, 1)

    def _grows(self, first: dict[str, Figures], last: dict[str, Figures], count: int) -> list[str]:
        found = _more(first, last)
        for who in self._pids:
            early, late, _ = self._slope(who, count)
            if count >= JUDGED and late > early + SLACK_NBYTES:
                found.append(f"{who}: memory {early} to {late}")
        return found


def names_one_of(name: str, pids: Sequence[int]) -> bool:
    """Whether a file in /dev/shm names one of these processes, as torch's and wsync's do: other
    programs of the machine have theirs there."""
    owner = name.removeprefix("torch_").removeprefix("wsync_").partition("_")[0]
    return owner in map(str, pids)


def _more(limits: dict[str, Figures], found: dict[str, Figures]) -> list[str]:
    """What there is more of, but for memory."""
    return [
        f"{who}: {name} {limit} to {found[who][name]}"
        for who, all_limits in limits.items()
        for name, limit in all_limits.items()
        if name != "memory"
        if found[who][name] > limit + (SLACK_THREADS if name == "threads" else 0)
    ]


@contextlib.contextmanager
def _running(way: str) -> Iterator[Cycles]:
    """The processes, with a folder for temporary files of their own."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wsync-cycles-"))
        place, versions = os.path.join(folder, "tmp"), os.path.join(folder, "versions")
        os.mkdir(place)
        stack.enter_context(variable("TMPDIR", place))
        # threads that come and go would take arenas, and memory of each, at random
        stack.enter_context(variable("MALLOC_ARENA_MAX", "1"))
        tempfile.tempdir = None  # read anew
        stack.callback(setattr, tempfile, "tempdir", None)
        stack.callback(_await_empty, place)  # torch_shm_manager ends a moment after the others
        server = stack.enter_context(serve_in_process(known_weights.config(), dtype="float32"))
        fill_pools(server.url, server.pid)
        ours, theirs = Pipe()
        stack.callback(ours.close)
        trainer = spawned(run_trainer, server.url, way, versions, theirs)
        trainer.start()
        stack.callback(trainer.kill)
        theirs.close()

        def ask(count: int) -> int:
            ours.send(count)
            end = time.monotonic() + PATIENCE + count
            while not ours.poll(1.0):
                assert trainer.is_alive(), "the trainer has ended"
                assert time.monotonic() < end, "the trainer does not come back"
            version: int = ours.recv()
            _verify(server.url, version)
            return version

        assert trainer.pid is not None
        yield Cycles(way, {"trainer": trainer.pid, "engine": server.pid}, ask)


def _await_empty(folder: str) -> None:
    end = time.monotonic() + SETTLE_SECONDS
    while os.listdir(folder) and time.monotonic() < end:
        time.sleep(0.05)


def _verify(url: str, version: int) -> None:
    """The engine has the weights of the trainer's last update."""
    found = wsync.handle(url).model_info(PATIENCE)
    assert (found["weight_version"], found["consistent"]) == (str(version), True), found
    with requests.Session() as session:
        session.trust_env = False
        answer = session.post(url + "/weights_checker", json={}, timeout=PATIENCE).json()
    assert answer["ranks"][0]["checksums"] == known_weights.checksums(version % 2)


def cycles(way: str, count: int) -> dict[str, Any]:
    """`count` cycles of one way, after a warm-up; "grows" in what is returned says what does."""
    with _running(way) as running:
        return running.run(count)


def report(facts: dict[str, Any]) -> str:
    first, last = facts["first"], facts["last"]
    parts = [
        f"{who} {name} {first[who][name]}-{last[who][name]}"
        for who in first
        for name in first[who]
        if name != "memory"
    ]
    parts += [
        f"{who} memory {first[who]['memory'] / 1e6:.1f}-{late / 1e6:.1f} MB, in the last quarter "
        f"{slope:+.0f} bytes a cycle"
        for who, (_, late, slope) in facts["memory"].items()
    ]
    verdict = "GROWS: " + "; ".join(facts["grows"]) if facts["grows"] else "flat"
    return (
        f"cycles: {facts['way']}: {facts['cycles']} in {facts['seconds']} s: "
        f"{', '.join(parts)}: {verdict}"
    )


def main() -> int:
    torch.set_num_threads(1)
    way, count = sys.argv[1:]
    grows = False
    for each in WAYS if way == "all" else way.split(","):
        facts = cycles(each, int(count))
        grows |= bool(facts["grows"])
        print(report(facts), flush=True)
    return 1 if grows else 0


if __name__ == "__main__":
    sys.exit(main())
