"""Checkpoints that real Megatron ranks write together, as transformers and engines read them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support import disk_cases
from support.megatron_cpu import Parallel
from support.procs import RankError, Ranks
from support.tiny_qwen3 import dense, sparse

ONE_FILE = 1 << 30
# config, cut, bytes of a file, stored dtype, engine
CASES: dict[str, tuple[Any, Parallel, int, str | None, dict[str, Any]]] = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2), 1 << 16, None, {"tp": 2}),
    "tp4-two-groups": (dense(), Parallel(tp=4), ONE_FILE, None, {"tp": 1}),
    "tp2pp2vpp2-tied": (dense(4, tied=True), Parallel(tp=2, pp=2, vpp=2), 1 << 17, None, {"tp": 2}),
    "replicas": (dense(), Parallel(), ONE_FILE, None, {"tp": 2}),
    "bfloat16": (dense(), Parallel(tp=2, pp=2), 1 << 16, "bfloat16", {"tp": 2}),
    "moe-tp2pp2ep2": (
        sparse(),
        Parallel(tp=2, pp=2, ep=2, etp=1),
        1 << 17,
        None,
        {"tp": 2, "experts": "ep"},
    ),
    "moe-ep4": (sparse(), Parallel(ep=4, etp=1), ONE_FILE, None, {"tp": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_byte_is_where_others_look_for_it(name: str, ranks: Ranks, tmp_path: Path) -> None:
    config, parallel, shard_nbytes, dtype, engine = CASES[name]
    found = ranks.run(
        disk_cases.update_twice,
        config,
        parallel,
        str(tmp_path),
        shard_nbytes,
        dtype,
        engine,
        timeout=240,
    )
    assert [facts["wrong"] for facts in found] == [[]] * 4
    first = found[0]
    assert sum(first["written"]) == first["delivered_nbytes"]
    assert all(first["written"])
    assert (first["rounds"] == 1) == (shard_nbytes == ONE_FILE)
    assert first["delivered_nbytes"] == first["model_nbytes"] // (1 if dtype is None else 2)


def test_replicas_share_the_writing(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(
        disk_cases.update_twice,
        dense(),
        Parallel(),
        str(tmp_path),
        ONE_FILE,
        None,
        {"tp": 1},
        timeout=240,
    )
    written = found[0]["written"]
    assert max(written) < 1.5 * min(written)


def test_slimes_calls_work(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(
        disk_cases.as_slime_does, dense(), Parallel(tp=2, pp=2), str(tmp_path), timeout=240
    )
    for facts in found:
        assert facts["wrong"] == []
        assert facts["version"] == 2
        assert facts["versions"] == [".lock", "latest", "weight_v000001", "weight_v000002"]
        assert facts["written"] == ["weight_v000001", "weight_v000002"]
        assert facts["metrics"]["wsync/write_seconds"] > 0
        assert facts["second_pop"] == {}
    assert (tmp_path / "versions" / "latest" / "config.json").exists()


def test_a_full_disk_of_one_rank_is_everybodys_error_and_changes_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(
        disk_cases.fail_once, dense(), Parallel(tp=2, pp=2), str(tmp_path), timeout=240
    )
    text = "SystemCallError: trainer rank 1: shard: writing 5 bytes at 9: No space left on device"
    assert {facts["error"] for facts in found} == {text}
    assert [facts["wrong"] for facts in found] == [[]] * 4
    assert not found[0]["paused"]
    assert found[0]["left"] == [".lock", "latest", "weight_v000001", "weight_v000002"]


def test_a_rank_that_writes_slowly_is_waited_for_while_it_gets_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    """All its calls take longer than ranks wait for each other (a deadline, and 5 s more)."""
    assert ranks.run(disk_cases.write_slowly, str(tmp_path), 8, timeout=60) == [""] * 4


def test_a_killed_writer_leaves_the_previous_version_readable(tmp_path: Path) -> None:
    versions, notes = tmp_path / "versions", tmp_path / "notes"
    notes.mkdir()
    with Ranks(4, path=sys.path) as ranks, pytest.raises(RankError):
        ranks.run(
            disk_cases.die_in_the_middle,
            dense(),
            Parallel(tp=2, pp=2),
            str(versions),
            str(notes),
            timeout=120,
        )
    texts = {path.name: path.read_text() for path in notes.iterdir()}
    errors = {name: text for name, text in texts.items() if name.startswith("rank")}
    assert sorted(errors) == ["rank0", "rank1", "rank3"]
    assert len(set(errors.values())) == 1
    assert next(iter(errors.values())).startswith("PeerClosedError: trainer rank ")
    assert [texts[f"wrong{rank}"] for rank in (0, 1, 3)] == ["", "", ""]
