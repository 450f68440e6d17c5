"""Whole updates through the memory of a GPU, on a stand-in for its driver (tests/fakecuda) that
logs what it is asked for: what an update costs, and what goes wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import cuda_cases, fakecuda, gpu_engine
from support.gpu_direct_log import FENCE
from support.procs import Ranks
from support.tiny_qwen3 import dense

HERE = Path(__file__).parent

# a round waits, copies and records; the rest looks and waits for nothing
ROUND = {"cuStreamWaitValue64", "cuStreamWriteValue64", "cuLaunchKernel"}
LOOKS = {"cuStreamQuery", "cuPointerGetAttributes", "cuMemGetAddressRange", *FENCE}
UPLOADS = {"cuMemcpyHtoDAsync", "cuStreamSynchronize", fakecuda.UPLOADED}


@contextmanager
def _ranks(count: int, folder: Path, **settings: str) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (fakecuda.logged(folder, devices=2) | settings).items():
            patch.setenv(name, value)
        with Ranks(count, path=sys.path) as started:
            yield started


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with _ranks(1, tmp_path_factory.mktemp("one")) as started:
        yield started


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with _ranks(2, tmp_path_factory.mktemp("two")) as started:
        yield started


def _check(count: Counter[str], *, waits: int, launches: int, records: int) -> None:
    """Launches and records are exact but for one that lets go of what up to 64 launches use;
    what has come already needs no wait."""
    assert set(count) <= ROUND | LOOKS, count
    assert FENCE.items() <= count.items(), count
    assert count["cuLaunchKernel"] == launches, count
    assert records <= count["cuStreamWriteValue64"] <= records + 1, count
    assert count["cuStreamWaitValue64"] <= waits, count


def test_a_later_update_of_one_rank_waits_launches_and_records_once_a_round(
    trainer: Ranks,
) -> None:
    (facts,) = trainer.run(cuda_cases.steady, dense(), False, timeout=300)
    assert facts["right"]
    rounds = facts["rounds"]
    assert rounds > 5
    assert len(facts["workers"]) == 2
    # one launch fills the rings of both workers, whom the trainer waits for and tells in turn
    both = 2 * rounds
    _check(facts["trainer"], waits=both, launches=rounds, records=both)
    # what is known of memory that the GPU reads as it is, holds; of the rings it is asked again
    for count in (facts["trainer"], *facts["workers"]):
        assert count["cuPointerGetAttributes"] < facts["tensors"] // 2, count
    for worker in facts["workers"]:
        _check(worker, waits=rounds, launches=rounds, records=rounds)


def test_a_later_update_of_two_ranks_adds_a_pack_and_an_unpack(trainers: Ranks) -> None:
    found = trainers.run(cuda_cases.steady, dense(), False, timeout=300)
    for facts in found:
        assert facts["right"]
        count, rounds = facts["trainer"], facts["rounds"]
        # what need not cross over is copied by a launch of its own, where there is any
        assert 2 * rounds <= count["cuLaunchKernel"] <= 3 * rounds, count
        # of the ring: it is filled; of staging, where it was used: it is, and may be, filled
        assert rounds < count["cuStreamWriteValue64"] <= 3 * rounds + 1, count
        assert count["cuStreamWaitValue64"] <= 3 * rounds, count
        assert set(count) <= ROUND | LOOKS, count
    for worker in found[0]["workers"]:
        _check(worker, waits=rounds, launches=rounds, records=rounds)


def test_weights_that_have_moved_cost_their_addresses_alone(trainer: Ranks) -> None:
    (facts,) = trainer.run(cuda_cases.steady, dense(), True, timeout=300)
    assert facts["right"]
    count = facts["trainer"]
    assert set(count) <= ROUND | LOOKS | UPLOADS, count
    # all rounds have one table of them
    assert count[fakecuda.UPLOADED] == 8 * facts["tensors"], count
    assert count["cuMemcpyHtoDAsync"] == count["cuStreamSynchronize"] == 1, count
    for worker in facts["workers"]:
        assert set(worker) <= ROUND | LOOKS, worker


def test_weights_of_a_gpu_reach_a_worker_without_the_host(tmp_path: Path) -> None:
    """The trainer's GPU does not reach the host's memory, nor the host the GPU's."""
    alone = {"WSYNC_FAKE_CUDA_PAGEABLE": "0", "WSYNC_DEVICE": "host"}
    with _ranks(1, tmp_path, **alone) as ranks:
        assert ranks.run(cuda_cases.weights_on_the_gpu, timeout=120) == [[True, True]]


def test_what_is_quantised_by_a_gpu_is_what_the_host_makes(trainers: Ranks) -> None:
    for found in trainers.run(cuda_cases.quantise, timeout=120):
        for kind, (same, nbytes, calls) in found.items():
            assert same, kind
            assert nbytes > 100 * 64 // 4, kind
            # a launch for each pass; the tables are there
            assert set(calls) <= LOOKS | ROUND, (kind, calls)
            assert calls["cuLaunchKernel"] == 2, kind


