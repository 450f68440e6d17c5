"""Which trainer rank serves which engine worker."""

from __future__ import annotations

import pytest

import wsync
from wsync.sessions import assign_homes


def homes(*args: list[int] | None) -> list[int]:
    return [worker.home for worker in assign_homes(*args)]  # type: ignore[arg-type]


def test_workers_are_spread_over_the_ranks_of_one_host() -> None:
    assert homes([1, 2], [0, 0, 0, 0]) == [0, 1, 2]
    assert homes([4, 2], [0, 0]) == [0, 1, 0, 1, 0, 1]


def test_ranks_of_another_host_serve_nobody_by_chance() -> None:
    assert homes([3], [0, 0, 2, 2]) == [0, 1, 0]


def test_an_offset_names_the_rank_on_the_engines_gpu() -> None:
    assert homes([2, 2], [0, 0, 0, 0], [2, 0]) == [2, 3, 0, 1]


def test_an_offset_counts_on_any_host() -> None:
    assert homes([2, 2], [0, 0, 2, 2], [2, 0]) == [2, 3, 0, 1]
    assert homes([2], [0, 0, 2, 2], [4]) == [0, 1]


def test_workers_beyond_the_trainer_go_to_the_least_busy_rank() -> None:
    assert homes([2], [0, 0], [7]) == [0, 1]


def test_a_stock_engine_is_served_by_rank_0() -> None:
    workers = assign_homes([0, 1], [0, 0])
    assert [(w.engine, w.home, w.stock) for w in workers] == [(0, 0, True), (1, 1, False)]


def test_wrong_counts_are_named() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match="3 engine_gpu_offsets for 2 engines"):
        assign_homes([1, 1], [0], [0, 1, 2])
    with pytest.raises(wsync.InvalidArgumentError, match="engine 1 has -1 workers"):
        assign_homes([1, -1], [0])
