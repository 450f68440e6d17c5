"""SGLang's whole server takes updates: the pinned release, on a CPU, over HTTP.

Its packages are not among the test extra's: `.ci/run servers` installs them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from support import fronts, guide
from support.server_models import PATIENCE, PROMPT, Checkpoint, checkpoint, eagle3, predicting
from support.server_phases import before
from support.servers import Fresh, everyday, packages
from support.sglang_server import (
    NEWEST,
    Awake,
    Drafting,
    Nursery,
    Served,
    Server,
    plain_environment,
)
from support.weights_only_engine import ProcessEngine
from support.wrong_names import WRONG

import wsync
from wsync.handles.sglang_http import HttpHandle
from wsync.inspection import look
from wsync.module_tensors import same_bytes

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]
TOKENS = 12
Pair = tuple[Checkpoint, Checkpoint]
WAYS: dict[str, dict[str, Any]] = {
    "loader": {"delivery": "wsync"},
    "buckets": {"delivery": "stock", "bucket_nbytes": 1 << 16},
    "remote-loader": {"delivery": "distributed", "broadcast": "wsync"},
    "broadcast-buckets": {
        "delivery": "distributed",
        "broadcast": "bucket",
        "bucket_nbytes": 1 << 16,
    },
    "broadcast-tensors": {"delivery": "distributed", "broadcast": "tensor"},
}
# what a server has: experts or not, dtype, workers
KINDS = {
    "qwen3-tp1": (False, torch.float32, 1),
    "qwen3-bfloat16-tp2": (False, torch.bfloat16, 2),
    "qwen3_moe-tp2": (True, torch.float32, 2),
}


def pair(folder: Path, *, experts: bool, dtype: torch.dtype) -> Pair:
    """Two checkpoints of one model, which say different things."""
    first, second = (
        checkpoint(folder / str(seed), seed, experts=experts, dtype=dtype) for seed in (1, 2)
    )
    assert first.tokens(TOKENS) != second.tokens(TOKENS)
    return first, second


@pytest.fixture(scope="module", params=everyday(KINDS, "qwen3_moe-tp2"))
def served(
    request: pytest.FixtureRequest, servers: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Pair]]:
    """A server of one kind after another, and what it is to hold."""
    experts, dtype, tp = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    models = pair(folder, experts=experts, dtype=dtype)
    with Server(servers, models[0], folder / "log", tp=tp) as server:
        yield server, models


def connect(server: Server, weights: dict[str, torch.Tensor], **options: Any) -> wsync.Sync:
    given = {"deadline": PATIENCE, "progress": False, **options}
    return wsync.connect(weights, engines=[server.url], options=wsync.Options(**given))


def generate(server: Server) -> tuple[list[int], str]:
    """Tokens, and the version of the weights that they are said to come from."""
    greedy = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answer = server.post("/generate", input_ids=PROMPT, sampling_params=greedy)
    return answer["output_ids"], answer["meta_info"]["weight_version"]


def check(server: Server, model: Checkpoint, version: str) -> None:
    """That the server answers with these weights."""
    tokens, said = generate(server)
    assert said == version
    assert len(tokens) == TOKENS
    assert all(model.says(tokens)), tokens
    if model.dtype == torch.float32:  # no rounding changes a token
        assert tokens == model.tokens(TOKENS)


def checksums(server: Server) -> list[dict[str, str]]:
    """Of every tensor of every worker."""
    answer = server.post("/weights_checker", action="checksum")
    return [rank["checksums"] for rank in answer["ranks"]]


def reloaded(server: Server, model: Checkpoint) -> list[dict[str, str]]:
    """The checksums after SGLang's own load of a checkpoint."""
    server.post(
        "/update_weights_from_disk", model_path=str(model.folder), weight_version="reloaded"
    )
    return checksums(server)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--tp-size", "2"]])
