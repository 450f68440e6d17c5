"""Updates that workers copy out of the trainer's own memory on a GPU, which tests/fakecuda plays:
byte for byte, and by the log of calls.  What it refuses fails the test (conftest.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import gpu_direct_cases
from support.gpu_direct_log import check_rank, check_worker
from support.procs import Ranks
from support.tiny_qwen3 import dense
from test_cuda_update import _ranks, trainer, trainers

__all__ = ["trainer", "trainers"]

PLACES = ["by handle", "in pieces"]


@pytest.mark.parametrize("place", PLACES)
def test_a_steady_update_waits_launches_and_records_once(place: str, trainer: Ranks) -> None:
    (facts,) = trainer.run(gpu_direct_cases.steady, dense(), place, [0], "direct", 2, timeout=300)
    assert facts["right"] == [True] * 3
    assert facts["paths"] == {"direct"}
    assert (facts["ring"], facts["rounds"]) == (0, 1)
    assert len(facts["workers"]) == 2
    for worker in facts["workers"]:
        check_worker(worker)
    check_rank(facts["trainer"], 2)


def test_a_steady_update_asks_the_driver_for_nothing_that_it_knows(trainer: Ranks) -> None:
    (facts,) = trainer.run(gpu_direct_cases.asks_nothing, dense(), timeout=300)
    assert facts["right"] == [True] * 3
    for count in (facts["trainer"], *facts["workers"]):
        del count["cuStreamQuery"]  # while it waits
        assert 0 < count.total() < 10, count


def test_memory_that_has_changed_under_its_tensors_is_asked_about(trainer: Ranks) -> None:
    """And no other: the first and the last of two updates in the same memory."""
    asked = [True, False, True, True, False, True, False]
    assert trainer.run(gpu_direct_cases.changes, timeout=120) == [[(True, a) for a in asked]]


def test_memory_is_asked_about_unless_it_must_be_there(trainer: Ranks) -> None:
    (found,) = trainer.run(gpu_direct_cases.known_memory, timeout=120)
    assert found[:-1] == [1, 0, 1, 1, 0, 1, 0, 1, 1]
    assert "has paused and not resumed" in found[-1]


def test_auto_lends_nothing_of_a_gpu(trainer: Ranks) -> None:
    case = (gpu_direct_cases.steady, dense(), "by handle", [0], "auto", 2)
    (facts,) = trainer.run(*case, timeout=300)
    assert facts["right"] == [True] * 3
    assert facts["paths"] == {"ring"}


@pytest.mark.parametrize("place", PLACES)
def test_ranks_on_one_gpu_lend_their_parts(place: str, trainers: Ranks) -> None:
    found = trainers.run(gpu_direct_cases.steady, dense(), place, [0, 0], "direct", 2, timeout=300)
    for facts in found:
        assert facts["right"] == [True] * 3
        assert facts["paths"] == {"direct"}
        check_rank(facts["trainer"], 1)
    for worker in found[0]["workers"]:
        check_worker(worker)


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_reads_memory_of_another_gpu_that_it_reaches(
    place: str, trainers: Ranks, tmp_path: Path
) -> None:
    case = (gpu_direct_cases.steady, dense(), place, [0, 1], "direct", 1)
    for facts in trainers.run(*case, timeout=300):
        assert facts["right"] == [True] * 3
        assert facts["paths"] == {"direct"}
    for worker in facts["workers"]:
        check_worker(worker)
    with _ranks(2, tmp_path, WSYNC_FAKE_CUDA_PEERS="0") as ranks:
        for facts in ranks.run(*case, timeout=300):
            assert facts["right"] == [True] * 3
            assert facts["paths"] == {"ring"}


@pytest.mark.parametrize("park", [False, True], ids=["kept", "parked"])
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_elsewhere_each_time_are_found(
    place: str, park: bool, trainer: Ranks
) -> None:
    (facts,) = trainer.run(gpu_direct_cases.moves, place, park, timeout=120)
    assert facts["right"] == [True] * 4
    assert facts["paths"] == {"direct"}
    opens, closes = {
        "by handle": ("cuIpcOpenMemHandle", "cuIpcCloseMemHandle"),
        "in pieces": ("cuMemMap", "cuMemUnmap"),
    }[place]
    # of a ring that is parked, too
    assert facts["worker"][opens] == facts["worker"][closes] > 0, facts


def test_memory_that_was_replaced_at_its_address_is_lent_anew(trainer: Ranks) -> None:
    (facts,) = trainer.run(gpu_direct_cases.pauses, timeout=120)
    assert facts["paused"].startswith("StateError: "), facts
    assert "has paused and not resumed" in facts["paused"]
    assert facts["after"] == ""
    assert facts["right"] == [True, True]
    assert facts["paths"] == {"direct"}
    assert facts["mapped"]  # all pieces once


def test_what_cannot_be_lent_goes_through_a_ring_in_the_same_update(trainer: Ranks) -> None:
    (facts,) = trainer.run(gpu_direct_cases.cannot_be_lent, timeout=120)
    assert facts["right"] == [True] * 3
    assert facts["paths"] == [{"direct and ring"}, {"direct and ring"}, {"ring"}]
    said = [text for text in facts["said"] if "no other process can map" in text]
    assert len(said) == 2, said
    assert said[0].startswith("wsync: a, c: rank 0 has 2 of 4 parameters in memory that "), said
    assert "torch_memory_saver" in said[0]


def test_workers_read_what_torch_still_writes_when_an_update_begins(trainer: Ranks) -> None:
    assert trainer.run(gpu_direct_cases.late_weights, timeout=120) == [True]


def test_an_allocation_is_not_freed_while_a_worker_has_it_open(trainer: Ranks) -> None:
    """Pieces may be: the worker's mapping keeps their memory."""
    assert trainer.run(gpu_direct_cases.frees_late, "by handle", timeout=120) == [
        [False, True, True]
    ]


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("by handle", "cuPointerGetAttributes"),
        ("by handle", "cuIpcGetMemHandle"),
        ("in pieces", "cuMemExportToShareableHandle"),
    ],
)
def test_a_driver_call_that_fails_while_memory_is_lent(
    place: str, call: str, trainer: Ranks
) -> None:
    (facts,) = trainer.run(gpu_direct_cases.lending_fails, place, call, timeout=120)
    assert facts["error"].startswith("DeviceError: ") and f"{call}: " in facts["error"], facts
    assert facts["right"]
    assert facts["paths"] == {"direct"}


