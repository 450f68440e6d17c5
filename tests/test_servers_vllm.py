"""vLLM takes updates: its pinned build for CPUs, as an LLM, as an AsyncLLM and over HTTP.

Its packages are not among the test extra's: `.ci/run servers` installs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import guide
from support.server_models import PATIENCE, PROMPT, Checkpoint, checkpoint
from support.servers import everyday, packages
from support.vllm_server import (
    NEWEST,
    PROBE,
    Nursery,
    Served,
    Server,
    environment,
    offline,
    transfer,
)

import wsync
from wsync.demo import cpu_server

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]
TOKENS = 12
Pair = tuple[Checkpoint, Checkpoint]
WAYS: dict[str, dict[str, Any]] = {
    "local": {"delivery": "wsync"},
    "remote": {"delivery": "distributed"},
}
TRANSFER = ("--weight-transfer-config", '{"backend": "wsync"}')
# what a server has, and how many workers
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3-tied-tp1": ({"tied": True}, 1),
    "qwen3-bfloat16-tp2": ({"dtype": torch.bfloat16}, 2),
    "qwen3_moe-tp2": ({"experts": True}, 2),
}


def pair(folder: Path, **kind: Any) -> Pair:
    """Two checkpoints of one model, which say different things."""
    given = {"experts": False, "dtype": torch.float32, **kind}
    first, second = (checkpoint(folder / str(seed), seed, **given) for seed in (1, 2))
    assert first.tokens(TOKENS) != second.tokens(TOKENS)
    return first, second


def held(server: Server) -> Any:
    """What every worker holds."""
    return server.post("/collective_rpc", method="held")["results"]


def differing(found: Any, wanted: Any) -> list[str]:
    """The tensors that workers hold otherwise than they should."""
    return [
        name
        for one, other in zip(found, wanted, strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    ]


@pytest.fixture(scope="module", params=everyday(KINDS, "qwen3_moe-tp2"))
def served(
    request: pytest.FixtureRequest, vllm: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Pair, list[Any]]]:
    """A server of one kind after another, what it is to hold, and what its workers hold after
    vLLM's own load of that."""
    kind, tp = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    models = pair(folder, **kind)
    with Server(vllm, models[1], folder / "log", tp=tp, extension=PROBE) as server:
        second = held(server)
    settings = {"tp": tp, "extension": PROBE, "arguments": TRANSFER}
    with Server(vllm, models[0], folder / "log", **settings) as server:
        yield server, models, [held(server), second]


