"""What else a process does while load_weights is learnt, in other threads, and what goes on
afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from support.loads_in_time import PATIENCE, Module, delivered, in_time, plain
from support.two_weights import Pairs
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from wsync._core import LayoutBuilder
from wsync.engine.learn.recorded_loader import RecordedLoader

# --- other threads meanwhile and afterwards -----------------------------------------------------


def test_threads_that_a_load_has_started_leave_no_flags_of_torch_behind() -> None:
    released, threads = threading.Event(), list[threading.Thread]()

    def load(module: Module, pairs: Pairs) -> None:
        threads.append(threading.Thread(target=released.wait))
        threads[-1].start()
        plain(module, pairs)

    try:
        assert in_time(lambda: delivered(load)).reason == ""
    finally:
        released.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not is_in_torch_dispatch_mode()


def test_a_task_that_goes_on_when_all_is_loaded_does_its_own_work() -> None:
    released, modules, works = threading.Event(), list[Module](), list[Any]()

    def work() -> None:
        released.wait()
        modules[0].a.data.fill_(7)

    def load(module: Module, pairs: Pairs) -> None:
        modules.append(module)
        if not works:
            works.append(pool.submit(work))
        plain(module, pairs)

    with ThreadPoolExecutor(1) as pool:
        try:
            in_time(lambda: delivered(load))
        finally:
            released.set()
        works[0].result(timeout=PATIENCE)
    assert modules[0].a.eq(7).all()


# --- what load_weights finds --------------------------------------------------------------------


def test_load_weights_and_its_tasks_are_tried_with_what_is_set_for_the_thread_that_learns() -> None:
    word: ContextVar[str] = ContextVar("word", default="none")
    found = set[Any]()

    def note() -> None:
        place = torch.empty(1).device.type
        found.add((word.get(), place, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    def load(module: Module, pairs: Pairs) -> None:
        note()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(note)
        plain(module, pairs)

    def learn() -> str:
        builder = LayoutBuilder()
        for name in "ab":
            builder.add_tensor(name, "float32", (8, 8))
        loader = RecordedLoader(Module(load))
        word.set("set")
        with torch.inference_mode(), torch.device("meta"):
            loader.learn(builder.build())
        return loader.reason

    assert in_time(learn) == ""
    assert found == {("set", "meta", False, True)}