@pytest.mark.parametrize(
    ("place", "call", "k"),
    [
        ("by handle", "cuIpcOpenMemHandle", 1),
        ("in pieces", "cuMemImportFromShareableHandle", 2),  # the first is the ring
        ("in pieces", "cuMemSetAccess", 1),
    ],
)
def test_a_driver_call_that_fails_while_memory_is_borrowed(
    place: str, call: str, k: int, trainer: Ranks
) -> None:
    (facts,) = trainer.run(gpu_direct_cases.borrowing_fails, place, call, k, timeout=120)
    assert facts["error"].startswith(("RemoteError: ", "PeerClosedError: ")), facts
    assert f"{call}: " in facts["error"], facts
    assert facts["consistent"]
    assert facts["right"] == [True, True]
    assert facts["paths"] == {"direct"}


def test_a_worker_that_dies_while_it_reads_leaves_the_weights_to_others(trainer: Ranks) -> None:
    ((error, after),) = trainer.run(gpu_direct_cases.worker_dies, timeout=120)
    assert error.startswith(("PeerClosedError: ", "RemoteError: ", "DeadlineError: ")), error
    assert after == "right"


@pytest.mark.parametrize("where", [gpu_direct_cases.elsewhere, gpu_direct_cases.beside_mps])
def test_workers_that_cannot_open_what_is_lent_get_rings(where: Any, trainer: Ranks) -> None:
    """In another PID namespace, or on the other side of MPS."""
    assert trainer.run(where, timeout=120) == [{"paths": {"ring"}, "right": True}]