def test_ranks_with_a_gpu_each_exchange_rounds_by_nccl(tmp_path: Path) -> None:
    with _ranks(2, tmp_path, WSYNC_NCCL_LIB=fakecuda.fake_nccl()) as ranks:
        for found in ranks.run(cuda_cases.by_own_gpus, dense(), "nccl", timeout=300):
            assert found == [("nccl", True)] * 3


def test_ranks_whose_gpus_do_not_reach_each_other_exchange_rounds_by_gloo(tmp_path: Path) -> None:
    alone = {"WSYNC_FAKE_CUDA_PEERS": "0", "WSYNC_NCCL_LIB": str(tmp_path / "none.so")}
    with _ranks(2, tmp_path, **alone) as ranks:
        for found in ranks.run(cuda_cases.by_own_gpus, dense(), "auto", timeout=300):
            assert found == [("gloo", True)] * 3


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuLaunchKernel", 719),
        ("cuStreamWriteValue64", 999),
        ("cuMemcpyHtoDAsync", 999),
    ],
)
def test_a_driver_call_that_fails_in_the_trainer(call: str, code: int, trainer: Ranks) -> None:
    (facts,) = trainer.run(cuda_cases.fail_in_the_trainer, call, code, timeout=120)
    assert f"{call}: " in facts["error"], facts
    assert f", {code})" in facts["error"], facts
    assert not facts["paused"]  # it comes before round 0 is there
    if call != "cuMemcpyHtoDAsync":  # of the second update
        assert (facts["version"], facts["kept"]) == ("1", True), facts
    assert facts["after"] == ""
    assert facts["right"]


@pytest.mark.parametrize(
    ("call", "k", "code"),
    [
        ("cuMemImportFromShareableHandle", 0, 999),
        ("cuLaunchKernel", 1, 719),
        ("cuStreamWriteValue64", 1, 999),
    ],
)
def test_a_driver_call_that_fails_in_the_worker(
    call: str, k: int, code: int, trainer: Ranks
) -> None:
    (facts,) = trainer.run(cuda_cases.fail_in_the_worker, call, k, code, timeout=120)
    assert facts["error"].startswith(("RemoteError: ", "PeerClosedError: ")), facts
    assert f"{call}: " in facts["error"], facts
    assert facts["consistent"] == (k == 0)
    assert facts["after"] == ""
    assert facts["right"]


@pytest.mark.parametrize(
    "lost",
    [{"WSYNC_FAKE_CUDA_FAIL": "cuLaunchKernel:1:719:1"}, {"WSYNC_FAKE_CUDA_FAULT": "0:719"}],
    ids=["a call", "a kernel"],
)
def test_a_gpu_that_is_lost_to_an_engine_is_an_error_and_the_trainer_s_own_goes_on(
    lost: dict[str, str], trainer: Ranks
) -> None:
    (facts,) = trainer.run(cuda_cases.lose_the_worker_s, lost, timeout=120)
    assert ", 719)" in facts["error"], facts
    assert ", 719)" in facts["again"], facts
    assert facts["paused"]
    assert facts["after"] == ""
    assert facts["right"]


def test_weights_are_not_written_under_a_forward_pass(tmp_path: Path) -> None:
    """A pause may leave one on a stream that nobody names: before the engine learns, before it
    loads, and before it compares."""
    with _ranks(1, tmp_path) as ranks:
        (facts,) = ranks.run(cuda_cases.forward_passes, timeout=120)
    assert facts == {"read": [True] * 4, "right": True}


def test_a_wait_for_other_streams_ends_at_the_deadline(tmp_path: Path) -> None:
    """As beside a kernel of NCCL that hangs."""
    with _ranks(1, tmp_path) as ranks:
        ((error, seconds, right),) = ranks.run(cuda_cases.stuck_in_the_trainer, timeout=120)
    assert error.startswith("DeadlineError: ") and "has not finished its work" in error
    assert seconds < 10
    assert right


def test_rings_are_smaller_where_the_gpu_has_no_room(tmp_path: Path) -> None:
    memory = 30 << 20
    with _ranks(1, tmp_path, WSYNC_FAKE_CUDA_MEMORY=str(memory)) as ranks:
        (facts,) = ranks.run(cuda_cases.short_of_memory, timeout=120)
    assert facts["right"]
    assert 0 < facts["ring"] <= memory
    assert facts["rounds"] > 1
    assert facts["error"].startswith("NoMemoryError: rank 0: cannot make GPU memory of "), facts
    assert f" of {memory} bytes of GPU 0 (Fake GPU 0) are free" in facts["error"], facts


