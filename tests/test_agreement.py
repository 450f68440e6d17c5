"""Trainer ranks that differ: what they agree on, and that all of them say the same."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from support import agreement_cases
from support.procs import RankError, Ranks

import wsync
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.daemon_threads import WorkerThread


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, path=sys.path) as started:
        yield started


def test_what_one_rank_does_differently_all_ranks_say(ranks: Ranks) -> None:
    first, second = ranks.run(agreement_cases.disagree)
    assert first["seconds"] < agreement_cases.OPTIONS.deadline  # nobody was waited for
    assert first["layout"].startswith("UnsupportedError: trainer rank 1: ")
    assert "trainer rank " in first["updater"]
    assert first["version"].endswith("trainer ranks give different versions: ['7', '8']")
    assert first["odd"].startswith("InvalidArgumentError: trainer rank 1: version=''")
    assert first["weights"].endswith(
        "trainer rank 0 gives weights to update(), and rank 1 does not"
    )
    assert first["closed"] == "StateError: this connection was closed: connect again"
    assert first["versions"] == ["9"]
    for name in ("layout", "updater", "version", "odd", "weights", "closed"):
        assert first[name] == second[name]


def test_a_layout_of_another_rank_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(agreement_cases.of_another_rank, str(tmp_path))
    text = (
        r"InvalidArgumentError: trainer rank (\d): the layout is of rank 0 of 1, .* is rank \1 of 2"
    )
    assert re.match(text, first["sync"])
    assert re.match(text, first["disk"])
    fewer = first.pop("fewer"), second.pop("fewer")
    assert "the layout is of rank 0 of 2, but this is rank 0 of 1" in fewer[0]
    assert fewer[1] == ""
    assert second == first


def test_arguments_that_ranks_have_to_share_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(agreement_cases.unlike, str(tmp_path))
    given = {
        "folder": (str(tmp_path / "0"), str(tmp_path / "1")),
        "dtype": (None, "bfloat16"),
        "shard_nbytes": (16, 8),
        "broadcast": ("bucket", "tensor"),
        "backend": ("gloo", "nccl"),
    }
    assert first == second
    for name, values in given.items():
        assert "make the same thing together: " in first[name]
        made = re.split(r"\brank [01] ", first[name])[-2:]
        for text, value in zip(made, values, strict=True):
            assert re.search(rf"\b{name}={re.escape(repr(value))}[,)]", text), first[name]


def test_a_rank_that_does_not_come_is_named_and_may_come_later(ranks: Ranks) -> None:
    first, _ = ranks.run(agreement_cases.absent)
    assert first == "DeadlineError: trainer ranks [1] did not join the others within 1 s"


def test_ranks_hear_of_one_that_is_interrupted_while_they_connect(ranks: Ranks) -> None:
    first, second = ranks.run(agreement_cases.interrupted_to_connect)
    assert first.startswith("RemoteError: trainer rank 1: KeyboardInterrupt")
    assert second == "KeyboardInterrupt"


def test_codes_that_another_rank_holds_are_the_models(ranks: Ranks, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    for errors in ranks.run(agreement_cases.codes_of_a_later_stage, str(tmp_path)):
        assert errors == ["", ""]


def test_ranks_that_have_called_for_different_numbers_of_updates_say_which_they_mean(
    ranks: Ranks,
) -> None:
    """A loop that goes on after errors would send weights of one step with those of another."""
    for refused, apart, *later in ranks.run(agreement_cases.called_alone):
        assert "version=''" in refused
        assert re.search(r"different numbers of times \(\[2, 3\], by rank\)", apart)
        assert later == ["", ""]


def test_a_rank_that_is_killed_is_named() -> None:
    """And not the ones that have lost their connection with it."""
    with Ranks(3, path=sys.path) as ranks, pytest.raises(RankError) as caught:
        ranks.run(agreement_cases.lose_a_rank, timeout=240)
    errors = caught.value.results
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert re.fullmatch(r"PeerClosedError: trainer rank 2 \(pid \d+\) has ended", error)


def test_a_rank_that_hears_of_an_error_looks_for_no_process_that_has_ended() -> None:
    group = TrainerGroup(timeout=5)
    group._store = SimpleNamespace(compare_set=lambda key, before, said: said.encode())
    group._thread = WorkerThread("store")
    error = wsync.PeerClosedError("trainer rank 1: engine E: gone")
    with mock.patch.object(group, "_await_end", side_effect=AssertionError("it looks")):
        assert group.fail(error) is error
    group._thread.close()
