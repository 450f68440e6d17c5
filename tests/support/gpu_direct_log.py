"""What a steady update that workers read out of the trainer's GPU may ask of the driver; the counts
are those of support.fakecuda.calls."""

from __future__ import annotations

from collections import Counter

# one launch copies everything between one wait and one record; of its own mappings, and of what its
# GPU reads of the host, a worker asks nothing
_ROUND = {"cuStreamWaitValue64", "cuStreamWriteValue64", "cuLaunchKernel"}
_LOOKS = {"cuStreamQuery", "cuPointerGetAttributes", "cuMemGetAddressRange"}
# one after everything that streams of others do
FENCE = {"cuCtxSynchronize": 1}
# of a piece: which memory is mapped there now
_IDENTIFIES = {"cuMemRetainAllocationHandle", "cuMemRelease"}


def check_worker(count: Counter[str]) -> None:
    """A wait for what has come already is none; and there may be a record that lets go of what
    launches used."""
    assert set(count) <= _ROUND | {"cuStreamQuery"} | set(FENCE), count
    assert FENCE.items() <= count.items(), count
    assert count["cuLaunchKernel"] == 1, count
    assert count["cuStreamWaitValue64"] <= 1, count
    assert 1 <= count["cuStreamWriteValue64"] <= 2, count


def check_rank(count: Counter[str], workers: int) -> None:
    """workers: that the rank serves, each of which is told once."""
    assert set(count) <= {"cuStreamWriteValue64"} | _LOOKS | _IDENTIFIES | set(FENCE), count
    assert FENCE.items() <= count.items(), count
    assert count["cuStreamWriteValue64"] == workers, count
