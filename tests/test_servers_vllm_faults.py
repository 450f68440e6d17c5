"""vLLM's server generates, and it or its trainer is killed, in the middle of an update; see
test_servers_vllm.py."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nursery import run
from support.server_answers import Answer
from support.server_models import PATIENCE, PROMPT, checkpoint, kept, recomputed
from support.server_phases import before
from support.vllm_server import Nursery, Server

import wsync

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]
TRAINER = Path(__file__).parent / "support" / "server_trainer.py"
TOKENS = 12
LONG = 400  # tokens of an answer during which an update runs
BEFORE = 5  # that have come when it begins
PHASES = ("round", "prepared", "close")


class Lab:
    """A server that is started again when it has been killed."""

    def __init__(self, vllm: Nursery, folder: Path) -> None:
        self.models = [
            checkpoint(folder / str(seed), seed, experts=False, dtype=torch.float32)
            for seed in (1, 2)
        ]
        self.server = Server(vllm, self.models[0], folder / "log")

    @property
    def url(self) -> str:
        return "vllm+" + self.server.url

    def connect(self, **options: Any) -> wsync.Sync:
        given = {"deadline": PATIENCE, "progress": False, **options}
        return wsync.connect(
            self.models[1].weights, engines=[self.url], options=wsync.Options(**given)
        )

    def holds(self, number: int, version: str) -> None:
        """It is up to date, and answers."""
        found = self.server.post("/inference/v1/generate", **request(TOKENS))["choices"][0]
        assert found["token_ids"] == self.models[number].tokens(TOKENS)
        assert found["weight_versions"] == [{"version": version, "start": 0, "end": TOKENS}]


def request(count: int) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
    return {"token_ids": PROMPT, "sampling_params": greedy}


@pytest.fixture(scope="module")
def lab(vllm: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(vllm, tmp_path_factory.mktemp("vllm-faults"))
    yield made
    made.server.close()


class Generating(Answer):
    """Of vLLM, whose events have the tokens since the last one."""

    def __init__(self, server: Server, count: int) -> None:
        super().__init__(server, "/inference/v1/generate", **request(count))

    def take(self, event: dict[str, Any]) -> None:
        for self.last in event["choices"]:
            self.tokens += self.last["token_ids"] or ()


MODES = ("abort", "retract", "in_place")


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_says_which_weights_each_token_is_of(lab: Lab, mode: str) -> None:
    old, new = lab.models
    with lab.connect(pause_mode=mode, flush_cache=mode != "in_place") as sync:
        sync.update(old.weights, version="old")
        lab.server.hold(BEFORE)
        with Generating(lab.server, LONG) as answer:
            answer.read(BEFORE)
            sync.update(new.weights, version="new")
            answer.read(LONG + 1)
    versions = answer.last["weight_versions"]
    changed = versions[0]["end"]
    assert changed >= BEFORE
    assert versions[0] == {"version": "old", "start": 0, "end": changed}
    assert all(old.says(answer.tokens[:changed]))
    if mode == "abort":
        assert answer.last["finish_reason"] == "abort"
        assert len(versions) == 1 and len(answer.tokens) == changed < LONG
    else:
        assert versions[1:] == [{"version": "new", "start": changed, "end": LONG}]
        made = recomputed if mode == "retract" else kept
        assert made(answer.tokens, changed, old, new)


@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_that_is_killed(lab: Lab, phase: str) -> None:
    number = PHASES.index(phase) % 2
    command = [sys.executable, "-P", str(TRAINER), lab.url, str(lab.models[1 - number].folder)]
    done = run([*command, "wsync", phase], timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, (phase, done.stderr)
    with lab.connect() as sync:
        sync.update(lab.models[number].weights, version=f"after-{phase}")
        lab.holds(number, f"after-{phase}")


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_is_killed(lab: Lab, phase: str) -> None:
    with lab.connect() as sync:
        sync.update(lab.models[0].weights, version="before")
        try:
            with before(phase, lab.server.close) as struck:
                with pytest.raises(wsync.WsyncError) as caught:
                    sync.update(lab.models[1].weights, version="killed")
        finally:
            lab.server = lab.server.again()
        assert struck
        assert lab.server.url in str(caught.value)
        sync.update(lab.models[1].weights, version="again")  # the new one is at the same URL
        lab.holds(1, "again")
