"""What only several real GPUs can show: `pytest -m multigpu tests/test_multigpu.py` on a machine
that has two or more.

With WSYNC_GPU_DRY_RUN=1 and the stand-ins for the driver and NCCL (test_cuda_update.py does so) all
of it runs without: weights lie in memory of the host, and torch's groups are gloo's.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from support import multigpu_cases as cases
from support.gpu_engine import dry
from support.procs import RankError, Ranks

pytestmark = pytest.mark.multigpu

MOST_RANKS = 4


def ranks(count: int) -> Ranks:
    """Of processes that come from one in which nothing has used a GPU: each sees its own alone."""
    return Ranks(count, path=sys.path, fresh=not dry(), grace=2 * cases.OPTIONS.deadline)


def test_a_killed_rank_is_one_named_error_within_the_deadline() -> None:
    count = 3 if dry() else min(torch.cuda.device_count(), MOST_RANKS)
    # between GPUs of one host NCCL does not notice it: the deadline of a round does
    with ranks(count) as started, pytest.raises(RankError) as caught:
        started.run(cases.lose_a_rank, timeout=300)
    found = caught.value.results
    assert sorted(found) == list(range(count - 1)), caught.value
    (error,) = {facts["error"] for facts in found.values()}
    assert re.search(rf"trainer rank {count - 1} \(pid \d+\) has ended", error), error
    for facts in found.values():
        assert facts["exchange"] == "nccl"
        assert facts["rounds"] > cases.STRUCK + 1
        assert facts["right"] and facts["paused"]
        assert facts["seconds"] < cases.OPTIONS.request_deadline


@pytest.mark.parametrize("kind", ["bucket", "tensor"])
def test_broadcasts_leave_straight_from_memory_of_the_gpu(kind: str) -> None:
    with ranks(1) as started:
        (found,) = started.run(cases.broadcast_straight, kind, timeout=300)
    assert found["right"] == [True, True]
    assert found["handed"] == {"cpu" if dry() else "cuda"}
    assert found["through the host"] is dry()