def test_a_server_as_users_start_it(tmp_path: Path, arguments: list[str]) -> None:
    environment = plain_environment(packages(NEWEST))
    start, model = Fresh(environment), Checkpoint(tmp_path / guide.MODEL, None, {})
    with Served(start, model, tmp_path / "log", arguments=arguments) as server:
        guide.update(server.url, tmp_path, environment)
        assert len(checksums(server)) == (2 if arguments else 1)
    start.close()


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_that_of_a_reload(served: tuple[Server, Pair], way: str) -> None:
    server, (first, second) = served
    wanted = [reloaded(server, model) for model in (second, first)]
    assert len(wanted[0]) == server.workers
    assert all(wanted[0][rank].keys() == wanted[1][rank].keys() for rank in range(server.workers))
    same = {name for a, b in zip(*wanted, strict=True) for name in a if a[name] == b[name]}
    assert same == set()
    with connect(server, second.weights, **WAYS[way]) as sync:
        for number, model in enumerate((second, first, second)):
            report = sync.update(model.weights, version=f"{way}-{number}")
            assert checksums(server) == wanted[number % 2]
            check(server, model, f"{way}-{number}")
    assert not report.unused


@pytest.mark.slow
def test_a_server_is_filled_from_one_of_another_size(
    served: tuple[Server, Pair], servers: Nursery, tmp_path: Path
) -> None:
    server, (first, second) = served
    options = wsync.Options(deadline=PATIENCE, progress=False)
    with Server(servers, first, tmp_path / "log", tp=3 - server.workers) as joiner:
        wanted = reloaded(joiner, second)
        reloaded(joiner, first)
        reloaded(server, first)
        with pytest.raises(wsync.StateError, match="nothing was learnt"):
            wsync.copy_weights(joiner.url, server.url, options=options)
        with connect(server, second.weights) as sync:
            sync.update(version="sideways")
        wsync.copy_weights(server.url, joiner.url, options=options)
        assert checksums(joiner) == wanted
        check(joiner, second, "sideways")
        check(server, second, "sideways")
        # and a checkpoint, which its own loader can read
        wsync.copy_weights(server.url, tmp_path / "back", options=options)
        reloaded(joiner, first)
        back = dataclasses.replace(second, folder=tmp_path / "back" / "latest")
        assert reloaded(joiner, back) == wanted


def test_every_byte_is_that_of_a_reload_from_the_disk(
    served: tuple[Server, Pair], tmp_path: Path
) -> None:
    server, (first, second) = served
    wanted = [reloaded(server, model) for model in (second, first)]
    options = wsync.Options(deadline=PATIENCE, progress=False)
    with wsync.DiskSync(
        second.weights, [server.url], folder=tmp_path, base=first.folder, options=options
    ) as sync:
        for number, model in enumerate((second, first)):
            sync.update(model.weights, version=number)
            assert checksums(server) == wanted[number]
            check(server, model, str(number))