@pytest.mark.slow
def test_a_server_as_users_start_it(vllm: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / guide.MODEL
    cpu_server.make_model(folder)
    with Served(vllm, Checkpoint(folder, None, {}), tmp_path / "log") as server:
        guide.update("vllm+" + server.url, tmp_path, environment(packages(NEWEST)))


def connect(server: Server, weights: dict[str, torch.Tensor], **options: Any) -> wsync.Sync:
    given = {"deadline": PATIENCE, "progress": False, **options}
    return wsync.connect(weights, engines=["vllm+" + server.url], options=wsync.Options(**given))


def check(server: Server, model: Checkpoint, version: str, rank: int | None = None) -> None:
    """That the server answers with these weights, and says so.  rank: of its engines."""
    greedy = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    asked = {"token_ids": PROMPT, "sampling_params": greedy}
    headers = None if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = server.post("/inference/v1/generate", headers, **asked)
    found = answer["choices"][0]
    assert found["weight_versions"] == [{"version": version, "start": 0, "end": TOKENS}]
    check_tokens(found["token_ids"], model)


def check_tokens(tokens: list[int], model: Checkpoint) -> None:
    assert len(tokens) == TOKENS
    assert all(model.says(tokens)), tokens
    if model.dtype == torch.float32:  # no rounding changes a token
        assert tokens == model.tokens(TOKENS)


@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_is_that_of_vllms_own_load(
    served: tuple[Server, Pair, list[Any]], way: str
) -> None:
    server, models, wanted = served
    assert len(wanted[0]) == server.workers
    with connect(server, models[1].weights, **WAYS[way]) as sync:
        for number in (1, 0):
            report = sync.update(models[number].weights, version=f"{way}-{number}")
            assert differing(held(server), wanted[number]) == []
            check(server, models[number], f"{way}-{number}")
    assert not report.unused
    units = [name for name in differing(*wanted) if name.endswith("of unit vectors")]
    assert len(units) >= server.workers * 2 * 2  # kernels have weights of their own


@pytest.mark.slow
@pytest.mark.parametrize("served", ["qwen3-tied-tp1"], indirect=True)
def test_requests_wait_while_memory_sleeps(served: tuple[Server, Pair, list[Any]]) -> None:
    """As vLLM's recipe for a GPU that a trainer shares: its KV cache is woken after an update."""
    server, models, _ = served
    with ThreadPoolExecutor() as pool, connect(server, models[1].weights) as sync:
        server.post("/sleep?level=1")
        server.post("/wake_up?tags=weights")
        sync.update(version="woken")
        answer = pool.submit(check, server, models[1], "woken")
        with pytest.raises(TimeoutError):
            answer.result(timeout=2)
        server.post("/wake_up?tags=kv_cache")
        answer.result(timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("served", ["qwen3-bfloat16-tp2"], indirect=True)
def test_two_trainer_ranks_update_a_server_by_vllms_own_weight_transfer(
    served: tuple[Server, Pair, list[Any]], vllm: Nursery
) -> None:
    server, models, wanted = served
    server.post("/pause?mode=abort&clear_cache=true")
    assert transfer(vllm, server, models[1], "transfer") > 0
    server.post("/resume")
    assert differing(held(server), wanted[1]) == []
    check(server, models[1], "transfer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "way"), [("data", "local"), ("data", "remote"), ("pipeline", "local")]
)
def test_all_engines_and_stages_behind_one_api(
    vllm: Nursery, tmp_path: Path, parallel: str, way: str
) -> None:
    models = pair(tmp_path)
    settings = {"arguments": (f"--{parallel}-parallel-size", "2"), "extension": PROBE}

    def sums() -> Any:  # of all engines; `held` is of one
        return server.post("/weight_checker", action="checksum")["checksums"], held(server)

    with Server(vllm, models[0], tmp_path / "log", **settings) as server:
        first = sums()
        with connect(server, models[1].weights, **WAYS[way]) as sync:
            assert sync.update(version="second").workers == 2
            for rank in (0, 1) if parallel == "data" else ():  # vLLM's stages end on a CPU
                check(server, models[1], "second", rank)
            second = sums()
            sync.update(models[0].weights, version="first")
            assert sums() == first
    changed = {name.split(":tp")[0] for name in first[0] if first[0][name] != second[0][name]}
    assert len(changed) == 2, changed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    return list(pair(tmp_path_factory.mktemp("offline"), experts=False))


def check_step(step: Any, model: Checkpoint, version: str) -> None:
    check_tokens(step["tokens"], model)
    assert step["spans"] == [[version, 0, TOKENS]]
    assert step["version"] == version


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llm", "async"])
def test_an_engine_of_the_trainers_process(
    vllm: Nursery, models: list[Checkpoint], tmp_path: Path, kind: str
) -> None:
    before, after, back = offline(vllm, kind, tmp_path, models)
    check_step(before, models[0], "default")
    check_step(after, models[1], "second")
    check_step(back, models[0], "first")
    assert differing(back["held"], before["held"]) == []
    assert differing(after["held"], before["held"]) != []


@pytest.mark.slow
def test_vllms_own_weight_transfer_by_wsync(
    vllm: Nursery, models: list[Checkpoint], tmp_path: Path
) -> None:
    before, incomplete, after, failed, back = offline(vllm, "transfer", tmp_path, models)
    check_step(before, models[0], "default")
    assert incomplete["lacking"] in incomplete["error"]
    check_step(after, models[1], "1")
    assert "half way" in failed["error"]
    assert failed["version"] == "1"
    check_step(back, models[0], "first")
    assert differing(back["held"], before["held"]) == []
    assert len(before["held"]) == 2
    rounds = ["start", "update", "update", "finish"]
    verified = ["start", "update", "update", "update", "finish"]
    assert after["calls"] == verified
    # after the failure, an "update" asks workers whether their weights are whole
    assert back["calls"] == [*verified, *rounds, *verified]
