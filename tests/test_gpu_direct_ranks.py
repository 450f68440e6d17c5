"""Engine workers that copy their weights out of the memory of sharded Megatron trainers, on GPUs
that tests/fakecuda plays: each rank and each worker has one, and the first two have both."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import fakecuda, gpu_direct_ranks
from support.engines import NEWEST, engine_packages, engine_tree
from support.gpu_direct_log import check_rank, check_worker
from support.procs import Ranks
from support.remote_nccl_cases import GPUS

from wsync.demo.megatron_cpu import Parallel

STAGES = Parallel(tp=2, pp=2)
EXPERTS = Parallel(tp=2, pp=2, ep=2, etp=1)
PLAIN = Parallel(ep=2, etp=1)
ENGINES = {"tensor-parallel": "", "sglang": NEWEST, "vllm": "0.33.0"}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if ENGINES[name]:
        engine_tree(name, ENGINES[name])
        engine_packages()
    return name


@contextmanager
def _on_gpus(count: int, folder: Path) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fakecuda.logged(folder, devices=GPUS).items():
            patch.setenv(name, value)
        with Ranks(count, path=sys.path) as started:
            yield started


@pytest.fixture(scope="module")
def ranks(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with _on_gpus(4, tmp_path_factory.mktemp(engine)) as started:
        started.run(gpu_direct_ranks.start, engine, ENGINES[engine], timeout=240)
        yield started
        started.run(gpu_direct_ranks.stop)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with _on_gpus(1, tmp_path_factory.mktemp("one")) as started:
        yield started


@pytest.mark.parametrize(
    ("family", "parallel", "ep", "place"),
    [
        pytest.param("qwen3", STAGES, 1, "by handle", marks=pytest.mark.slow, id="tp2pp2"),
        pytest.param("qwen3_moe", EXPERTS, 2, "in pieces", id="tp2pp2ep2"),
        pytest.param("qwen3_moe", PLAIN, 1, "by handle", marks=pytest.mark.slow, id="ep2"),
    ],
)
def test_every_worker_holds_what_the_trainer_has(
    family: str, parallel: Parallel, ep: int, place: str, engine: str, ranks: Ranks
) -> None:
    case = (engine, family, parallel, ep, place)
    found = ranks.run(gpu_direct_ranks.update, *case, timeout=240)
    for facts in found:
        assert facts["wrong"] == [[]] * len(gpu_direct_ranks.UPDATES)
        assert facts["paths"] == {"direct"}
        moved = ("rounds", "sent_nbytes", "ring_nbytes", "staging_nbytes")
        assert [facts[name] for name in moved] == [1, 0, 0, 0]
    # the first two ranks serve a worker each
    for facts, served in zip(found, (1, 1, 0, 0), strict=True):
        check_rank(facts["trainer"], served)
    workers = found[0]["workers"]
    assert len(workers) == 2
    for worker in workers:
        check_worker(worker)


def test_a_rank_with_parameters_on_two_gpus_is_told_which_one_is_not_with_the_rest(
    rank: Ranks,
) -> None:
    (facts,) = rank.run(gpu_direct_ranks.on_two_gpus, timeout=240)
    for said in (facts["early"], facts["late"]):
        assert said.startswith(f"UnsupportedError: {facts['name']} (PlayedTensor): lies on "), facts
        assert said.endswith(", others on cuda:0: one device serves them all"), facts
    assert facts["wrong"] == []


def test_a_rank_whose_workers_are_on_two_gpus_is_told_which_is_not_where_its_weights_are(
    rank: Ranks,
) -> None:
    (said,) = rank.run(gpu_direct_ranks.serves_two_gpus, timeout=240)
    found = re.fullmatch(
        r"InvalidArgumentError: rank 0 serves worker 1 of engine 0 on (GPU-\S+), but its weights "
        r"are on (GPU-\S+): engine_gpu_offsets says whose GPU an engine shares",
        said,
    )
    assert found and found[1] != found[2], said
