"""torch.set_default_device, in trainers and engines: host memory stays host memory.  And
torch.set_default_dtype: it is nobody else's matter.

Most who set it mean "cuda"; "meta" has no memory either that the CPU can write to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import default_device_cases as cases
from support.procs import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(cases.COUNT, path=sys.path) as started:
        yield started


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delivery": "stock"},
        {"delivery": "distributed", "broadcast": "wsync"},
        {"delivery": "distributed", "broadcast": "bucket"},
        {"delivery": "distributed", "broadcast": "tensor"},
    ],
    ids=lambda options: "-".join(options.values()) or "wsync",
)
def test_every_byte_arrives(ranks: Ranks, options: dict[str, str]) -> None:
    assert ranks.run(cases.update_with, options) == [[], []]


def test_every_byte_arrives_by_any_default_dtype(ranks: Ranks) -> None:
    assert ranks.run(cases.update_in, torch.float64, {"delivery": "stock"}) == [[], []]


@pytest.mark.parametrize("delivery", ["stock", "distributed"])
def test_every_byte_arrives_after_an_update_in_inference_mode(ranks: Ranks, delivery: str) -> None:
    assert ranks.run(cases.update_inferring, {"delivery": delivery}) == [[], []]


def test_checkpoints_are_written(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(cases.write, str(tmp_path)) == ["", ""]


def test_buckets_are_host_memory(ranks: Ranks) -> None:
    assert ranks.run(cases.bucket) == [[], []]


def test_loaders_are_learnt(ranks: Ranks) -> None:
    assert ranks.run(cases.learn)[0] == ("", {"qkv": True, "b": True})
