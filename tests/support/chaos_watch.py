"""Somebody outside who asks engines without pause what they answer with.

An answer of /generate is one response that was made inside the engine's gate: its log probability
depends on every half of every tensor, and its label is the version that the engine says it is of.
The weights are a function of the version (support.known_weights), so the watcher computes what
each version answers, and compares.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import requests
import torch
from support import known_weights

from wsync.demo.engines.request_bodies import SamplingParams
from wsync.demo.engines.transformers import Engine

TOLERANCE = 1e-5  # the same operations on the same weights
SENSITIVITY = 1e-3  # what half a tensor of another version changes at least
AHEAD = 50  # versions beyond the last known that may have been tried
_ANSWER_SECONDS = 30.0  # a paused engine answers when it goes on
_AGAIN_SECONDS = 0.02

Answer = tuple[int, float]


class Look(NamedTuple):
    """One question and what came of it; times of time.monotonic().

    verdict: "right"; "mislabelled": the weights are those of the version `held`, not of the label;
    "mixed": they are of no version; "info": what /model_info says, without weights; "empty": the
    answer was ended by a pause; "refused": the engine said that it is inconsistent; "gone".
    """

    sent: float
    answered: float
    engine: int
    verdict: str
    label: int = -1
    held: int = -1
    details: str = ""

    @property
    def wrong(self) -> bool:
        return self.verdict in ("mislabelled", "mixed")


class Oracle:
    """What an engine with the weights of a version answers."""

    def __init__(self) -> None:
        self._engine = Engine(known_weights.model(0))
        self._lock = threading.Lock()
        self._known: dict[int, Answer] = {}
        self._newest = 0

    @staticmethod
    def prompt() -> list[int]:
        """Every token once: all of the embedding counts."""
        return list(range(known_weights.config().vocab_size))

    def answer(self, version: int) -> Answer:
        with self._lock:
            if version not in self._known:
                self._known[version] = self.of(known_weights.weights(version))
            return self._known[version]

    def of(self, weights: dict[str, torch.Tensor]) -> Answer:
        known_weights.put(self._engine.model, weights)
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        found = self._engine.generate(self.prompt(), sampling)
        return found.output_ids[0], found.logprobs[0]

    def judge(self, label: int, found: Answer) -> tuple[str, int]:
        """(verdict, version that the answer is of or -1)"""
        self._newest = max(self._newest, label)
        if same(found, self.answer(label)):
            return "right", label
        for version in range(self._newest + AHEAD, -1, -1):
            if same(found, self.answer(version)):
                return "mislabelled", version
        return "mixed", -1

    def check(self) -> int:
        """Asserts that half a tensor of another version is noticed, for every half; how many."""
        old, new = known_weights.weights(1), known_weights.weights(2)
        right = self.answer(1)
        count = 0
        for name, tensor in old.items():
            half = len(tensor) // 2
            for rows in (slice(0, half), slice(half, None)):
                changed = tensor.clone()
                changed[rows] = new[name][rows]
                token, logprob = self.of({**old, name: changed})
                seen = token != right[0] or abs(logprob - right[1]) > SENSITIVITY
                assert seen, f"{name}, rows {rows}: nobody would notice another version"
                count += 1
        return count


def same(one: Answer, other: Answer) -> bool:
    return one[0] == other[0] and abs(one[1] - other[1]) <= TOLERANCE


class Watcher:
    """Asks one engine."""

    def __init__(self, oracle: Oracle, number: int, url: str) -> None:
        self._oracle, self._number, self._url = oracle, number, url
        self._session = self._new_session()

    @staticmethod
    def _new_session() -> requests.Session:
        session = requests.Session()
        session.trust_env = False
        return session

    def look(self) -> Iterator[Look]:
        """One question to /generate, one to /model_info."""
        for ask in (self._generate, self._info):
            sent = time.monotonic()
            try:
                verdict, *more = ask()
            except (requests.RequestException, ValueError):
                self._session.close()
                self._session = self._new_session()
                verdict, more = "gone", []
            yield Look(sent, time.monotonic(), self._number, verdict, *more)

    def _generate(self) -> list[Any]:
        body = {
            "input_ids": self._oracle.prompt(),
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
        answer = self._session.post(self._url + "/generate", json=body, timeout=_ANSWER_SECONDS)
        if answer.status_code != 200:
            return ["refused"]
        meta = answer.json()["meta_info"]
        if not meta["output_token_logprobs"]:
            return ["empty"]
        label = int(meta["weight_version"])
        ((logprob, token, _),) = meta["output_token_logprobs"]
        verdict, held = self._oracle.judge(label, (token, logprob))
        details = "" if verdict == "right" else self._tensors()
        return [verdict, label, held, details]

    def _info(self) -> list[Any]:
        info = self._session.get(self._url + "/model_info", timeout=_ANSWER_SECONDS).json()
        return ["info", int(info["weight_version"])]

    def _tensors(self) -> str:
        """Of which version each tensor is, a moment later: a hint, no proof."""
        with contextlib.suppress(requests.RequestException, ValueError, KeyError):
            url = self._url + "/weights_checker"
            sums = self._session.get(url, timeout=_ANSWER_SECONDS).json()["ranks"][0]["checksums"]
            info = self._session.get(self._url + "/model_info", timeout=_ANSWER_SECONDS).json()
            newest = int(info["weight_version"]) + AHEAD
            owner = {s: v for v in range(newest + 1) for s in known_weights.checksums(v).values()}
            return f"{info}; { ({name: owner.get(found) for name, found in sums.items()}) }"
        return "no more answers"


def watch(urls: Sequence[str], pipe: Connection) -> None:
    """The watcher's process: says how many halves of tensors it tells apart, then each wrong look
    at once, and all looks when anything arrives."""
    torch.set_num_threads(1)
    oracle = Oracle()
    pipe.send(oracle.check())
    looks: list[Look] = []
    lock, end = threading.Lock(), threading.Event()

    def run(number: int, url: str) -> None:
        watcher = Watcher(oracle, number, url)
        while not end.is_set():
            for look in watcher.look():
                with lock:
                    looks.append(look)
                    if look.wrong:
                        pipe.send(look)
                if look.verdict == "gone":
                    time.sleep(_AGAIN_SECONDS)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(urls)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(EOFError):
        pipe.recv()
    end.set()
    for thread in threads:
        thread.join(_ANSWER_SECONDS + 10)
    with lock:
        pipe.send(looks)
