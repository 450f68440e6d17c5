"""The part of `pause` with engines that answer requests meanwhile: the transformers engine of
wsync's demo, and a whole SGLang server on a CPU.

One user of the first and two users of the second each keep a request running.  When it is aborted,
they ask for more tokens after those that they have.  An update comes every few seconds, by wsync
and in slime's order of work in turns: pause, empty the cache, send buckets of whole tensors,
continue.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import requests
import torch
from support import guide
from support.server_answers import Answer
from support.server_models import PATIENCE, PROMPT, Checkpoint, checkpoint
from support.servers import PLACE, Fresh, packages
from support.sglang_server import NEWEST, Served, plain_environment

import wsync
from benchmarks import peers, sglang_bucket
from benchmarks.environment import Skipped
from wsync.demo.engines.serve import ServerProcess, serve_in_process
from wsync.machine.deadline import Deadline

REPEATS = 7
EVERY = 2.0  # seconds between updates
MODES = ("abort", "retract", "in_place")
Engine = ServerProcess | Served
Models = tuple[Checkpoint, Checkpoint]


def run() -> Iterator[dict[str, Any]]:
    given: Any = {"experts": False, "dtype": torch.float32}
    with tempfile.TemporaryDirectory() as folder:
        first = checkpoint(Path(folder, guide.MODEL), 1, **given)  # the server's own
        models = first, checkpoint(Path(folder, "other"), 2, **given)
        with serve_in_process(first.folder) as engine:
            yield from _cases("transformers engine", engine, models, [_TokenByToken])
        if PLACE not in os.environ:
            raise Skipped(
                f"SGLang's server needs its packages: `.ci/run servers` installs them, and {PLACE} "
                "names their folder"
            )
        with (
            contextlib.closing(Fresh(plain_environment(packages(NEWEST)))) as start,
            Served(start, first, Path(folder, "log")) as server,
        ):
            yield from _cases("SGLang server", server, models, [_Stream] * 2)


def _cases(
    name: str, engine: Engine, models: Models, ask: Sequence[Callable[..., Any]]
) -> Iterator[dict[str, Any]]:
    wanted = [_reloaded(engine, model) for model in models]
    for mode in MODES:
        for stage in ("off", "on"):
            options = wsync.Options(
                deadline=PATIENCE,
                progress=False,
                delivery="wsync",
                pause_mode=mode,
                flush_cache=mode != "in_place",
                stage=stage,
            )
            with wsync.connect(models[1].weights, [engine.url], options=options) as sync:
                sync.update()
                verified = _checksums(engine) == wanted[1]
                with _Users(engine, ask) as users:
                    turns = _Turns(engine, sync, users)
                    for turn in range(REPEATS):
                        old, new = turn % 2, 1 - turn % 2
                        nbytes = turns.wsync(models[old].weights)
                        verified &= _checksums(engine) == wanted[old]
                        turns.slime(models[new].weights)
                        verified &= _checksums(engine) == wanted[new]
            case = f"{name}, {mode}" + ", staged" * (stage == "on")
            yield {"benchmark": "pause", "case": case, "bytes": nbytes, "verified": verified} | (
                turns.row()
            )


class _Turns:
    """Updates of one engine by wsync's connection and in slime's order, and what they took."""

    def __init__(self, engine: Engine, sync: wsync.Sync, users: _Users) -> None:
        self._engine, self._sync, self._users = engine, sync, users
        self._found: dict[str, list[float]] = {}
        self._aborted = 0

    def _add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._found.setdefault(name, []).append(value)

    def wsync(self, weights: dict[str, torch.Tensor]) -> int:
        """Returns the bytes of the weights."""
        time.sleep(EVERY / 2)  # what compared the tensors held tokens back
        start = time.perf_counter()
        time.sleep(EVERY / 2)
        begun, before = time.perf_counter(), self._users.aborted
        report = self._sync.update(weights)
        ended = time.perf_counter()
        self._add(usual_gap=self._users.gap(start, begun), gap=self._users.gap(begun, ended))
        self._add(paused=report.paused[self._engine.url], whole=ended - begun)
        time.sleep(EVERY)
        self._aborted += self._users.aborted - before
        return report.model_nbytes

    def slime(self, weights: dict[str, torch.Tensor]) -> None:
        begun = time.perf_counter()
        _slime(self._engine, weights)
        ended = time.perf_counter()
        self._add(peer_paused=ended - begun, peer_gap=self._users.gap(begun, ended))

    def row(self) -> dict[str, Any]:
        asked = len(self._users) * REPEATS
        middle = {name: statistics.median(values) for name, values in self._found.items()}
        return {
            "seconds": middle["paused"],
            "peer": "slime's order of work",
            "peer_seconds": middle["peer_paused"],
            "ratio": middle["peer_paused"] / middle["paused"],
            "gap_seconds": middle["gap"],
            "peer_gap_seconds": middle["peer_gap"],
            "usual_gap_seconds": middle["usual_gap"],
            "aborted": self._aborted,
            "requests": asked,
            "all_seconds": self._found,
            "figure": f"tokens stop for {middle['gap']:.3f} s (slime's {middle['peer_gap']:.3f}; "
            f"usually {middle['usual_gap']:.3f}), {self._aborted} of {asked} requests aborted",
        }


class _Users:
    """Threads that keep requests running, and the moments at which their tokens came."""

    def __init__(self, engine: Engine, ask: Sequence[Callable[..., Any]]) -> None:
        """ask: for each user, what makes a request of an engine, a prompt and a list to which it
        adds the moments of tokens."""
        self.aborted = 0
        self._engine, self._ended = engine, threading.Event()
        self._moments: list[list[float]] = [[] for _ in ask]
        users = zip(ask, self._moments, strict=True)
        self._threads = [threading.Thread(target=self._ask, args=user) for user in users]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def __len__(self) -> int:
        return len(self._moments)

    def _ask(self, request: Callable[..., Any], moments: list[float]) -> None:
        tokens: list[int] = []
        while not self._ended.is_set():
            with request(self._engine, PROMPT + tokens, moments) as answer:
                while not (reason := answer.reason) and not self._ended.is_set():
                    answer.read(len(answer.tokens) + 1)
            tokens = (tokens + answer.tokens) if reason == "abort" else []
            self.aborted += reason == "abort"

    def gap(self, start: float, end: float) -> float:
        """The longest time without a token of a user that has a part between two moments."""
        deadline = time.perf_counter() + PATIENCE
        while any(not each or each[-1] < end for each in self._moments):
            assert time.perf_counter() < deadline, "no tokens come"
            time.sleep(0.01)
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, map(list, self._moments)))
        return max((b - a for a, b in pairs if b > start and a < end), default=0.0)


class _Stream(Answer):
    """A request of SGLang, whose events have all tokens so far."""

    def __init__(self, server: Served, prompt: list[int], moments: list[float]) -> None:
        self._moments = moments
        greedy = {"temperature": 0, "max_new_tokens": 1000 - len(prompt), "ignore_eos": True}
        super().__init__(server, "/generate", input_ids=prompt, sampling_params=greedy)

    def take(self, event: dict[str, Any]) -> None:
        if len(event["output_ids"]) > len(self.tokens):
            self._moments.append(time.perf_counter())
        self.last, self.tokens = event, event["output_ids"]

    @property
    def reason(self) -> str:
        """Why it has ended, or ""."""
        found = self.last and self.last["meta_info"]["finish_reason"]
        return found["type"] if found else ""


class _TokenByToken:
    """Requests of wsync's demo engine, which does not stream, for one token each."""

    def __init__(self, engine: Engine, prompt: list[int], moments: list[float]) -> None:
        self._engine, self._prompt, self._moments = engine, prompt, moments
        self.tokens: list[int] = []
        self.reason = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, count: int) -> None:
        while len(self.tokens) < count and not self.reason:
            one = {"max_new_tokens": 1, "ignore_eos": True}
            known = self._prompt + self.tokens
            answer = _post(self._engine, "/generate", input_ids=known, sampling_params=one)
            if answer["meta_info"]["finish_reason"]["type"] == "abort":
                self.reason = "abort"
                return
            self._moments.append(time.perf_counter())
            self.tokens += answer["output_ids"]
            self.reason = "length" * (len(known) > 100)


