"""Memory, events and streams of one device in the hands of another: the host's, and two GPUs that
tests/fakecuda plays; and memory that is not there."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
from support import device_cases, fakecuda
from support.procs import Ranks


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fakecuda.coherent(devices=2).items():
            patch.setenv(name, value)
        with Ranks(1, path=sys.path) as started:
            yield started


def _said(process: Ranks, case: Callable[[], list[str]]) -> list[str]:
    (found,) = process.run(case, timeout=120)
    return list(found)


def _expected(what: str, calls: int) -> list[str]:
    """What so many calls say of each pair of devices, in the order of the cases."""
    names = ("the host", "GPU 0", "GPU 1")
    return [
        f"InvalidArgumentError: {what} is on {mine}, the stream on {other}"
        for mine, other in itertools.permutations(names, 2)
        for _ in range(calls)
    ]


def test_a_stream_takes_no_event_of_another_device(process: Ranks) -> None:
    found = _said(process, device_cases.foreign_events)
    assert sorted(found) == sorted(_expected("the event", 2))


def test_a_session_takes_no_stream_of_another_device(process: Ranks) -> None:
    assert _said(process, device_cases.foreign_sessions) == _expected("the session", 4)


def test_no_thread_writes_memory_of_a_gpu_to_a_file(process: Ranks) -> None:
    (text,) = process.run(device_cases.file_of_a_gpu, timeout=120)
    assert text == (
        "InvalidArgumentError: memory of GPU 0 is copied on a stream of it, not on the host"
    )


def test_an_exchange_takes_no_stream_of_another_device(process: Ranks) -> None:
    assert _said(process, device_cases.foreign_exchanges) == _expected("the exchange", 2)


def test_addresses_where_an_allocator_has_paused_have_no_memory(process: Ranks) -> None:
    assert process.run(device_cases.tensors_with_memory, timeout=120) == [[True, True, False]]
