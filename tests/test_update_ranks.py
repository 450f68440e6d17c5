"""Whole updates from sharded Megatron trainers over gloo, into a tensor-parallel engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support import update_cases
from support.megatron_cpu import Parallel
from support.procs import RankError, Ranks
from support.tiny_qwen3 import dense, sparse

CASES = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2), {}, "auto"),
    "tp2pp2-gloo": (dense(), Parallel(tp=2, pp=2), {}, "gloo"),
    "tp2pp2-full": (dense(), Parallel(tp=2, pp=2), {"delivery": "full"}, "shared"),
    "tp4-two-groups": (dense(), Parallel(tp=4), {}, "auto"),
    "tp2pp2vpp2-tied": (dense(4, tied=True), Parallel(tp=2, pp=2, vpp=2), {}, "auto"),
    "replicas": (dense(), Parallel(), {}, "auto"),
    "moe-tp2pp2ep2": (sparse(), Parallel(tp=2, pp=2, ep=2, etp=1), {"experts": "ep"}, "auto"),
    "tp2pp2vpp2-tied-direct": (dense(4, tied=True), Parallel(tp=2, pp=2, vpp=2), {}, "direct"),
    "replicas-direct": (dense(), Parallel(), {}, "direct"),
    "moe-tp2pp2ep2-direct": (
        sparse(),
        Parallel(tp=2, pp=2, ep=2, etp=1),
        {"experts": "ep"},
        "direct",
    ),
    "tp2pp2-private": (dense(), Parallel(tp=2, pp=2), {}, "private"),
    "tp2pp2-hosts": (dense(), Parallel(tp=2, pp=2), {}, "hosts"),
    "moe-ep4-gloo-full": (sparse(), Parallel(ep=4, etp=1), {"delivery": "full"}, "gloo"),
}
LENT = ("direct", "private", "hosts")
if os.environ.get("WSYNC_DEVICE"):  # GPUs do not read what is lent
    CASES = {name: case for name, case in CASES.items() if case[3] not in LENT}


@pytest.mark.parametrize("name", CASES)
def test_every_byte_arrives(name: str, ranks: Ranks) -> None:
    config, parallel, engine, exchange = CASES[name]
    facts = ranks.run(
        update_cases.update_twice, config, parallel, {"tp": 2, **engine}, exchange, timeout=240
    )
    assert [fact["wrong"] for fact in facts] == [[]] * 4
    for field in ("version", "rounds", "delivered_nbytes"):
        assert len({fact[field] for fact in facts}) == 1, field
    first = facts[0]
    if engine.get("delivery") == "full":
        assert first["delivered_nbytes"] == 2 * first["model_nbytes"]
    else:
        assert first["redundancy"] == 1.0
    if exchange in LENT:
        both = exchange != "direct"
        assert set(first["paths"].values()) == {"direct and ring" if both else "direct"}
    if exchange == "direct":
        moved = ("rounds", "sent_nbytes", "ring_nbytes", "staging_nbytes")
        assert [first[name] for name in moved] == [1, 0, 0, 0]
        return
    assert first["exchange"] == ("gloo" if exchange in ("gloo", "hosts") else "shared")
    assert first["rounds"] > 1
    # room for what is sent in one round and in the next
    staging = sum(fact["staging_nbytes"] for fact in facts)
    assert staging >= 2 * first["sent_nbytes"] / first["rounds"]


def test_a_mapping_speaks_for_its_own_rank(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(update_cases.from_dicts, dense(), str(tmp_path), timeout=240)
    assert [facts["wrong"] for facts in found] == [[]] * 4
    written = [facts["written"] for facts in found]
    assert max(written) < 2 * min(written)  # replicas share the work


def test_slimes_calls_work_and_engines_may_change(ranks: Ranks) -> None:
    found = ranks.run(update_cases.as_slime_does, dense(), Parallel(tp=2, pp=2), timeout=240)
    for facts in found:
        assert facts["early"] == "call connect_rollout_engines before update_weights"
        assert facts["wrong"] == []
        assert (facts["version"], facts["engine_version"]) == (2, "2")
        assert facts["metrics"]["wsync/update_seconds"] > 0
        assert facts["metrics"]["wsync/model_nbytes"] > 0
        assert facts["second_pop"] == {}


@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_all_ranks_raise_the_first_error_and_the_next_update_recovers(
    exchange: str, ranks: Ranks
) -> None:
    found = ranks.run(
        update_cases.fail_once, dense(), Parallel(tp=2, pp=2), {"tp": 2}, exchange, timeout=240
    )
    errors = {facts["error"] for facts in found}
    assert errors == {"RemoteError: trainer rank 1: ValueError: a planted failure"}
    assert [facts["wrong"] for facts in found] == [[]] * 4
    assert found[0]["inconsistent"]
    assert found[0]["paused"]


def test_a_rank_that_dies_is_reported_by_all_others(tmp_path: Path) -> None:
    with Ranks(4, path=sys.path) as ranks, pytest.raises(RankError):
        ranks.run(
            update_cases.die_in_the_middle,
            dense(),
            Parallel(tp=2, pp=2),
            {"tp": 2},
            str(tmp_path),
            timeout=120,
        )
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(texts) == ["rank0", "rank1", "rank3"]
    assert len(set(texts.values())) == 1
    assert next(iter(texts.values())).startswith("PeerClosedError: trainer rank ")