def test_rounds_are_large_where_the_gpu_of_every_rank_has_room(tmp_path: Path) -> None:
    memory, large, usual = 24 << 30, 1 << 30, 256 << 20
    expected: list[tuple[int, dict[str, object], int]] = [
        (0, {}, large),
        (7 << 30, {}, large),
        ((8 << 30) + (2 << 20), {}, usual),
        (15 << 30, {}, usual),
        (0, {"park": True}, usual),
        (0, {"round_nbytes": 8192}, 8192),
        (0, {"ring_nbytes": 32768}, 8192),
    ]
    cases = [(taken, options) for taken, options, _ in expected]
    with _ranks(2, tmp_path, WSYNC_FAKE_CUDA_MEMORY=str(memory)) as ranks:
        first, second = ranks.run(cuda_cases.chosen_rounds, cases)
    chosen = [nbytes for _, _, nbytes in expected]
    assert [each["round"] for each in first] == [each["round"] for each in second] == chosen
    for each in first:  # the worker's ring is the first rank's
        assert each["right"] == [True]
        assert each["said"] == [(each["rounds"], each["ring"])]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"WSYNC_DEVICE": "GPU-00112233-4455-6677-8899-aabbccddeeff"},
            "none of the 2 GPUs that this process sees has the UUID that begins with 00112233",
        ),
        ({"WSYNC_DEVICE": "cuda:7"}, "cuda:7 does not exist in this process: it sees 2 GPUs"),
        ({"WSYNC_DEVICE": "gpu0"}, "WSYNC_DEVICE='gpu0' is neither cuda:N nor a GPU's UUID"),
        ({"WSYNC_NVRTC_LIB": "/nowhere/libnvrtc.so"}, "/nowhere/libnvrtc.so"),
    ],
    ids=["uuid", "number", "name", "nvrtc"],
)
def test_an_engine_without_its_gpu_says_why(
    environment: dict[str, str], words: str, trainer: Ranks, tmp_path: Path
) -> None:
    fresh = {"XDG_CACHE_HOME": str(tmp_path)}
    (text,) = trainer.run(cuda_cases.start_engine, fresh | environment, timeout=120)
    assert words in text
    assert text.startswith("RemoteError: "), text


def test_kernels_need_no_cache_that_can_be_written(trainer: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = {"XDG_CACHE_HOME": str(file)}
    assert trainer.run(cuda_cases.start_engine, environment, timeout=120) == ["right"]


def test_a_trainer_that_does_not_see_the_engine_s_gpu_names_it(trainer: Ranks) -> None:
    environment = {"WSYNC_FAKE_CUDA_DEVICES": "3", "WSYNC_DEVICE": "cuda:2"}
    (text,) = trainer.run(cuda_cases.start_engine, environment, timeout=120)
    assert text.startswith("UnsupportedError: "), text
    assert "the UUID that begins with fafafafa" in text


def test_the_engine_may_number_the_gpus_differently(trainer: Ranks) -> None:
    alone = {"WSYNC_FAKE_CUDA_FIRST": "1", "WSYNC_FAKE_CUDA_DEVICES": "1"}
    assert trainer.run(cuda_cases.start_engine, alone, timeout=120) == ["right"]


@pytest.mark.parametrize(
    ("settings", "shape", "rounds"),
    [
        # what is uploaded shares a queue with what waits, on a GPU without priorities
        ({"CONNECTIONS": "1", "PRIORITIES": "1"}, (64, 4096), 1 << 16),
        # memory for what is uploaded may wait for all that runs
        ({"SYNCS": "1"}, (64, 4096), 1 << 16),
        # what is fed fills the queue in which it waits
        ({"QUEUE": "8", "PAGEABLE": "0"}, (20, 1 << 20), 16 << 20),
    ],
    ids=["upload", "sync", "feed"],
)
def test_a_gpu_that_waits_for_a_dead_engine_holds_nobody(
    settings: dict[str, str], shape: tuple[int, ...], rounds: int, tmp_path: Path
) -> None:
    variables = {f"WSYNC_FAKE_CUDA_{name}": value for name, value in settings.items()}
    with _ranks(1, tmp_path, **variables) as ranks:
        (text,) = ranks.run(cuda_cases.lose_the_engine, shape, rounds, timeout=60)
    assert text.startswith(("PeerClosedError: engine ", "DeadlineError: engine ")), text


def test_one_rank_does_not_serve_engines_on_two_gpus(trainer: Ranks) -> None:
    (facts,) = trainer.run(cuda_cases.two_devices, timeout=120)
    assert re.match(
        r"InvalidArgumentError: rank 0: its weights and the workers that it serves are on "
        r"(GPU-[-0-9a-f]+) and (?!\1)GPU-[-0-9a-f]+; they must all be on one GPU, "
        r".*engine_gpu_offsets says whose GPU",
        facts["error"],
    ), facts["error"]
    assert facts["alone"] == ["", "", "", ""]


@pytest.mark.parametrize(("mark", "least"), [("gpu", 10), ("multigpu", 3)])
@pytest.mark.slow
def test_the_suite_for_gpus_passes_as_far_as_it_runs_without(
    mark: str, least: int, tmp_path: Path
) -> None:
    environment = fakecuda.logged(tmp_path) | {gpu_engine.DRY: "1"}
    environment["WSYNC_NCCL_LIB"] = fakecuda.fake_nccl()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-m", mark, str(HERE / f"test_{mark}.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= least, done.stdout
