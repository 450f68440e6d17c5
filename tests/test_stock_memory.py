"""Where the buckets of engines without wsync lie when the weights are on a GPU, which
tests/fakecuda plays."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
from support import fakecuda, stock_memory_cases
from support.procs import Ranks

import wsync


@contextlib.contextmanager
def _trainer(**others: str) -> Iterator[Ranks]:
    # it does not reach the host's memory by itself
    settings = {"WSYNC_FAKE_CUDA_PAGEABLE": "0", "WSYNC_DEVICE": "host", **others}
    settings = fakecuda.coherent() | settings
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with Ranks(1, path=sys.path) as started:
            yield started


@pytest.fixture(scope="module")
def trainer() -> Iterator[Ranks]:
    with _trainer() as started:
        yield started


@pytest.mark.parametrize(
    ("workers", "memory", "offsets", "where"),
    [
        (1, None, None, "host"),  # an engine that may be anywhere
        (1, None, [0], "gpu"),  # one worker on the trainer's GPU
        (1, "host", [0], "host"),
        (2, None, None, "host"),
        (2, "gpu", None, "gpu"),
    ],
)
def test_buckets_lie_where_the_engine_reaches_them(
    workers: int, memory: str | None, offsets: list[int] | None, where: str, trainer: Ranks
) -> None:
    (found,) = trainer.run(stock_memory_cases.update, workers, memory, offsets, timeout=120)
    assert found == ("", [where], where == "host")


@pytest.mark.parametrize("known", ["0", "1"], ids=["unknown", "the device's"])
def test_a_tensor_whose_allocator_has_paused_is_named(known: str) -> None:
    with _trainer(WSYNC_FAKE_CUDA_RESERVED=known) as paused:
        (said,) = paused.run(stock_memory_cases.paused, timeout=120)
    assert said[1] == said[3] == ""
    for text in (said[0], said[2]):
        assert "StateError: " in text and "b: no memory of GPU 0 lies at its address" in text


def test_a_choice_that_there_is_not_is_named() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match="stock_memory='file' is not one of"):
        wsync.Options(stock_memory="file")
