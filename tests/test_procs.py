"""The helper behind the multi-process tests: failures are told, nothing hangs, nothing is left."""

import os
import signal
import sys
import time

import pytest
from support.memory import lock_files
from support.procs import RankError, Ranks, runs


def test_failures_deadlines_and_restarts():
    with Ranks(2) as ranks:
        first = ranks.run(os.getpid)
        assert len(set(first)) == 2
        with pytest.raises(RankError, match=r"rank 0: (?s:.*)TypeError"):
            ranks.run(len, 3)
        assert ranks.run(os.getpid) == first
        with pytest.raises(RankError, match="rank 1: no answer in time"):
            ranks.run(time.sleep, 60, timeout=0.5)
        second = ranks.run(os.getpid)
        assert not set(first) & set(second)
        with pytest.raises(RankError, match="rank 0: the process ended"):
            ranks.run(os._exit, 3)
    assert not [pid for pid in (*first, *second) if runs(pid)]


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_is_killed_is_missed_at_once(busy):
    """Whatever it has started goes on, and whether or not it was told anything then."""
    with Ranks(1, path=sys.path) as ranks:
        (pid,) = ranks.run(os.getpid)
        (child,) = ranks.run(os.posix_spawnp, "sleep", ["sleep", "300"], os.environ.copy())
        if not busy:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0: the process ended"):
            ranks.run(os.kill, pid, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)


def test_locks_of_ranks_have_no_files_that_could_stay_behind():
    with Ranks(1, path=sys.path) as ranks:
        assert ranks.run(lock_files) == [[]]