def _slime(engine: Engine, weights: dict[str, torch.Tensor]) -> None:
    """What slime asks of an engine, and the session that SGLang 0.5.23 wants around tensors."""

    def call(payload: bytes) -> None:
        _post(
            engine,
            "/update_weights_from_tensor",
            serialized_named_tensors=[base64.b64encode(payload).decode()],
            load_format="flattened_bucket",
            flush_cache=False,
        )

    _post(engine, "/pause_generation")
    deadline = Deadline(PATIENCE)
    while requests.get(engine.url + "/flush_cache", timeout=PATIENCE).status_code != 200:
        deadline.check(f"{engine.url}: its cache is not empty")
    in_session = isinstance(engine, Served)
    if in_session:
        _post(engine, "/begin_weight_update")
    with _named_files():
        peers.send([*weights.items()], sglang_bucket.FlattenedTensorBucket, call)
    if in_session:
        _post(engine, "/end_weight_update")
    _post(engine, "/continue_generation")


@contextlib.contextmanager
def _named_files() -> Iterator[None]:
    """Has torch share memory, and name SGLang's class, so that processes other than our children
    read it."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    sglang_bucket.pose()
    sglang_bucket.FlattenedTensorMetadata.__module__ = "sglang.srt.weight_sync.tensor_bucket"
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _checksums(engine: Engine) -> list[dict[str, str]]:
    answer = _post(engine, "/weights_checker", action="checksum")
    return [rank["checksums"] for rank in answer["ranks"]]


def _reloaded(engine: Engine, model: Checkpoint) -> list[dict[str, str]]:
    """The sums of all tensors after SGLang's own load."""
    _post(engine, "/update_weights_from_disk", model_path=str(model.folder))
    return _checksums(engine)


def _post(engine: Engine, path: str, **body: Any) -> Any:
    """The answer to one request, which must be a good one."""
    answer = requests.post(engine.url + path, json=body, timeout=PATIENCE)
    assert answer.ok, (path, answer.status_code, answer.text)
    return answer.json()