def test_names_that_a_server_passes_over_are_refused(
    served: tuple[Server, Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its folder is on this host: nothing is paused, whichever way the weights are to go."""
    server, (first, second) = served
    asked: list[str] = []
    request = HttpHandle.request

    def noted(handle: Any, method: str, path: str, *rest: Any) -> Any:
        asked.append(path)
        return request(handle, method, path, *rest)

    monkeypatch.setattr(HttpHandle, "request", noted)
    refused = 0
    for make, text in WRONG.values():
        given = make(second.weights)
        if given.keys() == second.weights.keys():
            continue  # of experts, which not all have
        for way in WAYS:
            with pytest.raises(wsync.LayoutError, match=f"{first.folder}, which .*{text}"):
                connect(server, given, **WAYS[way])
        with pytest.raises(wsync.LayoutError, match=text):
            wsync.DiskSync(given, [server.url], folder=tmp_path)
        refused += 1
    assert refused >= 4
    assert {path for path in asked if "info" not in path} == set()


def test_what_a_server_keeps_is_named_where_its_folder_is_not_here(
    served: tuple[Server, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    server, (first, second) = served
    reloaded(server, first)
    hidden = first.folder.rename(first.folder.with_name("hidden"))
    try:
        with connect(server, second.weights, delivery="stock") as sync:
            sync.update()
        (text,) = caplog.messages
        assert "names, shapes and dtypes are not compared for engines" in text
        caplog.clear()
        given = {name: each for name, each in first.weights.items() if "o_proj" not in name}
        with connect(server, given, delivery="stock") as sync:
            sync.update()
    finally:
        hidden.rename(first.folder)
    said = "the update did not change any of model.layers.*.self_attn.o_proj.weight:"
    assert said in caplog.messages[-1]


@pytest.mark.slow
def test_files_reach_every_pipeline_stage(servers: Nursery, tmp_path: Path) -> None:
    """SGLang answers when the first has loaded them; what is asked then comes after them."""
    first, second = pair(tmp_path, experts=False, dtype=torch.float32)
    arguments = ["--pp-size", "2"]
    with Server(servers, first, tmp_path / "log", arguments=arguments) as server:
        options = wsync.Options(deadline=PATIENCE, progress=False)
        folder = tmp_path / "versions"
        with wsync.DiskSync(
            second.weights, [server.url], folder=folder, base=first.folder, options=options
        ) as sync:
            for number, model in enumerate((second, first, second)):
                sync.update(model.weights, version=number)
                check(server, model, str(number))


@pytest.mark.slow
def test_tensors_reach_every_pipeline_stage(servers: Nursery, tmp_path: Path) -> None:
    """SGLang answers for the first only, before it passes a request on."""
    first, second = pair(tmp_path, experts=False, dtype=torch.float32)
    near, far = WAYS["loader"], WAYS["remote-loader"]
    with Server(servers, first, tmp_path / "log", arguments=["--pp-size", "2"]) as server:
        for way in (near, {**near, "stage": "on"}, far, {**far, "stage": "on"}):
            with connect(server, second.weights, **way) as sync:
                for number, model in enumerate((second, first, second, first)):
                    sync.update(model.weights, version=number)
                    check(server, model, str(number))
        said = look(server.url, timeout=PATIENCE).workers
        kept = [{each["name"] for each in worker["tensors"]} for worker in said]
        assert [each["worker"] for each in said] == [0, 1]
        assert kept[0] ^ kept[1] == second.weights.keys()  # not tied
        shapes = {name: (each.shape, each.dtype) for name, each in first.weights.items()}
        options = wsync.Options(deadline=PATIENCE, progress=False)
        with ProcessEngine(shapes) as joiner, fronts.served(joiner) as front:
            wsync.copy_weights(server.url, front.url, options=options)
            found = joiner.weights()
            assert all(same_bytes(found[n], each) for n, each in first.weights.items())
            assert joiner.weight_version == "3"
        with connect(server, second.weights, **near) as sync:
            sync.update()
            (last,) = (pid for pid, name in server.processes().items() if "PP1" in name)
            with before("round", lambda: os.kill(last, signal.SIGKILL)) as struck:
                with pytest.raises(wsync.PeerClosedError, match=f"engine {server.url}: "):
                    sync.update(first.weights)
            assert struck


# what two workers do not share: experts or not, the server's words, whether it answers on a CPU
SHAPES = {
    "attention": (False, ["--attn-dp-size", "2"], True),
    "attention-until-0.5.21": (False, ["--enable-dp-attention", "--dp-size", "2"], True),
    "experts": (True, ["--ep-size", "2"], True),
    "both": (True, ["--ep-size", "2", "--attn-dp-size", "2"], False),  # it needs NCCL
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_is_that_of_a_reload_where_workers_share_less(
    servers: Nursery, tmp_path: Path, shape: str
) -> None:
    experts, arguments, answers = SHAPES[shape]
    first, second = pair(tmp_path, experts=experts, dtype=torch.float32)
    near, far = WAYS["loader"], WAYS["remote-loader"]
    ways = [{**way, "stage": stage} for way in (near, far) for stage in ("off", "on")]
    with Awake(servers, first, tmp_path / "log", tp=2, arguments=arguments) as server:
        wanted = [reloaded(server, model) for model in (second, first)]
        assert len({str(worker) for worker in wanted[0]}) == 2
        for way in (*ways, WAYS["buckets"]):
            with connect(server, second.weights, **way) as sync:
                for number, model in enumerate((second, first, second)):
                    report = sync.update(model.weights, version=number)
                    assert checksums(server) == wanted[number % 2], (way, number)
                    if answers:
                        check(server, model, str(number))
                assert report.staged == (way.get("stage") == "on")
    if not answers:
        print(f"{shape}: its answers were not compared: on a CPU it gives none")


def test_an_update_is_a_session(served: tuple[Server, Pair], monkeypatch: Any) -> None:
    """SGLang 0.5.21 and newer begin one before tensors, and end it after them."""
    server, (first, _) = served
    asked: list[tuple[str, int]] = []
    inside: list[int] = []
    request = HttpHandle.request

    def noted(handle: Any, method: str, path: str, *rest: Any) -> Any:
        if path == "/end_weight_update" and asked[-1][0] != "/begin_weight_update":
            inside.append(request(handle, "POST", "/begin_weight_update", {}, PATIENCE)[0])
        status, text = request(handle, method, path, *rest)
        asked.append((path, status))
        return status, text

    with connect(server, first.weights) as sync:
        monkeypatch.setattr(HttpHandle, "request", noted)
        sync.update()
    steps = [step for step in asked if "server_info" not in step[0]]
    names = [path for path, _ in steps]
    assert names.count("/begin_weight_update") == names.count("/end_weight_update") == 1
    sent = [index for index, name in enumerate(names) if name == "/update_weights_from_tensor"]
    begun, ended = names.index("/begin_weight_update"), names.index("/end_weight_update")
    assert names.index("/pause_generation") < begun < sent[0] <= sent[-1] < ended
    assert ended < names.index("/continue_generation")
    assert {status for _, status in steps} == {200}
    assert inside == [400]  # there was a session
    server.post("/begin_weight_update")  # and now there is none
    server.post("/end_weight_update")


def of_draft(name: str) -> bool:
    """Whether a checksum is of what the draft has for itself: it has the model's embedding."""
    return name.startswith("draft.") and not name.endswith("embed_tokens.weight")


@pytest.fixture(scope="module")
def drafting(
    servers: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Pair]]:
    folder = tmp_path_factory.mktemp("drafting")
    models = pair(folder, experts=False, dtype=torch.float32)
    with Drafting(servers, models[0], folder / "log", draft=eagle3(folder / "draft")) as server:
        yield server, models


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_draft_of_another_model_stays_as_it_is(drafting: tuple[Server, Pair], way: str) -> None:
    server, (first, second) = drafting
    (before,) = checksums(server)
    drafts = {name for name in before if of_draft(name)}
    assert len(drafts) > 5
    with connect(server, second.weights, **WAYS[way]) as sync:
        for number, model in enumerate((second, first)):
            sync.update(model.weights, version=f"{way}-{number}")
            (now,) = checksums(server)
            changed = {name for name in before if before[name] != now[name]}
            assert changed == (set() if number else before.keys() - drafts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NEWEST, "sglang0517"])
