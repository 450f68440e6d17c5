"""Updates of SGLang's whole server while it generates; see test_servers.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.server_answers import Answer
from support.server_models import PATIENCE, PROMPT, Checkpoint, checkpoint, kept
from support.sglang_server import Nursery, Server

import wsync

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]
LONG = 4000  # tokens of an answer that nobody waits for
BEFORE, AFTER = 5, 20  # tokens that have come when an update begins, and that come after it
Pair = tuple[Checkpoint, Checkpoint]
WAYS = {"wsync": "wsync", "stock": "stock", "staged": "distributed"}


@pytest.fixture(scope="module")
def served(
    servers: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Pair]]:
    folder = tmp_path_factory.mktemp("in-flight")
    first, second = (
        checkpoint(folder / str(seed), seed, experts=False, dtype=torch.float32) for seed in (1, 2)
    )
    with Server(servers, first, folder / "log") as server:
        yield server, (first, second)


class Generating(Answer):
    """Of SGLang, whose events have all tokens so far."""

    def __init__(self, server: Server) -> None:
        greedy = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
        super().__init__(server, "/generate", input_ids=PROMPT, sampling_params=greedy)

    def take(self, event: dict[str, Any]) -> None:
        self.last, self.tokens = event, event["output_ids"]

    @property
    def reason(self) -> Any:
        """Why it has ended."""
        found = self.last["meta_info"]["finish_reason"]
        return found and found["type"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_no_answer_is_of_mixed_weights(served: tuple[Server, Pair], mode: str, way: str) -> None:
    server, (old, new) = served
    options = wsync.Options(
        deadline=PATIENCE,
        progress=False,
        delivery=WAYS[way],
        pause_mode=mode,
        flush_cache=mode != "in_place",
    )
    with wsync.connect(old.weights, engines=[server.url], options=options) as sync:
        sync.update(version="old")
        with Generating(server) as answer:
            answer.read(BEFORE)
            assert answer.reason is None
            sync.update(new.weights, version="new")
            if mode == "abort":
                answer.read(LONG)
                assert answer.reason == "abort"
                assert len(answer.tokens) < LONG
                assert all(old.says(answer.tokens))
                return
            answer.read(len(answer.tokens) + AFTER)
            while not (found := changes(mode, answer.tokens, old, new)):
                assert all(old.says(answer.tokens)), answer.tokens  # not all old ones were read
                assert len(answer.tokens) < LONG // 4, answer.tokens
                answer.read(len(answer.tokens) + AFTER)
    assert max(found) >= BEFORE, (found, answer.tokens)


def test_a_request_goes_on_while_an_update_is_staged(served: tuple[Server, Pair]) -> None:
    server, (old, new) = served
    options = wsync.Options(
        deadline=PATIENCE,
        progress=False,
        delivery="distributed",
        pause_mode="in_place",
        flush_cache=False,
    )
    with wsync.connect(old.weights, engines=[server.url], options=options) as sync:
        sync.update(version="old")
        with Generating(server) as answer:
            answer.read(BEFORE)
            assert sync.stage(new.weights, version="new")
            answer.read(len(answer.tokens) + AFTER)
            assert answer.last["meta_info"]["weight_version"] == "old"
            assert all(old.says(answer.tokens))
            sync.commit()
            answer.read(len(answer.tokens) + AFTER)
            assert answer.reason is None


def changes(mode: str, tokens: list[int], old: Checkpoint, new: Checkpoint) -> list[int]:
    """After how many tokens the weights can have changed."""
    before = old.says(tokens)
    places = range(1, before.index(False) + 1 if False in before else len(tokens))
    if mode == "retract":  # everything was computed anew
        after = new.says(tokens)
        return [changed for changed in places if all(after[changed:])]
    return [changed for changed in places if kept(tokens, changed, old, new)]
