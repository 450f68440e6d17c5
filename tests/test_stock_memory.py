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


def _updated(
    trainer: Ranks, workers: int, memory: str | None, offsets: list[int] | None
) -> tuple[str, list[str], bool]:
    (found,) = trainer.run(stock_memory_cases.update, workers, memory, offsets, timeout=120)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_may_be_anywhere_gets_host_memory(workers: int, trainer: Ranks) -> None:
    assert _updated(trainer, workers, None, None) == ("", ["host"], True)


def test_an_engine_of_one_worker_on_the_trainer_s_gpu_gets_memory_of_it(trainer: Ranks) -> None:
    assert _updated(trainer, 1, None, [0]) == ("", ["gpu"], False)


def test_an_engine_whose_other_workers_have_other_gpus_gets_host_memory(trainer: Ranks) -> None:
    assert _updated(trainer, 1, "host", [0]) == ("", ["host"], True)


@pytest.mark.parametrize("workers", [1, 2])
def test_memory_of_the_gpu_can_be_asked_for(workers: int, trainer: Ranks) -> None:
    assert _updated(trainer, workers, "gpu", None) == ("", ["gpu"], False)


def test_an_update_may_run_in_torchs_inference_mode(trainer: Ranks) -> None:
    assert trainer.run(stock_memory_cases.inferring, timeout=120) == [("", ["gpu"], False)]


@pytest.mark.parametrize("known", ["0", "1"], ids=["unknown", "the device's"])
def test_a_tensor_whose_allocator_has_paused_is_named(known: str) -> None:
    with _trainer(WSYNC_FAKE_CUDA_RESERVED=known) as paused:
        (said,) = paused.run(stock_memory_cases.paused, timeout=120)
    assert said[1] == said[3] == ""
    for text in (said[0], said[2]):
        assert "StateError: " in text and "b: no memory of GPU 0 lies at its address" in text


def test_registered_memory_is_given_back(trainer: Ranks) -> None:
    assert trainer.run(stock_memory_cases.registered, timeout=120) == [0]


def test_a_choice_that_there_is_not_is_named() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match="stock_memory='file' is none of"):
        wsync.Options(stock_memory="file")