def test_a_draft_with_the_models_own_layers_is_updated_with_it(kind: str, tmp_path: Path) -> None:
    """On a CPU, SGLang 0.5.17 tells no checksums, and ends if a draft is given wrong weights."""
    first, second = (predicting(tmp_path / str(seed), seed) for seed in (1, 2))
    start = Nursery(packages(kind), tmp_path / "nursery")
    with Drafting(start, first, tmp_path / "log") as server:
        before = [] if kind != NEWEST else checksums(server)
        with connect(server, second.weights, delivery="auto") as sync:
            for number, model in enumerate((second, first)):
                report = sync.update(model.weights, version=str(number))
                assert (report.paths, report.unused) == ({server.url: "ring"}, ())
                if kind == NEWEST:
                    (now,) = checksums(server)
                    changed = {name for name in now if before[0][name] != now[name]}
                    assert changed == (set() if number else now.keys())
                    assert sum(map(of_draft, now)) > 5
    start.close()


@pytest.mark.slow
def test_files_are_refused_where_they_would_overwrite_a_draft(
    drafting: tuple[Server, Pair], tmp_path: Path
) -> None:
    server, (_, second) = drafting
    before = checksums(server)
    with pytest.raises(wsync.UnsupportedError, match=r"drafts tokens with another model, .*/draft"):
        wsync.DiskSync(second.weights, [server.url], folder=tmp_path)
    assert checksums(server) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    ["state", "dict", "layout"],
)
def test_a_notebook_of_transformers_5_delivers_every_expert(
    served: tuple[Server, Pair], source: str
) -> None:
    """It fuses them at run time, and a stock server passes over names that it does not know."""
    server, models = served
    script = Path(__file__).parent / "support/server_notebook.py"
    site, tests = Path(wsync.__file__).parents[1], Path(__file__).parent
    path = os.pathsep.join(map(str, (packages(NEWEST), site, tests)))
    for way, model in zip(("stock", "wsync"), models[::-1], strict=True):
        wanted = reloaded(server, model)
        reloaded(server, models[model is models[0]])
        done = subprocess.run(
            [sys.executable, "-P", script, server.url, model.folder, way, source],
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        version, experts, said = json.loads(done.stdout.splitlines()[-1])
        assert version.startswith("5.")
        assert experts in ([], ["down_proj", "gate_up_proj"])
        assert checksums(server) == wanted
        tokens, label = generate(server)
        assert label == f"{way}-{source}"
        assert tokens == said or model.dtype != torch.float32  # rounding changes tokens


OLDER = [pytest.param(name, marks=pytest.mark.slow) for name in ("sglang0511", "sglang0517")]


@pytest.fixture(scope="module", params=OLDER)
def older(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Pair]]:
    folder = tmp_path_factory.mktemp(request.param)
    start = Nursery(packages(request.param), folder / "nursery")
    models = pair(folder, experts=False, dtype=torch.float32)
    with Server(start, models[0], folder / "log") as server:
        yield server, models
    start.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_older_server_says_what_the_weights_say(older: tuple[Server, Pair], way: str) -> None:
    """On a CPU it tells no checksums, and it knows no sessions."""
    server, (first, second) = older
    with connect(server, second.weights, **WAYS[way]) as sync:
        for number, model in enumerate((second, first)):
            sync.update(model.weights, version=f"{way}-{number}")
            check(server, model, f"{way}-{number}")


