"""Remote engines whose workers and the trainer ranks are one communicator of NCCL, on stand-ins for
the driver and for NCCL (tests/fakecuda, tests/fakenccl)."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fakecuda
from support import remote_nccl_cases as cases
from support.procs import RankError, Ranks
from support.tiny_qwen3 import dense, draw, in_server, sums

from wsync.demo.engines.serve import serve_in_process


@pytest.fixture(scope="module")
def misuse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment of played GPUs; what was called against the rules comes into this file."""
    folder = tmp_path_factory.mktemp("played")
    settings = fakecuda.coherent(devices=cases.GPUS) | {
        "WSYNC_NCCL_LIB": fakecuda.fake_nccl(),
        "WSYNC_FAKE_CUDA_MISUSE": str(folder / "misuse"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield folder / "misuse"


@pytest.fixture(scope="module")
def ranks(misuse: Path) -> Iterator[Ranks]:
    with Ranks(2, path=sys.path) as started:
        yield started


def said(misuse: Path) -> str:
    return misuse.read_text(encoding="ascii", errors="replace") if misuse.exists() else ""


@pytest.mark.parametrize("park", [False, True])
def test_remote_workers_are_members_of_the_trainer_s_communicator(
    park: bool, ranks: Ranks, misuse: Path
) -> None:
    for facts in ranks.run(cases.deliver, dense(), park, timeout=300):
        assert facts["wrong"] == []
        assert facts["paths"] == [{"tp1": "nccl", "tp2": "nccl"}] * 2
        assert facts["exchange"] == "nccl"
        assert (
            facts["paused"] == [True] * 3
        )  # one to compare; before a group waits for their workers
        assert facts["metrics"]["wsync/engines_by_nccl"] == 2.0
        assert facts["rounds"] > 2
        # each worker is sent its own boxes, once
        assert facts["redundancy"] == 1.0
        model = facts["model_nbytes"]
        assert 2 * model <= facts["delivered_nbytes"] < 2.5 * model
        assert facts["left"][0] == (0, 0)
        assert facts["left"][1] <= {(1, 0)}
    assert said(misuse) == ""


def test_another_version_of_nccl_is_refused_by_name_or_torch_s_group_serves(
    ranks: Ranks, misuse: Path
) -> None:
    first, second = ranks.run(cases.disagree, dense(), timeout=240)
    reason = (
        "trainer rank 0 has NCCL 22907 and engine tp1: worker 0 NCCL 22809: all need the same "
        "version"
    )
    assert first["error"] == second["error"]
    assert first["error"].endswith(f": exchange='nccl', but {reason}")
    assert first["logged"] == [f"remote workers are reached by gloo, because {reason}"]
    assert second["logged"] == []
    for facts in (first, second):
        assert facts["wrong"] == []
        assert facts["paths"] == {"tp1": "gloo"}
    assert said(misuse) == ""


@pytest.mark.parametrize(
    "step",
    [
        "introduced",
        "round",
        "prepared",
    ],
)
def test_a_worker_that_is_killed_ends_the_update_for_all(
    step: str, ranks: Ranks, misuse: Path
) -> None:
    found = ranks.run(cases.fail_once, dense(), "worker", step, signal.SIGKILL, timeout=240)
    check(found, r"engine tp1: (worker 0 (is gone|ended)|.*worker 0 ended with -9)", misuse)


# a rank sees the end of its round, or another one that it waits for it
LATE = r"round \d+: rank \d of 5 has not moved|rank \d waits for round \d+ to move"
FAILED = r"round \d+: rank {} of 5: nccl\w+: remote process exited"
ABSENT = rf"rank \d waits for the others of 5 ranks to meet by NCCL|{LATE}"


@pytest.mark.parametrize(
    ("plant", "what", "value", "text"),
    [
        ("in worker", "hang", 0, LATE),
        ("in trainer", "hang", 0, LATE),
        ("in worker", "error", 6, FAILED.format(2)),
        ("in trainer", "error", 6, FAILED.format(1)),
        ("in worker", "never", 0, ABSENT),
        ("in trainer", "never", 0, ABSENT),
    ],
    ids=lambda value: None if value in (0, 6) else str(value)[:10],
)
def test_a_communicator_that_fails_is_given_up_and_made_anew(
    plant: str, what: str, value: int, text: str, ranks: Ranks, misuse: Path
) -> None:
    found = ranks.run(cases.fail_once, dense(), plant, what, 8, value, timeout=240)
    check(found, text, misuse)


def test_a_worker_that_stops_ends_the_update_in_time(ranks: Ranks, misuse: Path) -> None:
    found = ranks.run(cases.fail_once, dense(), "worker", "round", signal.SIGSTOP, timeout=240)
    check(found, r"has not moved its bytes|within \d+ s|deadline passed|no answer", misuse)


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ("round", signal.SIGKILL),
        pytest.param("introduced", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("prepared", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("round", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_dies_costs_itself(step: str, how: int, ranks: Ranks, misuse: Path) -> None:
    for facts in ranks.run(cases.lose_one, dense(), step, how, timeout=240):
        assert facts["lost"] == [["tp1"]] * 2
        assert facts["wrong"] == []
        assert facts["paths"] == [{"tp2": "nccl"}] * 2
        assert facts["left"][0] == (0, 0)
    assert said(misuse) == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", ["in worker", "in trainer"])
def test_operations_fail_in_turn(plant: str, ranks: Ranks, misuse: Path) -> None:
    found = ranks.run(cases.fail_in_turn, dense(), plant, timeout=840)
    for facts in found:
        assert facts["wrong"] == []
        assert facts["errors"] == found[0]["errors"]
        assert len(facts["errors"]) > 10
        assert all("nccl" in error for error in facts["errors"]), facts["errors"]
        assert facts["left"][0] == (0, 0)
    assert said(misuse) == ""


def check(found: list[dict[str, Any]], text: str, misuse: Path) -> None:
    """One error for all, and nothing is left of it in the next update."""
    (error,) = {facts["error"] for facts in found}
    assert re.search(text, error), error
    for facts in found:
        assert facts["paused"]
        assert facts["wrong"] == []
        assert facts["paths"] == {"nccl"}
        assert facts["left"][0] == (0, 0)
        assert facts["left"][1] <= {(1, 0)}
    assert said(misuse) == ""


@pytest.fixture(scope="module")
def server(misuse: Path) -> Iterator[str]:
    """An engine on a GPU of its own, which outlives trainers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WSYNC_DEVICE", f"cuda:{cases.GPUS - 1}")
        started = serve_in_process(dense(), dtype="float32")
    with started as engine:
        yield engine.url


@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (1, "planned"),
        (0, "round"),
        (1, "committing"),
    ],
)
def test_a_trainer_rank_that_is_killed_leaves_an_engine_for_the_next_trainer(
    rank: int, step: str, server: str, misuse: Path
) -> None:
    config = dense()
    with Ranks(2, path=sys.path) as trainer:
        with pytest.raises(RankError) as caught:
            trainer.run(cases.update_server, config, server, 1, (rank, step), timeout=120)
        (error,) = caught.value.results.values()
        assert re.search(r"rank \d|is gone|store", error), error
        assert trainer.run(cases.update_server, config, server, 2, None, timeout=120) == ["", ""]
    assert in_server(server) == sums(draw(config, 2))
    assert said(misuse) == ""