@pytest.mark.slow
def test_an_older_servers_draft_of_another_model_stays_as_it_is(tmp_path: Path) -> None:
    """It ends when its draft is given the model's attention, which has other shapes.  SGLang 0.5.11
    starts no such server on a CPU: its cache calls a kernel then."""
    start = Nursery(packages("sglang0517"), tmp_path / "nursery")
    first, second = pair(tmp_path, experts=False, dtype=torch.float32)
    draft = eagle3(tmp_path / "draft")
    with Drafting(start, first, tmp_path / "log", draft=draft) as server:
        for way in WAYS:
            with connect(server, second.weights, **WAYS[way]) as sync:
                sync.update(version=way)
            assert requests.get(server.url + "/model_info", timeout=PATIENCE).ok
    start.close()


class _Refusing:
    """An engine that refuses to join an update."""

    name, workers, load_formats = "refusing", 1, ("wsync.sglang.load_weights",)

    def pause(self, mode: str, timeout: float) -> None: ...
    def flush(self, timeout: float) -> None: ...
    def resume(self, timeout: float) -> None: ...

    def update_weights(self, *given: Any, **named: Any) -> None:
        raise wsync.RemoteError("no")

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {}


def test_a_server_that_has_written_nothing_goes_on(served: tuple[Server, Pair]) -> None:
    server, (first, second) = served
    with connect(server, first.weights, delivery="wsync") as sync:
        sync.update(version="kept")
    options = wsync.Options(deadline=PATIENCE, progress=False, delivery="wsync")
    engines = [server.url, _Refusing()]
    with wsync.connect(second.weights, engines=engines, options=options) as sync:
        with pytest.raises(wsync.RemoteError, match="no") as caught:
            sync.update()
    assert server.url not in "".join(getattr(caught.value, "__notes__", []))
    check(server, first, "kept")
